"""What the OpenAI protocols have in common: errors, messages, tools, answer formats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_core.interfaces.wire import Fault
from deepinfer_recipe.conversation import AnswerFormat, Call, Message, Tool
from deepinfer_recipe.wire.fields import Fields

EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})

_TYPES = {
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}
_ROLES = frozenset(
    {"system", "developer", "user", "assistant", "tool", "function", "latest_reminder"}
)


def error_body(fault: Fault) -> Mapping[str, Any]:
    """Return the body of an error."""
    default = "invalid_request_error" if fault.status < 500 else "server_error"
    return {
        "error": {
            "message": fault.message,
            "type": _TYPES.get(fault.status, default),
            "param": fault.param,
            "code": fault.code,
        }
    }


# ----------------------------------------------------------------------------- messages


def read_messages(body: Fields) -> list[Message]:
    """Return the messages of a chat.

    Raises:
        ProtocolError: naming the message and the field.
    """
    found = body.objects("messages")
    if not found:
        raise body.error("messages", "is empty; give at least one message")
    return [_message(fields) for fields in found]


def _message(fields: Fields) -> Message:
    role = fields.one_of("role", _ROLES)
    content = text_content(fields, "content")
    if role == "assistant":
        return _assistant(fields, content)
    if role in ("tool", "function"):
        call_id, name = fields.text("tool_call_id", None), fields.text("name", None)
        if role == "tool" and call_id is None:
            raise fields.error("tool_call_id", "is missing; it names the call this is a result of")
        return Message(role="tool", content=content, call_id=call_id, name=name)
    if role == "user" and not fields.has("content"):
        raise fields.error("content", "is missing")
    names = {"developer": "system", "latest_reminder": "reminder"}
    return Message(role=names.get(role, role), content=content)


def _assistant(fields: Fields, content: str) -> Message:
    if fields.has("function_call"):
        raise fields.error("function_call", "is not supported; use tool_calls")
    calls = tuple(_call(item) for item in fields.objects("tool_calls", ()))
    reasoning = fields.text("reasoning_content", None)
    if reasoning is None:
        reasoning = fields.text("reasoning", None)
    content = content or fields.text("refusal", "")
    return Message(role="assistant", content=content, reasoning=reasoning, calls=calls)


def _call(fields: Fields) -> Call:
    fields.one_of("type", ("function",), "function")
    function = fields.object("function")
    return Call(
        call_id=fields.text("id", ""),
        name=function.text("name"),
        arguments=function.text("arguments", "{}") or "{}",
    )


def text_content(fields: Fields, name: str) -> str:
    """Return a content: a string, or text parts, joined."""
    content = fields.get(name)
    if content is None or isinstance(content, str):
        return content or ""
    parts = fields.objects(name, allowed="a string or a list of parts")
    return "".join(map(_part, parts))


def _part(part: Fields) -> str:
    kind = part.text("type")
    if kind in ("text", "input_text", "output_text"):
        return str(part.text("text"))
    if kind == "refusal":
        return str(part.text("refusal"))
    raise part.error("type", f"{kind!r} is not supported; this server reads text only")


# -------------------------------------------------------------------------------- tools


def read_tools(body: Fields) -> tuple[tuple[Tool, ...], str]:
    """Return the tools of a chat and the choice among them (see `Conversation`).

    Raises:
        ProtocolError: a tool is malformed, or the choice names one that is not there.
    """
    for name in ("functions", "function_call"):
        if body.has(name):
            raise body.error(name, "is not supported; use tools and tool_choice")
    tools = tuple(_tool(fields) for fields in body.objects("tools", ()))
    return choose_tools(body, tools)


def _tool(fields: Fields) -> Tool:
    kind = fields.text("type")
    if kind != "function":
        raise fields.error("type", f"{kind!r} is not supported; only functions are")
    return read_function(fields.object("function"))


def read_function(fields: Fields) -> Tool:
    """Return a tool from the object that names it."""
    name = fields.text("name")
    if not name:
        raise fields.error("name", "is empty")
    parameters = fields.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise fields.error("parameters", "must be a JSON schema (an object)")
    return Tool(
        name=name,
        description=fields.text("description", None),
        parameters=parameters,
        strict=fields.flag("strict", False),
    )


def choose_tools(body: Fields, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], str]:
    """Return the tools that may be called and how (see `Conversation.tool_choice`)."""
    choice = body.get("tool_choice")
    if choice is None:
        return tools, "auto"
    if isinstance(choice, str):
        word = body.one_of("tool_choice", ("none", "auto", "required"))
        if word == "required" and not tools:
            raise body.error("tool_choice", "'required' needs tools")
        return tools, word
    fields = body.object("tool_choice", allowed="none, auto, required or an object")
    kind = fields.one_of("type", ("function", "allowed_tools"))
    if kind == "allowed_tools":
        return _allowed(fields, tools)
    name = fields.object("function").text("name") if fields.has("function") else fields.text("name")
    return _named(fields, tools, {name}), "named"


def _allowed(fields: Fields, tools: tuple[Tool, ...]) -> tuple[tuple[Tool, ...], str]:
    inner = fields.object("allowed_tools") if fields.has("allowed_tools") else fields
    mode = inner.one_of("mode", ("auto", "required"), "auto")
    names = set()
    for item in inner.objects("tools"):
        function = item.object("function") if item.has("function") else item
        names.add(function.text("name"))
    if not names:
        raise inner.error("tools", "is empty; name at least one tool, or choose 'none'")
    return _named(inner, tools, names), mode


def _named(fields: Fields, tools: tuple[Tool, ...], names: set[str]) -> tuple[Tool, ...]:
    found = tuple(tool for tool in tools if tool.name in names)
    if missing := names.difference(tool.name for tool in tools):
        raise fields.error("name", f"no tool is called {', '.join(sorted(missing))}")
    return found


# ------------------------------------------------------------------------ answer formats


def read_format(body: Fields, name: str = "response_format") -> AnswerFormat | None:
    """Return what the answer must look like.

    Raises:
        ProtocolError: the format is unknown or malformed.
    """
    fields = body.object(name, None)
    if fields is None:
        return None
    kinds = ("text", "json_object", "json_schema", "regex")
    kind = fields.one_of("type", kinds)
    if kind == "text":
        return None
    if kind == "json_object":
        return AnswerFormat(kind="json_object", source={})
    if kind == "regex":
        pattern = fields.text("regex", None) or fields.text("pattern")
        return AnswerFormat(kind="regex", source=pattern)
    inner = fields.object("json_schema") if fields.has("json_schema") else fields
    schema = inner.get("schema")
    if not isinstance(schema, dict):
        raise inner.error("schema", "must be a JSON schema (an object)")
    return AnswerFormat(kind="json_schema", source=schema)


def read_structured(body: Fields) -> AnswerFormat | None:
    """Return the answer format of ``structured_outputs``, as servers of open models take it."""
    fields = body.object("structured_outputs", None)
    if fields is None:
        return None
    kinds = {"json": "json_schema", "regex": "regex", "choice": "choice", "grammar": "ebnf"}
    named = [name for name in kinds if fields.has(name)]
    if len(named) != 1:
        raise body.error("structured_outputs", f"needs one of {', '.join(kinds)}")
    return AnswerFormat(kind=kinds[named[0]], source=fields.get(named[0]))
