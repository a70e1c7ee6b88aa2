"""What may be compiled: sources are checked, measured and brought into one form.

A source becomes a `Source`: a method of xgrammar's compiler with its arguments, and a key under
which the result is cached. Nothing here imports xgrammar.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from deepinfer_core.errors import RequestError
from deepinfer_recipe.constraint.config import XgrammarConfig
from deepinfer_recipe.constraint.schema_words import check_schema
from deepinfer_recipe.constraint.tool_tags import tool_tag
from deepinfer_recipe.json_text import is_deep

ANY_OBJECT = {"type": "object"}


Marks = tuple[tuple[int, str], ...]
"""Token ids and their spellings."""


@frozen(kw_only=True)
class Source:
    """Something to compile.

    Attributes:
        method: of ``xgrammar.GrammarCompiler``.
        argument: its first argument.
        options: its keyword arguments.
        key: equal for equal sources.
        marks: control tokens that stand for their spelling in this source.
    """

    method: str
    argument: Any
    options: Mapping[str, Any]
    key: str
    marks: Marks = ()


def read_source(kind: str, source: Any, config: XgrammarConfig) -> Source:
    """Check a source and bring it into one form.

    Args:
        kind: one of ``KINDS``.
        source: what the kind wants, see the plugin's README.
        config: limits.

    Raises:
        RequestError: the kind is unknown, or the source is not of its form or too large.
    """
    if kind not in KINDS:
        raise RequestError(f"unknown kind of constraint {kind!r}; known: {', '.join(KINDS)}")
    text = source if isinstance(source, str) else _json(kind, source, config)
    if (size := len(text.encode("utf-8", "surrogatepass"))) > config.max_source_bytes:
        raise RequestError(
            f"the {kind} has {size} bytes; at most {config.max_source_bytes} are allowed here"
        )
    method, argument, options = KINDS[kind](source, text, config)
    return Source(
        method=method,
        argument=argument,
        options=options,
        key=f"{kind}:{type(source) is str}:{text}",
        marks=_marks(source) if kind == "tool_calls" else (),
    )


def _marks(source: Any) -> Marks:
    marks = source.get("marks", {})
    good = isinstance(marks, Mapping) and all(
        isinstance(token, int) and token >= 0 for token in marks.values()
    )
    if not good:
        raise RequestError("tool_calls: marks must be an object of spellings and token ids")
    return tuple(sorted((token, spelling) for spelling, token in marks.items()))


def _json(kind: str, source: Any, config: XgrammarConfig) -> str:
    _check_depth(kind, source, config.max_depth)
    try:
        return json.dumps(source, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RequestError(f"the {kind} is not JSON: {error}") from error


def _check_depth(kind: str, source: Any, max_depth: int) -> None:
    if is_deep(source, max_depth):
        raise RequestError(f"the {kind} is nested deeper than {max_depth} levels")


# --------------------------------------------------------------------------------- kinds

Compiled = tuple[str, Any, Mapping[str, Any]]


def _json_schema(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    options = {"any_whitespace": True, "max_whitespace_cnt": config.max_whitespace}
    schema = _schema(source, config)
    return "compile_json_schema", json.dumps(schema, ensure_ascii=False), options


def _schema(source: Any, config: XgrammarConfig) -> Any:
    if isinstance(source, str):
        try:
            source = json.loads(source)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the json_schema is not JSON: {error}") from error
        _check_depth("json_schema", source, config.max_depth)
    if not isinstance(source, Mapping | bool):
        raise RequestError(f"a json_schema must be an object, not {type(source).__name__}")
    if isinstance(source, Mapping) and not source:
        return True  # an empty schema allows every value
    check_schema(source, "the json_schema")
    return source


def _json_object(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    if source not in (None, True, {}, ""):
        raise RequestError("json_object takes no source; json_schema does")
    return _json_schema(ANY_OBJECT, text, config)


def _regex(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    return "compile_regex", _string("regex", source), {}


def _ebnf(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    return "compile_grammar", _string("ebnf", source), {}


def _choice(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    return _structural({"type": "structural_tag", "format": _one_of(source)})


def _one_of(source: Any) -> Mapping[str, Any]:
    good = (
        isinstance(source, Sequence)
        and not isinstance(source, str | bytes)
        and len(source) > 0
        and all(isinstance(item, str) and item for item in source)
    )
    if not good:
        raise RequestError("a choice must be a list of strings, none of them empty")
    options = [{"type": "const_string", "value": item} for item in dict.fromkeys(source)]
    return _either(options)


def _either(formats: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _structural_tag(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    if not isinstance(source, Mapping):
        raise RequestError(f"a structural_tag must be an object, not {type(source).__name__}")
    return _structural(source)


def _tool_calls(source: Any, text: str, config: XgrammarConfig) -> Compiled:
    tag = tool_tag(source, max_whitespace=config.max_whitespace)
    if (answer := source.get("answer")) is not None:
        tag["format"] = _either([tag["format"], _answer(answer, config)])
    return _structural(tag)


def _answer(answer: Any, config: XgrammarConfig) -> Mapping[str, Any]:
    """Return the format of what may be said instead of a call."""
    shape = answer if isinstance(answer, Mapping) else {}
    kind, source = shape.get("kind"), shape.get("source")
    if kind in ("json_schema", "json_object"):
        schema = _schema(ANY_OBJECT if kind == "json_object" else source, config)
        return {
            "type": "json_schema",
            "json_schema": schema,
            "max_whitespace_cnt": config.max_whitespace,
        }
    if kind == "regex":
        return {"type": "regex", "pattern": _string(kind, source)}
    if kind == "ebnf":
        return {"type": "grammar", "grammar": _string(kind, source)}
    if kind == "choice":
        return _one_of(source)
    raise RequestError(
        "tool_calls: answer must be an object of a kind (json_schema, json_object, regex, ebnf, "
        f"choice) and a source, not {answer!r:.60}"
    )


def _structural(tag: Mapping[str, Any]) -> Compiled:
    return "compile_structural_tag", json.dumps(tag, ensure_ascii=False), {}


def _string(kind: str, source: Any) -> str:
    if not isinstance(source, str) or not source:
        raise RequestError(f"the {kind} must be a string that is not empty, not {source!r:.60}")
    return source


KINDS: Mapping[str, Callable[[Any, str, XgrammarConfig], Compiled]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "ebnf": _ebnf,
    "choice": _choice,
    "structural_tag": _structural_tag,
    "tool_calls": _tool_calls,
}
"""Kind -> what reads its source."""
