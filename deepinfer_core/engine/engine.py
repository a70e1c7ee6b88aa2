"""Engine: requests in, deltas out, one round a step.

A round is: schedule step N, launch its forward pass, look at the tokens of step N - 1 while it
runs, then draw the tokens of N. With ``overlap`` off the tokens of N are looked at in the same
step; results are the same. ``assembly`` builds the parts, ``round`` enforces limits, ``stepper``
runs steps and finds offenders; this module keeps the books.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from random import Random
from typing import TYPE_CHECKING, Any

import attrs

from deepinfer_core import values
from deepinfer_core.components import Slot
from deepinfer_core.engine.admission import Limits, admit
from deepinfer_core.engine.constrained import Constrained
from deepinfer_core.engine.grammars import Grammars
from deepinfer_core.engine.output_stream import OutputStream
from deepinfer_core.engine.parts import EngineParts
from deepinfer_core.engine.request_state import Member, RequestState
from deepinfer_core.engine.round import EngineRound, undo_grant
from deepinfer_core.engine.speculation import speculator
from deepinfer_core.engine.stats import Counters, EngineStats
from deepinfer_core.engine.step_times import StepTimes
from deepinfer_core.engine.stepper import Drawn, Flight, Stepper
from deepinfer_core.engine.thought import Thought
from deepinfer_core.engine.watch import Watch
from deepinfer_core.errors import (
    DeviceLostError,
    EngineClosedError,
    EngineError,
    RequestError,
)
from deepinfer_core.log import get_logger
from deepinfer_core.requests import (
    Delta,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
)
from deepinfer_core.sampling import RowFailure, RowParams, TokenHistory, output_seed
from deepinfer_core.sequence import Phase, Sequence
from deepinfer_core.text.detokenizer import StreamDetokenizer

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig
    from deepinfer_core.interfaces.model import ModelSpec
    from deepinfer_core.interfaces.recipe import Recipe
    from deepinfer_core.plan import Plan
    from deepinfer_core.plugins import PluginHost
    from deepinfer_core.text.tokenizer import Tokenizer

KEPT_RESULTS = 4096
"""Results kept for ``take_result``; the oldest go first."""

STALLED_ROUNDS = 500
"""Rounds in a row without a grant, with nothing in flight, after which the engine gives up."""

STALLED_PAUSE_S = 0.002
"""Pause after such a round, and after one that only waits for a grammar."""

LOADING_PAUSE_S = 0.0005
"""Pause after a round in which all that there is waits for pages from a store."""

SCHEDULER_TRIES = 3
"""Rounds in a row a scheduler may fail before the engine gives up."""


class Engine:
    """One model on one device. Every call comes from one thread.

    Args:
        parts: what ``deepinfer_core.engine.assembly`` built.
        clock: seconds, monotonic.
    """

    def __init__(self, parts: EngineParts, clock: Callable[[], float] = time.monotonic) -> None:
        values.instance("parts", parts, EngineParts, "EngineParts (Engine.from_config makes them)")
        self._parts, self._clock = parts, clock
        options = parts.config.engine
        self._overlap = parts.overlap
        self._limits = Limits(
            vocab_size=parts.spec.vocab_size,
            max_length=parts.max_length,
            capacity=parts.capacity,
            max_waiting=options.max_waiting,
            decoder_keep=parts.spec.decoder_keep,
        )
        self._watch = Watch(parts.observers, clock)
        self._speculator = speculator(parts, clock, self._watch.event)
        self._grammars = Grammars(
            parts.constraint, options.grammar_timeout_s, options.grammar_max_bytes
        )
        self._stepper = Stepper(
            accelerator=parts.accelerator,
            executor=parts.executor,
            cache=parts.cache,
            spec=parts.spec,
            row_params=self._row_params,
            retries=options.step_retries,
            draw=parts.draw,
            speculator=self._speculator,
            verification=options.verification,
            overlap=parts.overlap,
        )
        self._random = Random(parts.config.seed)
        self._requests: dict[str, RequestState] = {}
        self._members: dict[int, tuple[RequestState, Member]] = {}
        self._running: list[Sequence] = []
        self._waiting: list[Sequence] = []
        self._compiling: list[RequestState] = []
        self._flight: Flight | None = None
        self._launched_s = 0.0
        self._outbox: deque[Delta] = deque()
        self._results: OrderedDict[str, RequestOutput] = OrderedDict()
        self._counters = Counters()
        self._next_id = 0
        self._scheduler_failures = 0
        self._stalled_rounds = 0
        self._failure: EngineError | None = None
        self._closed = False

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        plugins: Items[object] = (),
        *,
        discover: bool = True,
        environ: Mapping[str, str] | None = None,
        progress: Any = None,
        host: PluginHost | None = None,
    ) -> Engine:
        """Compose, read the weights, and be ready.

        Args:
            config: what to build.
            plugins: modules or objects that are plugins besides the installed ones.
            discover: whether installed plugins take part.
            environ: where ``DEEPINFER_ACCELERATOR`` and cache folders are looked up; None = the
                process's environment, an empty mapping = nowhere.
            progress: a ``deepinfer_core.hub`` progress to report downloads to.
            host: plugins that are loaded already, instead of ``plugins`` and ``discover``; whoever
                made it has told its user about broken ones.

        Raises:
            DeepInferError: whatever makes the engine impossible, before or while it is built.
        """
        from deepinfer_core.engine.assembly import assemble

        return cls(
            assemble(
                config, plugins, discover=discover, environ=environ, progress=progress, host=host
            )
        )

    # ------------------------------------------------------------------------------- facts

    @property
    def config(self) -> EngineConfig:
        """What the engine was made from."""
        return self._parts.config

    @property
    def plan(self) -> Plan:
        """What was chosen, with the details known now."""
        return self._parts.plan

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self._parts.spec

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            EngineError: the checkpoint carries none; only token ids can be used.
        """
        if self._parts.tokenizer is None:
            raise EngineError(f"this model has no tokenizer: {self._parts.tokenizer_error}")
        tokenizer: Tokenizer = self._parts.tokenizer
        return tokenizer

    @property
    def clock(self) -> Callable[[], float]:
        """The engine's clock, for arrivals and deadlines."""
        return self._clock

    def chat(self, messages: Items[Mapping[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation, ready to be answered.

        Raises:
            RequestError: the messages cannot be rendered.
            EngineError: no recipe is composed.
        """
        return self.recipe.render(messages, **options)

    @property
    def recipe(self) -> Recipe:
        """What renders conversations, and the wire formats it offers to servers.

        Raises:
            EngineError: none is composed, or the model has no tokenizer.
        """
        if self._parts.recipe is None:
            raise EngineError("this engine was made without a chat recipe")
        return self._parts.recipe()

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do."""
        return bool(self._requests or self._outbox or self._flight)

    def step_times(self) -> StepTimes:
        """What steps cost here by their number of token rows, measured when asked."""
        parts = self._parts
        return StepTimes(parts.accelerator, parts.executor, parts.spec, time.perf_counter)

    def stats(self) -> EngineStats:
        """What the engine is doing."""
        return EngineStats(
            running=len(self._running),
            waiting=len(self._waiting),
            pages=self._parts.cache.usage(),
            kv_store=self._parts.cache.stats(),
            **attrs.asdict(self._counters),
        )

    # ------------------------------------------------------------------------------- requests

    def submit(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it is wrong, or an alive request has its id.
            AdmissionError: it can never fit, or too many are waiting.
            EngineClosedError: the engine was closed.
            EngineError: the engine has failed.

        A grammar is compiled meanwhile; a bad one ends the request with an error (``prepare`` tells
        earlier).
        """
        self._check_alive()
        values.instance("request", request, Request, "a Request")
        if request.request_id in self._requests:
            raise RequestError(
                f"request {request.request_id!r} is alive already; choose another request_id"
            )
        limit = admit(request, self._limits, len(self._waiting) + len(self._compiling))
        grammar = self.prepare(request.params)
        now_s = self._clock()
        deadline_s, default = request.deadline_s, self.config.engine.deadline_s
        if deadline_s is None and default is not None:
            deadline_s = now_s + default
        state = RequestState(
            request=request,
            members=[],
            arrival_s=request.arrival_s or now_s,
            deadline_s=deadline_s,
            grammar=grammar,
        )
        seed = request.params.effective_seed(self._random.getrandbits(64))
        for index in range(request.params.n):
            self._add_member(state, index, limit, output_seed(seed, index))
        self._requests[request.request_id] = state
        self._counters.num_requests += 1
        self._watch.event(
            "request.submitted",
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
        )
        if grammar is not None:
            self._compiling.append(state)
            self._start_compiled()

    def prepare(self, params: SamplingParams) -> concurrent.futures.Future[Any] | None:
        """Start to compile what a request will need; may be called from any thread.

        Returns:
            What ends when that is there, with a RequestError if the grammar is bad; None if there
            is nothing to wait for.

        Raises:
            RequestError: structured output is asked for and cannot be had.
        """
        values.instance("params", params, SamplingParams, "SamplingParams")
        return None if params.structured is None else self._grammars.prepare(params.structured)

    def _start_compiled(self) -> None:
        """Let requests go on whose grammar is there; end those whose grammar is bad."""
        compiling, self._compiling = self._compiling, []
        for state in compiling:
            if state.grammar is not None and not state.grammar.done():
                if state.alive:
                    self._compiling.append(state)
                continue
            try:
                self._constrain(state)
            except Exception as error:
                for member in state.alive:
                    self._finish(member.sequence, FinishReason.ERROR, str(error))

    def _constrain(self, state: RequestState) -> None:
        structured = state.request.params.structured
        if state.grammar is None or structured is None:
            return
        matcher = state.grammar.result()
        for member in state.alive:
            member.constrained = Constrained(
                matcher.fork(), structured, self._limits.vocab_size, self._parts.eos_token_ids
            )
        for member in state.alive:
            if not self._waits_for_sibling(member.sequence):
                member.sequence.phase = Phase.WAITING
                self._waiting.append(member.sequence)
        self._waiting.sort(key=lambda s: (s.arrival_s, s.sequence_id))

    @staticmethod
    def _waits_for_sibling(sequence: Sequence) -> bool:
        """Whether it shares the first output's prompt once that is computed."""
        return sequence.index > 0 and sequence.num_prompt_tokens > 1

    def _add_member(self, state: RequestState, index: int, limit: int, seed: int) -> None:
        request, params = state.request, state.request.params
        sequence = Sequence(
            sequence_id=self._next_id,
            request=request,
            index=index,
            arrival_s=state.arrival_s,
            limit=limit,
            seed=seed,
            decoder_keep=self._parts.spec.decoder_keep,
        )
        self._next_id += 1
        stream = OutputStream(
            request.request_id, index, params, self._parts.eos_token_ids, self._detokenizer(request)
        )
        penalised = RowParams(params=params, seed=0, position=0).has_penalties
        history = TokenHistory(request.prompt_token_ids) if penalised else None
        thinking = params.thinking_limit
        thought = None if thinking is None else Thought.begin(thinking)
        member = Member(sequence, stream, history, thought)
        state.members.append(member)
        self._members[sequence.sequence_id] = state, member
        if self._waits_for_sibling(sequence) or state.grammar is not None:
            sequence.phase = Phase.HELD
        else:
            self._waiting.append(sequence)

    def _detokenizer(self, request: Request) -> StreamDetokenizer | None:
        make = self._parts.detokenizer
        if make is None or not request.params.detokenize:
            return None
        return make(request.params.skip_special_tokens, request.prompt_token_ids)

    def abort(self, request_id: str) -> bool:
        """End a request at the next step; False if it is not alive."""
        state = self._requests.get(values.text("request_id", request_id))
        if state is None:
            return False
        state.abort = True
        return True

    def take_result(self, request_id: str) -> RequestOutput | None:
        """The complete result, once, after the last delta of a request came out."""
        return self._results.pop(request_id, None)

    # ------------------------------------------------------------------------------- the round

    def step(self, on_launch: Callable[[], None] | None = None) -> list[Delta]:
        """Run one round and return what it added; nothing when idle.

        Args:
            on_launch: see ``EngineSurface.step``.

        Raises:
            EngineClosedError: the engine was closed.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")
        try:
            if self._failure is None:
                self._round(on_launch)
        except EngineError as error:
            self._fail(error)
        except Exception as error:  # a fault of our own must not leave streams hanging
            get_logger("engine").error("engine.failed", exc_info=error)
            self._fail(EngineError(f"internal error: {type(error).__name__}: {error}"))
        deltas = list(self._outbox)
        self._outbox.clear()
        return deltas

    def _round(self, on_launch: Callable[[], None] | None) -> None:
        self._end_unwanted()
        if self._compiling:
            self._start_compiled()
        flight = self._schedule(on_launch)
        if self._flight is not None:
            self._look_at(self._flight)
            self._flight = None
        if flight is None:
            self._wait_for_grammars()
            return
        self._stepper.complete(flight)
        self._count_time(flight)
        self._settle(flight)
        if self._overlap:
            self._flight = flight
        else:
            self._look_at(flight)

    def _schedule(self, on_launch: Callable[[], None] | None) -> Flight | None:
        """Ask the policy and launch what it granted."""
        running = [s for s in self._running if s.wants_more]
        waiting = [s for s in self._waiting if s.wants_more]
        if not running and not waiting:
            return None
        options = self.config.engine
        round_ = EngineRound(
            cache=self._parts.cache,
            now_s=self._clock(),
            random=self._random,
            running=running,
            waiting=waiting,
            max_tokens=options.max_batch_tokens,
            max_sequences=options.max_sequences,
        )
        try:
            self._parts.scheduler.schedule(round_)
        except Exception as error:
            round_.undo()
            self._requeue()
            self._scheduler_failures += 1
            self._watch.event("scheduler.failed", error=str(error))
            if self._scheduler_failures >= SCHEDULER_TRIES:
                raise EngineError(
                    f"{self._scheduler_name} failed {SCHEDULER_TRIES} times in a row: "
                    f"{type(error).__name__}: {error}"
                ) from error
            return None
        self._scheduler_failures = 0
        for sequence in round_.preempted:
            self._counters.num_preemptions += 1
            self._forget_drafts(sequence)
            self._watch.event("sequence.preempted", request_id=sequence.request.request_id)
        for sequence in round_.restarted:
            self._forget_drafts(sequence)
        self._requeue()
        if not round_.grants:
            self._note_stall(running, waiting)
            return None
        self._stalled_rounds = 0
        self._counters.num_steps += 1
        for grant in round_.grants.values():
            state, _ = self._members[grant.sequence.sequence_id]
            if state.started_s is None:
                state.started_s = round_.now_s
        if self._speculator is not None:
            self._speculator.add_drafts(round_)
        self._launched_s = self._clock()
        grants = list(round_.grants.values())
        return self._stepper.launch(self._counters.num_steps, grants, on_launch)

    def _count_time(self, flight: Flight) -> None:
        """Book how long a step took, and tell whoever plans with it."""
        step_s = self._clock() - self._launched_s
        if self._speculator is not None:
            step_s -= self._speculator.learn_s
            if not flight.repeated:
                accepted = sum(drawn.num_accepted for drawn in flight.drawn)
                self._speculator.timed(flight.num_rows, step_s, accepted)
            self._counters.draft_s = self._speculator.spent_s
        self._counters.step_s += step_s

    def _wait_for_grammars(self) -> None:
        """Nothing runs: rest until a grammar is there, or for a moment."""
        futures = [s.grammar for s in self._compiling if s.grammar is not None]
        if futures and not (self._running or self._waiting):
            concurrent.futures.wait(
                futures, STALLED_PAUSE_S, return_when=concurrent.futures.FIRST_COMPLETED
            )

    def _note_stall(self, running: Items[Sequence], waiting: Items[Sequence]) -> None:
        """Nobody was granted anything; a policy that goes on like that would hang its users."""
        ready = [
            s for s in waiting if not s.opened or self._parts.cache.ready(s.sequence_id) is not None
        ]
        if self._flight is not None:
            return
        if not (running or ready):
            time.sleep(LOADING_PAUSE_S)
            return
        self._stalled_rounds += 1
        if self._stalled_rounds >= STALLED_ROUNDS:
            raise EngineError(
                f"{self._scheduler_name} granted nothing in {STALLED_ROUNDS} rounds, though "
                f"{len(running)} sequences run and {len(ready)} wait; set scheduler.use to another"
            )
        time.sleep(STALLED_PAUSE_S)

    @property
    def _scheduler_name(self) -> str:
        part = self._parts.plan.part(Slot.SCHEDULER)
        named = "" if part is None else f" {part.name!r} ({part.component.plugin})"
        return f"the scheduler{named}"

    def _requeue(self) -> None:
        """Put every sequence on the list its phase says; both lists keep their order."""
        moved = [s for s in self._running if s.phase is Phase.WAITING]
        admitted = [s for s in self._waiting if s.phase is Phase.RUNNING]
        if moved or any(s.phase is not Phase.RUNNING for s in self._running):
            self._running = [s for s in self._running if s.phase is Phase.RUNNING]
        if admitted or any(s.phase is not Phase.WAITING for s in self._waiting):
            self._waiting = [s for s in self._waiting if s.phase is Phase.WAITING]
        self._running += admitted
        if moved:
            self._waiting += moved
            self._waiting.sort(key=lambda s: (s.arrival_s, s.sequence_id))

    def _settle(self, flight: Flight) -> None:
        """The step is over on the device: books, forks, offenders."""
        self._counters.num_computed_tokens += flight.num_rows
        if self._speculator is not None:  # the next step's drafts follow these tokens
            self._learn(flight)
        for grant in flight.returned:
            undo_grant(self._parts.cache, grant)
            if grant.admitted:
                self._forget_drafts(grant.sequence)
        if flight.failed:
            self._counters.num_failed_steps += 1
        for sequence, message in flight.failed:
            self._watch.event("step.failed", error=message)
            self._finish(sequence, FinishReason.ERROR, message)
        for grant in flight.grants:
            sequence = grant.sequence
            has_siblings = sequence.index == 0 and sequence.request.params.n > 1
            if has_siblings and grant.start < sequence.num_prompt_tokens <= grant.stop:
                self._release_siblings(sequence, share=True)
        self._requeue()

    def _learn(self, flight: Flight) -> None:
        """The host takes note of a step's tokens."""
        if flight.learned:
            return
        flight.learned = True
        for drawn in flight.drawn:
            sequence = drawn.sequence
            if sequence.phase is Phase.FINISHED:
                continue
            state, member = self._members[sequence.sequence_id]
            sequence.num_pending -= 1
            sequence.append(drawn.token_ids)
            sequence.num_computed += drawn.num_accepted
            if member.history is not None:
                member.history.append(drawn.token_ids)
            state.num_drafted += drawn.num_drafts
            state.num_accepted += drawn.num_accepted
            self._counters.count_drafts(drawn.num_drafts, drawn.num_accepted, drawn.confidences)

    def _look_at(self, flight: Flight) -> None:
        """The host's half of a step: tokens become known, outputs grow and end."""
        self._learn(flight)
        for sequence, position, report in flight.scored:
            state, _ = self._members.get(sequence.sequence_id, (None, None))
            if state is None:
                continue
            if isinstance(report, RowFailure):
                self._finish(
                    sequence, FinishReason.ERROR, f"prompt token {position}: {report.message}"
                )
                continue
            state.prompt_logprobs[position] = report
            sequence.num_scored = position
        for drawn in flight.drawn:
            self._take(drawn)
        for grant in flight.grants:
            sequence = grant.sequence
            done = sequence.num_computed >= sequence.num_prompt_tokens
            if done and sequence.num_tokens >= sequence.limit and not sequence.num_pending:
                self._finish(sequence, FinishReason.LENGTH)
        self._requeue()
        self._watch.event(
            "step.done",
            tokens=flight.num_rows,
            drafted=sum(drawn.num_drafts for drawn in flight.drawn),
            accepted=sum(drawn.num_accepted for drawn in flight.drawn),
        )

    def _take(self, drawn: Drawn) -> None:
        """Tokens of one output became known: text, and perhaps its end."""
        sequence = drawn.sequence
        if sequence.phase is Phase.FINISHED:
            return
        state, member = self._members[sequence.sequence_id]
        if state.first_token_s is None and drawn.token_ids:
            state.first_token_s = self._clock()
        if drawn.token_ids:
            self._extend(state, member, drawn)
        if drawn.failure is not None:
            self._finish(sequence, FinishReason.ERROR, drawn.failure)

    def _extend(self, state: RequestState, member: Member, drawn: Drawn) -> None:
        sequence, constrained = member.sequence, member.constrained
        is_last = drawn.start + len(drawn.token_ids) >= sequence.limit
        try:
            if constrained is not None:
                constrained.push(drawn.token_ids)
            if member.thought is not None:
                member.thought = member.thought.after(drawn.token_ids)
            delta = member.stream.push(drawn.token_ids, drawn.logprobs, is_last=is_last)
        except Exception as error:  # text that cannot be made is this request's misfortune alone
            tokens = ", ".join(map(str, drawn.token_ids))
            self._finish(sequence, FinishReason.ERROR, f"decoding tokens {tokens}: {error}")
            return
        self._counters.num_output_tokens += len(delta.token_ids)
        if delta.finished:
            self._close_sequence(state, sequence, delta)
        self._outbox.append(delta)
        if constrained is not None and constrained.is_over:
            self._finish(sequence, FinishReason.STOP)

    def _row_params(self, sequence: Sequence, accepted: tuple[int, ...]) -> RowParams:
        """What the token after some accepted drafts depends on."""
        _, member = self._members[sequence.sequence_id]
        position = sequence.num_known + len(accepted)
        return RowParams(
            params=sequence.request.params,
            seed=sequence.seed,
            position=position,
            num_output=position - sequence.num_prompt_tokens,
            history=member.history,
            extra=accepted,
            eos_token_ids=self._parts.eos_token_ids,
            mask=member.mask(accepted, self._limits.vocab_size),
        )

    # ------------------------------------------------------------------------------- endings

    def _end_unwanted(self) -> None:
        """Aborts and deadlines."""
        now_s = self._clock()
        for state in list(self._requests.values()):
            late = state.deadline_s is not None and now_s >= state.deadline_s
            if not state.abort and not late:
                continue
            reason = FinishReason.ABORT if state.abort else FinishReason.DEADLINE
            for member in state.alive:
                self._finish(member.sequence, reason)
        self._requeue()

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End an output for another reason than a token."""
        if sequence.phase is Phase.FINISHED:
            return
        state, member = self._members[sequence.sequence_id]
        delta = member.stream.finish(reason, error)
        self._close_sequence(state, sequence, delta)
        self._outbox.append(delta)

    def _close_sequence(self, state: RequestState, sequence: Sequence, delta: Delta) -> None:
        """Give back everything an output held; with the last one the request is over."""
        sequence.phase = Phase.FINISHED
        sequence.finish_reason = delta.finish_reason
        self._parts.cache.release(sequence.sequence_id)
        self._forget_drafts(sequence)
        del self._members[sequence.sequence_id]
        if sequence.index == 0:
            self._release_siblings(sequence, share=False, state=state)
        if state.alive:
            return
        request_id = state.request.request_id
        del self._requests[request_id]
        result = state.result(self._clock(), invariant=self._parts.invariant)
        self._results[request_id] = result
        if len(self._results) > KEPT_RESULTS:
            self._results.popitem(last=False)
        self._counters.num_finished += 1
        self._counters.num_failed += result.error is not None
        self._counters.num_cached_tokens += result.cached_tokens
        self._watch.event(
            "request.finished",
            request_id=request_id,
            reason=str(delta.finish_reason),
            prompt_tokens=len(result.prompt_token_ids),
            output_tokens=sum(len(output.token_ids) for output in result.outputs),
            cached_tokens=result.cached_tokens,
            cache_miss=state.members[0].sequence.cache_miss,
            cached_tier=result.cached_tier,
            ttft_s=result.ttft_s,
            total_s=result.total_s,
            queue_s=result.queue_s,
            drafted=result.drafted,
            accepted=result.accepted,
        )

    def _forget_drafts(self, sequence: Sequence) -> None:
        if self._speculator is not None:
            self._speculator.release(sequence.sequence_id)

    def _release_siblings(
        self, first: Sequence, *, share: bool, state: RequestState | None = None
    ) -> None:
        """Let the other outputs of a request go on, with a copy of the prompt's state if possible.

        They share all of the prompt but its last token, which each computes again for logits of
        its own.
        """
        state = state or self._members[first.sequence_id][0]
        common = first.num_prompt_tokens - 1
        for member in state.members[1:]:
            sequence = member.sequence
            if sequence.phase is not Phase.HELD:
                continue
            sequence.cuts = first.cuts
            if share and self._fork(first, sequence, common):
                sequence.opened = True
                sequence.num_computed = sequence.num_committed = common
                sequence.write_floor, sequence.visible_from = 0, first.visible_from
                sequence.phase = Phase.RUNNING
                self._running.append(sequence)
            else:
                sequence.phase = Phase.WAITING
                self._waiting.append(sequence)

    def _fork(self, first: Sequence, sequence: Sequence, common: int) -> bool:
        try:
            forked = self._parts.cache.fork(first.sequence_id, sequence.sequence_id, common)
        except Exception as error:  # it can compute the prompt by itself
            self._watch.event("fork.failed", error=f"{type(error).__name__}: {error}")
            return False
        if forked and self._speculator is not None:
            self._speculator.fork(first.sequence_id, sequence.sequence_id, common)
        return forked

    def _fail(self, error: EngineError) -> None:
        """The engine cannot go on: every stream ends with an error."""
        self._failure = error
        self._watch.event("engine.failed", error=str(error))
        for state in list(self._requests.values()):
            for member in state.alive:
                self._finish(member.sequence, FinishReason.ERROR, f"the engine failed: {error}")
        self._running, self._waiting, self._compiling, self._flight = [], [], [], None

    @property
    def failure(self) -> EngineError | None:
        """Why the engine cannot go on, or None."""
        return self._failure

    def _check_alive(self) -> None:
        if self._closed:
            raise EngineClosedError("the engine is closed; make a new one")
        if self._failure is not None:
            kind = DeviceLostError if isinstance(self._failure, DeviceLostError) else EngineError
            raise kind(f"the engine has failed and takes no requests: {self._failure}")

    def close(self) -> None:
        """End everything and give memory back; may be called twice."""
        if self._closed:
            return
        for state in list(self._requests.values()):
            for member in state.alive:
                self._finish(member.sequence, FinishReason.ABORT)
        self._closed = True
        if self._speculator is not None:
            self._speculator.settle()
        self._parts.executor.close()
        self._watch.close()
        self._parts.close()

    def __enter__(self) -> Engine:
        """Use as a context manager."""
        return self

    def __exit__(self, *details: object) -> None:
        """Close."""
        self.close()
