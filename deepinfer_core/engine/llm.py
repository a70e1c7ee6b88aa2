"""`LLM`: an engine for scripts and notebooks, driven by the calling thread."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from deepinfer_core import values
from deepinfer_core.engine.progress import ProgressBar
from deepinfer_core.engine.prompts import Message, Prompt, chat_ids, prompt_ids
from deepinfer_core.engine.pump import Pump
from deepinfer_core.engine.settings import configuration
from deepinfer_core.engine.surface import EngineSurface, TextCodec
from deepinfer_core.engine.token_stream import TokenStream
from deepinfer_core.errors import AdmissionError, EngineClosedError, EngineError, RequestError
from deepinfer_core.requests import Request, RequestOutput, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from deepinfer_core.config import EngineConfig


_PROMPTS = "a text, or a list of texts and token id lists"
_CONVERSATIONS = "a list of {'role': ..., 'content': ...} objects, or a list of such lists"


class BatchError(RequestError):
    """Some prompts of a batch failed; the results of all are kept.

    Attributes:
        results: one for each prompt, in input order; those that failed have ``error`` set.
    """

    def __init__(self, message: str, results: Sequence[RequestOutput]) -> None:
        super().__init__(message)
        self.results = tuple(results)

    def __reduce__(self) -> tuple[type[BatchError], tuple[str, tuple[RequestOutput, ...]]]:
        """Pickle with the results."""
        return type(self), (str(self), self.results)


@attrs.frozen(kw_only=True)
class Score:
    """How likely a text is under the model.

    Attributes:
        token_ids: the text's tokens.
        logprobs: one for each token, None for the first (nothing predicts it).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]

    @property
    def total(self) -> float:
        """Natural logarithm of the probability of all tokens after the first."""
        return sum(entry.logprob for entry in self.logprobs if entry is not None)


