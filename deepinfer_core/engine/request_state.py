"""A request that is alive: its sequences, streams and times, and in the end its result."""

from __future__ import annotations

from concurrent.futures import Future

from attrs import define, field

from deepinfer_core.engine.constrained import Constrained, Mask, only
from deepinfer_core.engine.output_stream import OutputStream
from deepinfer_core.engine.thought import Thought
from deepinfer_core.interfaces.constraint import Matcher
from deepinfer_core.requests import Output, Request, RequestOutput, TokenLogprob
from deepinfer_core.sampling.rows import TokenHistory
from deepinfer_core.sequence import Phase, Sequence


@define
class Member:
    """One output of a request: host state, stream, and what penalties, limits and grammars need."""

    sequence: Sequence
    stream: OutputStream
    history: TokenHistory | None
    thought: Thought | None = None
    constrained: Constrained | None = None

    def mask(self, ahead: tuple[int, ...], vocab_size: int) -> Mask | None:
        """Which tokens may follow some that are not known to be the output's yet.

        Returns:
            As ``RowParams.mask``; None where every token may.
        """
        held = None if self.constrained is None else self.constrained.mask(ahead)
        if held is not None or self.thought is None:
            return held
        forced = self.thought.after(ahead).must_draw
        return None if forced is None else only(forced, vocab_size)


@define
class RequestState:
    """Everything the engine keeps of a request.

    Attributes:
        request: as submitted.
        members: one for each output.
        arrival_s: on the engine's clock.
        deadline_s: when it ends at the latest, None = never.
        started_s: first step it took part in.
        first_token_s: when its first token became known.
        grammar: the matcher its outputs start from, on its way; None without a grammar.
        num_drafted: drafts verified.
        num_accepted: drafts accepted.
        prompt_logprobs: position -> report of that prompt token.
        abort: its owner wants it to end.
    """

    request: Request
    members: list[Member]
    arrival_s: float
    deadline_s: float | None
    started_s: float | None = None
    first_token_s: float | None = None
    grammar: Future[Matcher] | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    prompt_logprobs: dict[int, TokenLogprob] = field(factory=dict)
    abort: bool = False

    @property
    def alive(self) -> list[Member]:
        """Outputs that are not finished."""
        return [m for m in self.members if m.sequence.phase is not Phase.FINISHED]

    def result(self, now_s: float, *, invariant: bool) -> RequestOutput:
        """The complete result."""
        first = self.members[0].sequence
        outputs: list[Output] = [member.stream.output() for member in self.members]
        errors = [output.error for output in outputs if output.error]
        scored: tuple[TokenLogprob | None, ...] = ()
        if self.request.params.prompt_logprobs is not None:
            length = len(self.request.prompt_token_ids)
            scored = tuple(self.prompt_logprobs.get(position) for position in range(length))
        return RequestOutput(
            request_id=self.request.request_id,
            prompt_token_ids=self.request.prompt_token_ids,
            outputs=tuple(outputs),
            prompt_logprobs=scored,
            cached_tokens=first.cached_tokens,
            cached_tier=first.cached_tier,
            exact=all(member.sequence.exact for member in self.members),
            invariant=invariant,
            drafted=self.num_drafted,
            accepted=self.num_accepted,
            ttft_s=None if self.first_token_s is None else self.first_token_s - self.arrival_s,
            total_s=now_s - self.arrival_s,
            queue_s=(self.started_s if self.started_s is not None else now_s) - self.arrival_s,
            error=errors[0] if len(errors) == len(outputs) and errors else None,
        )
