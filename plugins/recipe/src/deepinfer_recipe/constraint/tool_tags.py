"""Tool calls as a grammar: free text and calls, or calls only, in the markup of a model family."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_core.errors import RequestError
from deepinfer_recipe.constraint.schema_words import check_schema

XGRAMMAR_FORMATS = {
    "llama": "llama",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v4_1": "deepseek_v4_1",
}
"""Our name of a markup -> xgrammar's."""

FORMATS = ("hermes", "qwen", *XGRAMMAR_FORMATS, "mistral")
"""Markups that tool calls can be held to."""

_JSON_FORMATS = ("hermes", "qwen", "llama", "mistral")
"""Those that write a tool's name as JSON."""

_KNOWN = ("answer", "format", "marks", "parallel_tool_calls", "tool_choice", "tools")


def tool_tag(source: Any, *, max_whitespace: int) -> dict[str, Any]:
    """Return the structural tag of a source of kind ``tool_calls``.

    Args:
        source: ``{"format": one of FORMATS, "tools": [...], "tool_choice": ...,
            "parallel_tool_calls": bool}``; tools and choice are shaped as in Chat Completions
            (``"auto"``, ``"required"``, ``{"type": "function", "function": {"name": ...}}``).
            Arguments of every tool follow its schema; those of a tool that says ``strict: false``
            are any object, and only those that say ``strict: true`` are refused for what no grammar
            can express. Where there is an ``answer``, ``"auto"`` means ``"required"`` here:
            what else may be said is the caller's. ``marks`` are not looked at here.
        max_whitespace: longest run of whitespace in arguments.

    Raises:
        RequestError: the source is not of that form, or the choice names a tool that is not there.
    """
    if not isinstance(source, Mapping):
        raise RequestError(f"tool_calls must be an object, not {type(source).__name__}")
    if extra := sorted(set(source) - set(_KNOWN)):
        raise RequestError(f"tool_calls knows {', '.join(_KNOWN)}, not {', '.join(extra)}")
    name = source.get("format")
    if name not in FORMATS:
        raise RequestError(f"unknown format of tool calls {name!r}; known: {', '.join(FORMATS)}")
    tools = source.get("tools")
    if not isinstance(tools, list) or not tools:
        raise RequestError("tool_calls needs a list of tools")
    functions, must = _chosen(tools, source.get("tool_choice", "auto"))
    must = must or source.get("answer") is not None
    named = isinstance(source.get("tool_choice"), Mapping)
    parallel = source.get("parallel_tool_calls", True) and not named
    if name in _JSON_FORMATS:
        functions = [{**function, "name": _in_json(function["name"])} for function in functions]
    if name in XGRAMMAR_FORMATS:
        return _by_xgrammar(name, functions, must, parallel, max_whitespace)
    make = _mistral if name == "mistral" else _hermes
    return {"type": "structural_tag", "format": make(functions, must, parallel, max_whitespace)}


def _by_xgrammar(
    name: str, functions: Sequence[Mapping[str, Any]], must: bool, parallel: Any, whitespace: int
) -> dict[str, Any]:
    from xgrammar import get_model_structural_tag

    tools = [
        {"name": function["name"], "parameters": _schema(function), "strict": True}
        for function in functions
    ]
    try:
        tag: dict[str, Any] = get_model_structural_tag(
            XGRAMMAR_FORMATS[name],
            tools=[{"type": "function", "function": tool} for tool in tools],
            tool_choice="required" if must else "auto",
            reasoning="disabled",  # a mask begins after thinking has ended
            max_whitespace_cnt=whitespace,
            parallel_tool_calls=parallel,
        ).model_dump()
    except ValueError as error:
        raise RequestError(f"tool_calls: {error}") from error
    return tag


def _hermes(
    functions: Sequence[Mapping[str, Any]], must: bool, parallel: Any, whitespace: int
) -> dict[str, Any]:
    """Return the format of calls between ``<tool_call>`` and ``</tool_call>``."""
    calls = [
        _tag('<tool_call>\n{"name": "', function, whitespace, "}\n</tool_call>")
        for function in functions
    ]
    if must:
        return _list(calls, "\n", parallel)
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": calls,
        "stop_after_first": not parallel,
    }


def _mistral(
    functions: Sequence[Mapping[str, Any]], must: bool, parallel: Any, whitespace: int
) -> dict[str, Any]:
    """Return the format of ``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]``."""
    calls = [_tag('{"name": "', function, whitespace, "}") for function in functions]
    block = {
        "type": "tag",
        "begin": "[TOOL_CALLS][",
        "content": _list(calls, ", ", parallel),
        "end": "]",
    }
    if must:
        return block
    return {
        "type": "triggered_tags",
        "triggers": ["[TOOL_CALLS]"],
        "tags": [block],
        "stop_after_first": True,
    }


def _tag(begin: str, function: Mapping[str, Any], whitespace: int, end: str) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'{begin}{function["name"]}", "arguments": ',
        "content": {
            "type": "json_schema",
            "json_schema": _schema(function),
            "max_whitespace_cnt": whitespace,
        },
        "end": end,
    }


def _list(calls: list[dict[str, Any]], separator: str, parallel: Any) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _chosen(tools: list[Any], choice: Any) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the functions that may be called and whether one must be."""
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    found = [item for item in functions if isinstance(item, Mapping) and _is_named(item)]
    if len(found) != len(functions):
        raise RequestError("tool_calls: every tool must be a function with a name")
    if isinstance(choice, Mapping):
        wanted = (choice.get("function") or {}).get("name")
        found = [item for item in found if item["name"] == wanted]
        if not found:
            raise RequestError(f"tool_calls: tool_choice names {wanted!r}, which no tool is called")
        return found, True
    if choice not in ("auto", "required"):
        raise RequestError(f"tool_calls: unknown tool_choice {choice!r}")
    return found, choice == "required"


def _is_named(function: Mapping[str, Any]) -> bool:
    name = function.get("name")
    return isinstance(name, str) and name != ""


def _schema(function: Mapping[str, Any]) -> Any:
    schema = function.get("parameters")
    if schema is None or function.get("strict") is False:
        return {"type": "object"}
    if function.get("strict"):
        check_schema(schema, f"the schema of tool {function['name']!r}"[:200])
    return schema


def _in_json(name: Any) -> str:
    """Return a name as it stands between the quotes of JSON."""
    return json.dumps(name, ensure_ascii=False)[1:-1]
