"""`ScriptedEngine`: an engine without a model, for tests of what stands in front of one.

One character is one token. An output repeats its prompt, starting with the character numbered by
the output's index, and ends after one round of it, so that every result can be told in advance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from attrs import define, field, frozen

from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import AdmissionError, EngineClosedError, EngineError, RequestError
from deepinfer_core.interfaces.recipe import Recipe
from deepinfer_core.requests import (
    Delta,
    FinishReason,
    Output,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)

END = 256
"""The end token; ids below it are characters."""


class CharacterCodec:
    """A tokenizer whose token ids are the first 256 characters."""

    vocab_size = END + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """One id per character.

        Raises:
            RequestError: a character beyond the first 256.
        """
        try:
            return list(text.encode("latin-1"))
        except UnicodeEncodeError as error:
            raise RequestError(f"no token for character {text[error.start]!r}") from error

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """One character per id."""
        return bytes(token for token in ids if token < END).decode("latin-1")


@frozen(kw_only=True)
class ScriptedStats:
    """What `ScriptedEngine.stats` returns."""

    running: int
    waiting: int
    generated_tokens: int


@define
class _Alive:
    request: Request
    tokens: list[list[int]]
    open: set[int]
    first_s: float | None = None
    started_s: float | None = None
    aborted: bool = False
    outputs: dict[int, Output] = field(factory=dict)


class ScriptedEngine:
    """An engine that repeats prompts, one token per output and step.

    Args:
        config: limits of the engine; default as `EngineConfig`.
        max_model_len: tokens a sequence may have.
        poison: requests whose prompt contains this text fail after their first token.
        before_step: called at the start of each step with the step's number; may wait, or raise an
            EngineError to make the engine fail.
        clock: seconds.
        recipe: what `Engine.recipe` would be.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        max_model_len: int = 1000,
        poison: str = "\x00",
        before_step: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        recipe: Recipe | None = None,
    ) -> None:
        self.config = config or EngineConfig()
        self.tokenizer = CharacterCodec()
        self.max_model_len = max_model_len
        self.steps = 0
        self.closed = False
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.most_alive = 0
        self._poison = poison
        self._before_step = before_step
        self.clock = clock
        self._alive: dict[str, _Alive] = {}
        self._results: dict[str, RequestOutput] = {}
        self._generated = 0
        self.failure: EngineError | None = None
        self._recipe = recipe

    @property
    def has_work(self) -> bool:
        """Whether any request is alive."""
        return bool(self._alive)

    @property
    def recipe(self) -> Recipe:
        """What it was made with.

        Raises:
            EngineError: nothing.
        """
        if self._recipe is None:
            raise EngineError("this engine was made without a chat recipe")
        return self._recipe

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """``role:content`` lines."""
        text = "\n".join(f"{message['role']}:{message.get('content', '')}" for message in messages)
        return self.tokenizer.encode(text)

    def prepare(self, params: SamplingParams) -> Future[Any] | None:
        """Compile grammars that are not "bad", at once.

        Raises:
            RequestError: the source is "impossible".
        """
        structured = params.structured
        if structured is None:
            return None
        if structured.source == "impossible":
            raise RequestError("nothing compiles grammars here")
        future: Future[Any] = Future()
        if structured.source == "bad":
            future.set_exception(RequestError("the grammar is bad"))
        else:
            future.set_result(None)
        return future

    def submit(self, request: Request) -> None:
        """Queue a request, as `Engine.submit`."""
        self._check_usable()
        request.check_vocabulary(CharacterCodec.vocab_size)
        if request.request_id in self._alive:
            raise RequestError(f"request id {request.request_id!r} is in use")
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise AdmissionError(
                f"the prompt has {len(request.prompt_token_ids)} tokens, "
                f"the context {self.max_model_len}"
            )
        if self.stats().waiting > self.config.engine.max_waiting:
            raise AdmissionError("the queue is full", busy=True)
        outputs = range(request.params.n)
        self.submitted.append(request)
        self._alive[request.request_id] = _Alive(request, [[] for _ in outputs], set(outputs))
        self.most_alive = max(self.most_alive, len(self._alive))

    def abort(self, request_id: str) -> bool:
        """End a request at the next step."""
        self.aborted.append(request_id)
        if request_id not in self._alive:
            return False
        self._alive[request_id].aborted = True
        return True

    def step(self, on_launch: Callable[[], None] | None = None) -> list[Delta]:
        """Give every running output one token."""
        if self.closed:
            raise EngineClosedError("the engine is closed")
        self.steps += 1
        if on_launch is not None:
            on_launch()
        deltas: list[Delta] = []
        try:
            if self._before_step is not None:
                self._before_step(self.steps)
        except EngineError as error:
            self.failure = error
            for alive in list(self._alive.values()):
                deltas += self._end(alive, FinishReason.ERROR, f"the engine failed: {error}")
            return deltas
        for alive in list(self._alive.values())[: self.config.engine.max_sequences]:
            deltas += self._advance(alive)
        for alive in [alive for alive in self._alive.values() if alive.aborted]:
            deltas += self._end(alive, FinishReason.ABORT)
        return deltas

    def take_result(self, request_id: str) -> RequestOutput | None:
        """The complete result, once."""
        return self._results.pop(request_id, None)

    def stats(self) -> ScriptedStats:
        """Counters."""
        running = min(len(self._alive), self.config.engine.max_sequences)
        waiting = len(self._alive) - running
        return ScriptedStats(running=running, waiting=waiting, generated_tokens=self._generated)

    def close(self) -> None:
        """Drop everything."""
        self._alive.clear()
        self.closed = True

    def _check_usable(self) -> None:
        if self.closed:
            raise EngineClosedError("the engine is closed")
        if self.failure is not None:
            raise EngineError(f"the engine has failed: {self.failure}")

    def _advance(self, alive: _Alive) -> list[Delta]:
        now = self.clock()
        alive.started_s = now if alive.started_s is None else alive.started_s
        params, prompt = alive.request.params, alive.request.prompt_token_ids
        if alive.aborted:
            return []
        if alive.request.deadline_s is not None and now >= alive.request.deadline_s:
            return self._end(alive, FinishReason.DEADLINE)
        if params.max_tokens == 0:
            return self._end(alive, FinishReason.LENGTH)
        if alive.tokens[0] and self._poison in self.tokenizer.decode(prompt):
            return self._end(alive, FinishReason.ERROR, "the prompt is poisoned")
        alive.first_s = now if alive.first_s is None else alive.first_s
        return [self._next(alive, index) for index in sorted(alive.open)]

    def _next(self, alive: _Alive, index: int) -> Delta:
        request, params = alive.request, alive.request.params
        prompt, tokens = request.prompt_token_ids, alive.tokens[index]
        ends = len(tokens) == len(prompt) and not params.ignore_eos
        token = END if ends else prompt[(index + len(tokens)) % len(prompt)]
        tokens.append(token)
        self._generated += 1
        total = len(prompt) + len(tokens)
        full = total >= self.max_model_len or len(tokens) == params.max_tokens
        reason = FinishReason.STOP if ends else FinishReason.LENGTH if full else None
        logprobs = () if params.logprobs is None else (_certain(token),)
        if reason is not None:
            self._close_output(alive, index, reason)
        return Delta(
            request_id=request.request_id,
            index=index,
            token_ids=(token,),
            text=self.tokenizer.decode([token]) if params.detokenize else "",
            logprobs=logprobs,
            finish_reason=reason,
            stop_reason=END if ends else None,
        )

    def _end(self, alive: _Alive, reason: FinishReason, error: str | None = None) -> list[Delta]:
        deltas = []
        for index in sorted(alive.open):
            self._close_output(alive, index, reason, error)
            deltas.append(
                Delta(
                    request_id=alive.request.request_id,
                    index=index,
                    finish_reason=reason,
                    error=error,
                )
            )
        return deltas

    def _close_output(
        self, alive: _Alive, index: int, reason: FinishReason, error: str | None = None
    ) -> None:
        request, tokens = alive.request, tuple(alive.tokens[index])
        wanted = request.params.logprobs is not None
        alive.open.discard(index)
        alive.outputs[index] = Output(
            index=index,
            text=self.tokenizer.decode(tokens) if alive.request.params.detokenize else "",
            token_ids=tokens,
            finish_reason=reason,
            stop_reason=END if reason is FinishReason.STOP else None,
            logprobs=tuple(_certain(token) for token in tokens) if wanted else (),
            error=error,
        )
        if not alive.open:
            del self._alive[request.request_id]
            self._results[request.request_id] = self._result(alive, error)

    def _result(self, alive: _Alive, error: str | None) -> RequestOutput:
        request, now = alive.request, self.clock()
        scored: tuple[TokenLogprob | None, ...] = ()
        if request.params.prompt_logprobs is not None:
            scored = (None, *(_certain(token) for token in request.prompt_token_ids[1:]))
        started = now if alive.started_s is None else alive.started_s
        return RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            outputs=tuple(alive.outputs[index] for index in sorted(alive.outputs)),
            prompt_logprobs=scored,
            invariant=True,
            ttft_s=None if alive.first_s is None else alive.first_s - request.arrival_s,
            total_s=now - request.arrival_s,
            queue_s=started - request.arrival_s,
            error=error,
        )


def _certain(token: int) -> TokenLogprob:
    return TokenLogprob(token_id=token, logprob=-0.5, rank=1, top=((token, -0.5),))
