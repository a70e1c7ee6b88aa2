"""OpenAI Completions: texts that go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from attrs import frozen

from deepinfer_core.builtin.plain_parser import PlainParser
from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.parser import EventKind
from deepinfer_core.interfaces.wire import Fault, Generation, ReadContext, ServerEvent
from deepinfer_core.requests import MAX_LOGPROBS, RequestOutput, TokenLogprob
from deepinfer_core.structured import StructuredOutput
from deepinfer_recipe.kit import CONTEXT_TOKENS, Kit
from deepinfer_recipe.wire import openai, sampling
from deepinfer_recipe.wire.chat import chat_usage
from deepinfer_recipe.wire.exchange import BaseReply, Choice, Exchange, Section
from deepinfer_recipe.wire.fields import Fields, read_object
from deepinfer_recipe.wire.turn import Piece, Token, Turn, finish_word, finite, spelled

MAX_PROMPTS = 128
"""Prompts of one request."""

MAX_OUTPUTS = 1024
"""Outputs of one request, of all its prompts."""

FINISH = {
    "stop": "stop",
    "stop_string": "stop",
    "calls": "stop",
    "length": "length",
    "other": "stop",
}
_UNKNOWN = TokenLogprob(token_id=0, logprob=0.0, rank=1)
"""The report of a prompt's first token: nothing predicts it."""

_IGNORED = ("user", "metadata", "service_tier")


@frozen(kw_only=True)
class Asked:
    """What a client wants to see.

    Attributes:
        model: as it named it.
        usage: whether a stream ends with counts.
        logprobs: how many alternatives are reported, None for no report.
        echo: whether the prompt comes first.
    """

    model: str
    usage: bool
    logprobs: int | None
    echo: bool


class CompletionsFormat:
    """See `deepinfer_core.interfaces.wire.WireFormat`."""

    name = "openai.completions"
    path = "/v1/completions"

    def __init__(self, kit: Kit) -> None:
        self._kit = kit

    def error(self, fault: Fault) -> Mapping[str, Any]:
        """Return the body of an error."""
        return openai.error_body(fault)

    def read(self, body: bytes, context: ReadContext) -> Exchange:
        """Understand a request."""
        fields = Fields(read_object(body))
        model, stream = fields.text("model"), fields.flag("stream")
        if fields.text("suffix", ""):
            raise fields.error("suffix", "is not supported")
        n = fields.integer("n", 1, 128, 1)
        if fields.integer("best_of", 1, default=n) != n:
            raise fields.error("best_of", "must be equal to n")
        logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS)
        echo = fields.flag("echo")
        answer = openai.read_structured(fields)
        structured = answer and StructuredOutput(kind=answer.kind, source=answer.source)
        params = sampling.params(
            **sampling.read_common(fields),
            **sampling.read_penalties(fields),
            max_tokens=_max_tokens(fields, echo, logprobs),
            n=n,
            logprobs=logprobs,
            prompt_logprobs=logprobs if echo else None,
            structured=structured,
        )
        prompts = self._prompts(fields)
        if len(prompts) * params.n > MAX_OUTPUTS:
            raise fields.error(
                "n", f"asks for {len(prompts) * params.n} outputs of {len(prompts)} prompts; "
                f"at most {MAX_OUTPUTS} are allowed",
            )  # fmt: skip
        generations = tuple(
            Generation(prompt_token_ids=ids, params=params, cache_salt=context.cache_salt)
            for ids in prompts
        )
        options = fields.object("stream_options", None)
        if options is not None and not stream:
            raise fields.error("stream_options", "needs stream: true")
        usage = options is not None and options.flag("include_usage")
        asked = Asked(model=model, usage=usage, logprobs=logprobs, echo=echo)
        stop = sampling.stop_strings(fields)
        return Exchange(
            model=model,
            make=partial(self._reply, generations, stop, asked),
            generations=generations,
            stream=stream,
            ignored=fields.without_effect(_IGNORED),
        )

    def _prompts(self, fields: Fields) -> list[tuple[int, ...]]:
        given = fields.get("prompt")
        several = isinstance(given, list) and given and isinstance(given[0], str | list)
        prompts = given if several and isinstance(given, list) else [given]
        if len(prompts) > MAX_PROMPTS:
            raise fields.error("prompt", f"holds more than {MAX_PROMPTS} prompts")
        return [self._prompt(fields, prompt) for prompt in prompts]

    def _prompt(self, fields: Fields, prompt: Any) -> tuple[int, ...]:
        allowed = "must be a string, a list of strings, or token ids"
        if isinstance(prompt, str):
            ids = self._kit.tokenizer.encode(prompt)
        elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
            ids = prompt
        else:
            raise fields.error("prompt", allowed)
        if not ids:
            raise fields.error("prompt", "is empty; give at least one token")
        if min(ids) < 0:
            raise fields.error("prompt", "token ids cannot be negative")
        return tuple(ids)

    def _reply(
        self,
        generations: Sequence[Generation],
        stop: Sequence[str],
        asked: Asked,
        identity: str,
        created_s: int,
    ) -> CompletionsReply:
        turns = [
            [self._turn(generation, stop) for _ in range(generation.params.n)]
            for generation in generations
        ]
        name = f"cmpl-{identity}"
        return CompletionsReply(name, created_s, asked, turns, generations, self._kit)

    def _turn(self, generation: Generation, stop: Sequence[str]) -> Turn:
        return Turn(
            codec=self._kit.codec,
            stream=PlainParser().stream(),
            followed=(),
            context_ids=generation.prompt_token_ids[-CONTEXT_TOKENS:],
            stop=stop,
        )


