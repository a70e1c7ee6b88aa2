"""Chat templates: messages to the text, or the token ids, that a model was trained on.

Templates come with checkpoints and are programs of strangers, so they run in Jinja's sandbox, see
nothing but plain data, and may not loop or grow without end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import jinja2
from jinja2.ext import Extension, loopcontrols

from deepinfer_core.errors import RequestError
from deepinfer_core.text.bounded_jinja import (
    BoundedEnvironment,
    bounded,
    fresh_budget,
    join_bounded,
)
from deepinfer_core.text.quoting import Quoter

if TYPE_CHECKING:
    from jinja2.nodes import Node
    from jinja2.parser import Parser

    from deepinfer_core.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

_MAX_DEPTH = 64
_REASONING = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template; immutable, safe to use from several threads.

    Args:
        source: Jinja source.
        bos_token: spelling of the begin token, seen by the template as ``bos_token``.
        eos_token: spelling of the end token, seen by the template as ``eos_token``.
        variables: further names that the template sees.
        clock: what ``strftime_now`` reads.

    Raises:
        RequestError: the source is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        variables: Mapping[str, Any] | None = None,
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._variables = {
            **plain_data(variables or {}),
            **{name: token for name, token in tokens.items() if token},
        }
        try:
            environment = _environment(clock)
            self._template = environment.from_string(bounded(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise RequestError(f"the model's chat template cannot be read: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> str:
        """Return the text for a conversation.

        Args:
            messages: mappings with ``role`` and what belongs to it (``content``, ``tool_calls``).
            tools: tool descriptions as JSON schemas, if any.
            add_generation_prompt: end with the beginning of the assistant's turn.
            **extra: further names that the template sees, such as ``enable_thinking``.

        Raises:
            RequestError: a message is malformed, or the template refuses the conversation.
        """
        return self._render(
            _checked(messages), None if tools is None else plain_data(tools),
            add_generation_prompt, plain_data(extra),
        )  # fmt: skip

    def render_ids(
        self,
        messages: Sequence[Message],
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **extra: Any,
    ) -> list[int]:
        """Return the token ids for a conversation; only the template can write control tokens.

        Equal to encoding ``render(...)`` without added tokens, except that a control token spelled
        inside messages, tools or options is encoded as the plain characters it consists of.

        Args:
            messages: see ``render``.
            tokenizer: of the same model.
            tools: see ``render``.
            add_generation_prompt: see ``render``.
            **extra: see ``render``.

        Raises:
            RequestError: see ``render``.
        """
        checked = _checked(messages)
        plain_tools = None if tools is None else plain_data(tools)
        options = plain_data(extra)
        quoter = Quoter(tokenizer, [checked, plain_tools, options])
        text = self._render(
            quoter.quote_messages(checked), quoter.quote(plain_tools),
            add_generation_prompt, quoter.quote(options),
        )  # fmt: skip
        if not quoter.used:
            return tokenizer.encode(text, add_special_tokens=False)
        return tokenizer.encode_parts(quoter.split(text))

    def _render(
        self, messages: Any, tools: Any, add_generation_prompt: bool, extra: Mapping[str, Any]
    ) -> str:
        names = {
            **self._variables,
            **extra,
            "messages": messages,
            "tools": tools,
            "documents": extra.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return join_bounded(self._template.generate(names | fresh_budget()))
        except jinja2.UndefinedError as error:
            raise RequestError(_missing(str(error))) from error
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise RequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise RequestError(
                f"the chat template needs too much {_resource(error)} for these messages"
            ) from error


def plain_data(value: Any, depth: int = 0) -> Any:
    """Copy a value into plain JSON types, so that a template can reach nothing else.

    Raises:
        RequestError: it holds something that JSON has no word for, or is nested too deeply.
    """
    if depth > _MAX_DEPTH:
        raise RequestError(f"messages and tools may be nested {_MAX_DEPTH} levels deep at most")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value)
    if isinstance(value, Mapping):
        return {plain_data(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [plain_data(item, depth + 1) for item in value]
    raise RequestError(f"messages and tools must be plain JSON data, not {type(value).__name__}")


def _checked(messages: Any) -> list[dict[str, Any]]:
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list of mappings with 'role' and 'content'")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise RequestError(f"messages[{index}] must be a mapping with a 'role' string")
    return [_normalised(plain_data(message)) for message in messages]


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Drop absent fields, and give reasoning the names that templates look for.

    Clients send ``content: null`` where templates expect no field at all.
    """
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _missing(text: str) -> str:
    found = re.search(r"has no attribute '(.+)'|'(.+)' is undefined", text)
    what = repr(found[1] or found[2]) if found else f"something that is not there ({text})"
    return f"the chat template reads {what}, which these messages and options do not have"


def _resource(error: BaseException) -> str:
    return "memory" if isinstance(error, MemoryError) else "nesting"


def _environment(clock: Callable[[], datetime]) -> jinja2.Environment:
    environment = BoundedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda pattern: clock().strftime(pattern)
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it only wraps it."""

    tags = {"generation"}  # noqa: RUF012 Jinja declares it so

    def parse(self, parser: Parser) -> Node | list[Node]:
        """Return the body as it is."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Serialise as chat templates expect: no escapes for HTML, no ASCII folding."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> str:
    raise jinja2.TemplateError(re.sub(r"\s+", " ", str(message)))