class LLM:
    """A model for offline work. Not for several threads; `AsyncEngine` is.

    Args:
        model: path of a checkpoint, a registered name or a hub id; default as in `EngineConfig`.
        config: a configuration, or the path of one.
        plugins: modules or objects that are plugins besides the installed ones.
        overrides: fields of `EngineConfig` that replace those of ``config``.

    Raises:
        DeepInferError: the configuration, the composition or the checkpoint is refused.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        config: EngineConfig | str | Path | None = None,
        plugins: Sequence[object] = (),
        **overrides: Any,
    ) -> None:
        if model is not None:
            overrides["model"] = str(model) if isinstance(model, PathLike) else model
        settled = configuration(config, overrides, plugins)
        from deepinfer_core.engine.engine import Engine
        from deepinfer_core.hub import TerminalProgress

        progress = TerminalProgress(sys.stderr) if sys.stderr.isatty() else None
        self._adopt(Engine.from_config(settled, plugins=plugins, progress=progress))

    @classmethod
    def from_config(cls, config: EngineConfig | str | Path, plugins: Sequence[object] = ()) -> LLM:
        """Build from a configuration, or the path of one."""
        return cls(config=config, plugins=plugins)

    @classmethod
    def over(cls, engine: EngineSurface) -> LLM:
        """Wrap an engine that exists and that nobody else uses; the LLM closes it."""
        if not callable(getattr(engine, "submit", None)):
            raise values.refuse("engine", engine, "an Engine")
        llm = cls.__new__(cls)
        llm._adopt(engine)
        return llm

    def _adopt(self, engine: EngineSurface) -> None:
        self._engine: EngineSurface | None = engine
        self._pump = Pump(engine)
        self._submitted = 0

    # -------------------------------------------------------------------------- generation

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts as they are, many at a time.

        Args:
            prompts: one text, or a list of texts and token id lists.
            params: for all prompts, or one for each.
            progress: show a progress bar if stderr is a terminal.
            raise_on_error: raise once all have ended; otherwise look at each ``error``.

        Returns:
            One result per prompt, in input order. A refused prompt keeps its place.

        Raises:
            BatchError: some prompts were refused or failed; ``.results`` has all results.
            RequestError: the arguments do not fit together.
            EngineError: the engine failed.
        """
        many = [prompts] if isinstance(prompts, str) else values.items("prompts", prompts, _PROMPTS)
        if many and isinstance(many[0], int):
            raise RequestError("one prompt of token ids must stand in a list: generate([ids])")
        return self._generate(many, self._spread(params, len(many)), progress, raise_on_error)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        raise_on_error: bool = True,
    ) -> list[RequestOutput]:
        """Answer conversations; as `generate`, after the model's chat template.

        Args:
            messages: one conversation, or a list of them.
            params: for all conversations, or one for each.
            progress: show a progress bar if stderr is a terminal.
            raise_on_error: raise once all have ended; otherwise look at each ``error``.
        """
        listed = values.items("messages", messages, _CONVERSATIONS)
        conversations = [listed] if listed and isinstance(listed[0], Mapping) else listed
        spread = self._spread(params, len(conversations))
        return self._generate(conversations, spread, progress, raise_on_error, chat_ids)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Continue one prompt and return its deltas as they come.

        Several streams may be open at once: they share the engine's steps.

        Raises:
            RequestError: the prompt is refused.
        """
        request = self._request(prompt_ids(self.engine, prompt), params)
        _await_grammar(self.engine, request.params)
        return TokenStream(self._pump, request)

    def stream_chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None
    ) -> TokenStream:
        """Answer one conversation and return the deltas as they come."""
        request = self._request(chat_ids(self.engine, messages), params)
        _await_grammar(self.engine, request.params)
        return TokenStream(self._pump, request)

    def score(self, texts: str | Sequence[Prompt], top: int = 0) -> list[Score]:
        """Return how likely texts are.

        Args:
            texts: one text, or a list of texts and token id lists.
            top: how many alternatives to report at each place.

        Raises:
            BatchError: some texts were refused.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=top)
        return [
            Score(token_ids=result.prompt_token_ids, logprobs=result.prompt_logprobs)
            for result in self.generate(texts, params)
        ]

    def as_completed(
        self,
        tasks: Iterable[tuple[Prompt, SamplingParams]],
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        """Run prompts and yield each result, with its number, as soon as it is complete.

        Prompts are taken one by one when there is room, so that ``tasks`` may be endless. Refused
        prompts come out with ``error`` set. Closing the iterator ends what is running.

        Raises:
            RequestError: ``tasks`` are no pairs.
        """
        if isinstance(tasks, str | bytes | Mapping) or not isinstance(tasks, Iterable):
            raise values.refuse("tasks", tasks, "an iterable of (prompt, SamplingParams) pairs")
        return self._as_completed(map(_pair, itertools.count(), tasks), prompt_ids)

    # -------------------------------------------------------------------------- life

    @property
    def engine(self) -> EngineSurface:
        """The engine; do not step it from another thread.

        Raises:
            EngineClosedError: after `close`.
        """
        if self._engine is None:
            raise EngineClosedError("this LLM is closed; make another one")
        return self._engine

    @property
    def tokenizer(self) -> TextCodec:
        """The model's tokenizer."""
        return self.engine.tokenizer

    def close(self) -> None:
        """End everything that runs and release the engine. May be called again."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    # -------------------------------------------------------------------------- inside

    def _generate(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams],
        progress: bool,
        raise_on_error: bool,
        encode: Callable[[EngineSurface, Any], tuple[int, ...]] = prompt_ids,
    ) -> list[RequestOutput]:
        results: dict[int, RequestOutput] = {}
        with ProgressBar(len(prompts), progress) as advance:
            try:
                for at, result in self._as_completed(zip(prompts, params, strict=True), encode):
                    results[at] = result
                    advance(result)
            except EngineError as error:
                if raise_on_error:
                    raise
                lost = _without_result("lost", (), str(error))
                results = {at: results.get(at, lost) for at in range(len(prompts))}
        ordered = [results[at] for at in range(len(prompts))]
        if raise_on_error:
            _raise_for_errors(ordered)
        return ordered

    def _as_completed(
        self,
        tasks: Iterable[tuple[Any, SamplingParams]],
        encode: Callable[[EngineSurface, Any], tuple[int, ...]],
    ) -> Generator[tuple[int, RequestOutput], None, None]:
        source = enumerate(tasks)
        running: dict[str, int] = {}
        # Enough to fill the engine at any time, without taking all prompts at once.
        window = 2 * self.engine.config.engine.max_sequences
        entry = next(source, None)
        try:
            while entry is not None or running:
                while entry is not None and len(running) < window:
                    at, (prompt, params) = entry
                    outcome = self._try_submit(prompt, params, encode)
                    if outcome is None:
                        break
                    entry = next(source, None)
                    if isinstance(outcome, RequestOutput):
                        yield at, outcome
                    else:
                        running[outcome] = at
                if self._pump.outstanding:
                    self._pump.step()
                for request_id in list(running):
                    result = self._pump.take(request_id)
                    if result is not None:
                        yield running.pop(request_id), result
        finally:
            if running and self._engine is not None:
                self._pump.cancel(running)

    def _try_submit(
        self,
        prompt: Any,
        params: SamplingParams,
        encode: Callable[[EngineSurface, Any], tuple[int, ...]],
    ) -> str | RequestOutput | None:
        """Submit and return the request's id, or the result of a refused one.

        None: the queue is full at the moment.
        """
        ids: tuple[int, ...] = ()
        try:
            ids = encode(self.engine, prompt)
            request = self._request(ids, params)
            _await_grammar(self.engine, request.params)
            self._pump.submit(request)
        except RequestError as error:
            full = self.engine.stats().waiting >= self.engine.config.engine.max_waiting
            if isinstance(error, AdmissionError) and full and self._pump.outstanding:
                return None
            shown = ids if all(type(item) is int for item in ids) else ()
            return _without_result(f"refused-{self._submitted}", shown, str(error))
        return request.request_id

    def _request(self, ids: Sequence[int], params: SamplingParams | None) -> Request:
        self._submitted += 1
        return Request(
            request_id=f"llm-{self._submitted}",
            prompt_token_ids=tuple(ids),
            params=params if params is not None else SamplingParams(),
            arrival_s=self.engine.clock(),
        )

    @staticmethod
    def _spread(
        params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        if params is None or isinstance(params, SamplingParams):
            return [params or SamplingParams()] * count
        params = values.items("params", params, "SamplingParams, or a list of them")
        for at, item in enumerate(params):
            values.instance(f"params[{at}]", item, SamplingParams, "SamplingParams")
        if len(params) != count:
            raise RequestError(
                f"{count} prompts need one SamplingParams for all or {count} of them, "
                f"not {len(params)}"
            )
        return params


def _pair(at: int, task: Any) -> tuple[Any, Any]:
    if not isinstance(task, tuple | list) or len(task) != 2:
        raise values.refuse(f"tasks[{at}]", task, "a pair (prompt, SamplingParams)")
    return task[0], task[1]


def _await_grammar(engine: EngineSurface, params: SamplingParams) -> None:
    """Wait until a grammar is compiled, so that a bad one is refused before admission.

    Raises:
        RequestError: it is bad, or cannot be had here.
    """
    needed = engine.prepare(params)
    if needed is not None:
        needed.result()


def _without_result(request_id: str, ids: tuple[int, ...], error: str) -> RequestOutput:
    return RequestOutput(
        request_id=request_id, prompt_token_ids=ids, outputs=(), invariant=True, error=error
    )


def _raise_for_errors(results: Sequence[RequestOutput]) -> None:
    failed = [(at, error) for at, result in enumerate(results) if (error := _error_of(result))]
    if failed:
        at, error = failed[0]
        raise BatchError(
            f"{len(failed)} of {len(results)} prompts failed, the first is number {at}: {error}; "
            "`results` of this error has every result",
            results,
        )


def _error_of(result: RequestOutput) -> str | None:
    if result.error is not None:
        return result.error
    return next((output.error for output in result.outputs if output.error is not None), None)
