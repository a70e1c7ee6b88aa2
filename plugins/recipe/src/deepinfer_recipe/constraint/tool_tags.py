"""Tool calls as a grammar: free text and calls, or calls only, in the markup of a model family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepinfer_core.errors import RequestError

XGRAMMAR_FORMATS = {
    "hermes": "qwen_3",
    "qwen": "qwen_3",
    "llama": "llama",
    "deepseek_v4": "deepseek_v4",
    "deepseek_v4_1": "deepseek_v4_1",
}
"""Our name of a markup -> xgrammar's."""

FORMATS = (*XGRAMMAR_FORMATS, "mistral")
"""Markups that tool calls can be held to."""


def tool_tag(source: Any, *, max_whitespace: int) -> dict[str, Any]:
    """Return the structural tag of a source of kind ``tool_calls``.

    Args:
        source: ``{"format": one of FORMATS, "tools": [...], "tool_choice": ...,
            "parallel_tool_calls": bool}``; tools and choice are shaped as in Chat Completions
            (``"auto"``, ``"required"``, ``{"type": "function", "function": {"name": ...}}``).
            Arguments of every tool follow its schema, unless it says ``strict: false``.
        max_whitespace: longest run of whitespace in arguments.

    Raises:
        RequestError: the source is not of that form, or the choice names a tool that is not there.
    """
    if not isinstance(source, Mapping):
        raise RequestError(f"tool_calls must be an object, not {type(source).__name__}")
    known = {"format", "tools", "tool_choice", "parallel_tool_calls"}
    if extra := sorted(set(source) - known):
        raise RequestError(f"tool_calls knows {', '.join(sorted(known))}, not {', '.join(extra)}")
    name = source.get("format")
    if name not in FORMATS:
        raise RequestError(f"unknown format of tool calls {name!r}; known: {', '.join(FORMATS)}")
    tools = source.get("tools")
    if not isinstance(tools, list) or not tools:
        raise RequestError("tool_calls needs a list of tools")
    choice = source.get("tool_choice", "auto")
    parallel = source.get("parallel_tool_calls", True)
    if name == "mistral":
        return _mistral(tools, choice, parallel, max_whitespace)
    from xgrammar import get_model_structural_tag

    try:
        tag: dict[str, Any] = get_model_structural_tag(
            XGRAMMAR_FORMATS[name],
            tools=tools,
            tool_choice=choice,
            reasoning="disabled",  # a mask begins after thinking has ended
            max_whitespace_cnt=max_whitespace,
            parallel_tool_calls=parallel,
        ).model_dump()
    except ValueError as error:
        raise RequestError(f"tool_calls: {error}") from error
    return tag


def _mistral(tools: list[Any], choice: Any, parallel: Any, max_whitespace: int) -> dict[str, Any]:
    """Return the tag of ``[TOOL_CALLS][{"name": ..., "arguments": ...}, ...]``."""
    chosen, must = _chosen(tools, choice)
    calls = [
        {
            "type": "tag",
            "begin": f'{{"name": "{function["name"]}", "arguments": ',
            "content": {
                "type": "json_schema",
                "json_schema": _schema(function),
                "max_whitespace_cnt": max_whitespace,
            },
            "end": "}",
        }
        for function in chosen
    ]
    block = {
        "type": "tag",
        "begin": "[TOOL_CALLS][",
        "content": {
            "type": "tags_with_separator",
            "tags": calls,
            "separator": ", ",
            "at_least_one": True,
            "stop_after_first": not parallel,
        },
        "end": "]",
    }
    free = {
        "type": "triggered_tags",
        "triggers": ["[TOOL_CALLS]"],
        "tags": [block],
        "stop_after_first": True,
    }
    return {"type": "structural_tag", "format": block if must else free}


def _chosen(tools: list[Any], choice: Any) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the functions that may be called and whether one must be."""
    functions = [tool.get("function") if isinstance(tool, Mapping) else None for tool in tools]
    found = [item for item in functions if isinstance(item, Mapping) and item.get("name")]
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


def _schema(function: Mapping[str, Any]) -> Any:
    schema = function.get("parameters")
    return True if schema is None or function.get("strict") is False else schema