def _max_tokens(fields: Fields, echo: bool, logprobs: int | None) -> int | None:
    found = fields.integer("max_tokens", 0, default=16)
    if found == 0 and not (echo and logprobs is not None):
        raise ProtocolError(
            "max_tokens: 0 scores a prompt and needs echo: true and logprobs", param="max_tokens"
        )
    return found


class CompletionsReply(BaseReply):
    """Outputs becoming a text completion."""

    def __init__(
        self,
        identity: str,
        created_s: int,
        asked: Asked,
        turns: Sequence[Sequence[Turn]],
        generations: Sequence[Generation],
        kit: Kit,
    ) -> None:
        super().__init__(identity, turns, generations, kit.codec)
        self._created_s, self._asked = created_s, asked
        self._results: Sequence[RequestOutput | None] = ()
        self._echoes = [
            kit.codec.decode(generation.prompt_token_ids) if asked.echo else ""
            for generation in generations
        ]

    def finish(self, results: Sequence[RequestOutput | None]) -> list[ServerEvent]:
        """Events after the last token."""
        self._results = results
        return super().finish(results)

    def first_events(self) -> Sequence[ServerEvent]:
        """Send the prompts, if asked."""
        if not self._asked.echo:
            return ()
        return [self._chunk(choice, self._echo(choice)) for choice in self.choices]

    def piece_events(self, choice: Choice, section: Section, piece: Piece) -> Sequence[ServerEvent]:
        """Send a piece."""
        logprobs = None
        if self._asked.logprobs is not None:
            reports = [token for token in piece.tokens if token.logprob is not None]
            start = section.length - len(piece.event.text) + len(self._echo(choice))
            logprobs = self._logprobs(reports, start)
        return [self._chunk(choice, piece.event.text, logprobs=logprobs)]

    def choice_ended(self, choice: Choice) -> Sequence[ServerEvent]:
        """Close a choice."""
        return [self._chunk(choice, "", finish_reason=finish_word(choice.turn, FINISH))]

    def last_events(self) -> Sequence[ServerEvent]:
        """Send counts, if asked, and the end."""
        done = ServerEvent(data="[DONE]")
        if not self._asked.usage:
            return [done]
        return [ServerEvent(data={**self._frame(), "choices": [], "usage": chat_usage(self)}), done]

    def failure_events(self, fault: Fault) -> Sequence[ServerEvent]:
        """Send the error; there is no end."""
        return [ServerEvent(data=openai.error_body(fault))]

    def body(self) -> Mapping[str, Any]:
        """Return the completion."""
        choices = [self._choice(choice) for choice in self.choices]
        return {**self._frame(), "choices": choices, "usage": chat_usage(self)}

    def _choice(self, choice: Choice) -> Mapping[str, Any]:
        echo = self._echo(choice)
        logprobs = None
        if self._asked.logprobs is not None:
            tokens = [*self._prompt_tokens(choice), *choice.tokens]
            logprobs = self._logprobs(tokens, 0)
        return {
            "index": choice.index,
            "text": echo + choice.text(EventKind.TEXT),
            "logprobs": logprobs,
            "finish_reason": finish_word(choice.turn, FINISH) if choice.turn.done else None,
        }

    def _echo(self, choice: Choice) -> str:
        return self._echoes[self._group(choice)]

    def _group(self, choice: Choice) -> int:
        return next(at for at, group in enumerate(self._choices) if choice in group)

    def _prompt_tokens(self, choice: Choice) -> list[Token]:
        group = self._group(choice)
        result = self._results[group] if group < len(self._results) else None
        if not self._asked.echo or result is None or not result.prompt_logprobs:
            return []
        return [
            Token(token_id, spelled(self._codec, token_id), report or _UNKNOWN)
            for token_id, report in zip(
                result.prompt_token_ids, result.prompt_logprobs, strict=True
            )
        ]

    def _logprobs(self, tokens: Sequence[Token], offset: int) -> Mapping[str, Any]:
        found: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip
        for token in tokens:
            report = token.logprob
            if report is None:
                continue
            text = spelled(self._codec, token.token_id)
            found["tokens"].append(text)
            known = report is not _UNKNOWN
            found["token_logprobs"].append(finite(report.logprob) if known else None)
            top = {spelled(self._codec, item): finite(logprob) for item, logprob in report.top}
            found["top_logprobs"].append(top if known else None)
            found["text_offset"].append(offset)
            offset += len(token.text)
        return found

    def _chunk(
        self,
        choice: Choice,
        text: str,
        *,
        logprobs: Any = None,
        finish_reason: str | None = None,
    ) -> ServerEvent:
        shape = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return ServerEvent(data={**self._frame(), "choices": [shape]})

    def _frame(self) -> dict[str, Any]:
        frame = {
            "id": self.identity,
            "object": "text_completion",
            "created": self._created_s,
            "model": self._asked.model,
        }
        # Who asks for counts gets the field in every chunk; it is null in all but the last.
        return frame | {"usage": None} if self._asked.usage else frame
