"""What the xgrammar constraint compiles, refuses and limits."""

from __future__ import annotations

import json
import re
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("xgrammar")

from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.constraint import ConstraintContext
from deepinfer_core.testing.contracts.constraint import EOS, VOCAB_SIZE, token_text
from deepinfer_recipe.constraint.compiler import Vocabulary, XgrammarConstraint
from deepinfer_recipe.constraint.config import XgrammarConfig
from deepinfer_recipe.constraint.sources import Marks
from deepinfer_recipe.constraint.tool_tags import FORMATS

CONTEXT = ConstraintContext(vocab_size=VOCAB_SIZE, token_text=token_text, eos_token_ids=(EOS,))

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
        },
    },
}
TIME = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}


def constraint(**limits: Any) -> XgrammarConstraint:
    return XgrammarConstraint(XgrammarConfig(**limits), CONTEXT)


@pytest.fixture(scope="module")
def shared() -> XgrammarConstraint:
    return constraint()


def accepts(compiler: XgrammarConstraint, kind: str, source: Any, text: str) -> bool:
    matcher = compiler.compile(kind, source)
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)


NESTED = {
    "$defs": {
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "label": {"type": "string", "minLength": 2}},
            "required": ["x", "label"],
            "additionalProperties": False,
        }
    },
    "type": "object",
    "properties": {
        "origin": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
        "level": {"type": "integer", "enum": [1, 2]},
        "when": {"type": "string", "format": "date-time"},
    },
    "required": ["origin", "level", "when"],
    "additionalProperties": False,
}
"""What pydantic makes of an optional nested model, an integer enum and a datetime."""


@pytest.mark.parametrize(
    ("value", "good"),
    [
        ({"origin": None, "level": 1, "when": "2026-01-02T03:04:05Z"}, True),
        ({"origin": {"x": 1.5, "label": "ab"}, "level": 2, "when": "2026-01-02T03:04:05Z"}, True),
        ({"origin": {"x": 1.5, "label": "a"}, "level": 2, "when": "2026-01-02T03:04:05Z"}, False),
        ({"origin": None, "level": 99, "when": "2026-01-02T03:04:05Z"}, False),
        ({"origin": None, "level": 1, "when": "tomorrow"}, False),
        ({"origin": None, "level": 1}, False),
    ],
)
def test_schema_of_a_nested_model_is_kept_whole(
    shared: XgrammarConstraint, value: Any, good: bool
) -> None:
    for indent in (None, 4):
        assert accepts(shared, "json_schema", NESTED, json.dumps(value, indent=indent)) is good


def test_a_schema_may_come_as_text(shared: XgrammarConstraint) -> None:
    assert accepts(shared, "json_schema", json.dumps({"type": "integer"}), "12")
    assert not accepts(shared, "json_schema", json.dumps({"type": "integer"}), "x")


def test_an_empty_schema_allows_every_value(shared: XgrammarConstraint) -> None:
    for text in ('{"a": [1, null]}', "3", '"x"'):
        assert accepts(shared, "json_schema", {}, text)


def test_json_object_is_any_object_and_nothing_else(shared: XgrammarConstraint) -> None:
    assert accepts(shared, "json_object", None, '{"a": {"b": [1, "x", null]}}')
    assert not accepts(shared, "json_object", None, "[1]")


def test_whitespace_cannot_go_on_forever(shared: XgrammarConstraint) -> None:
    assert not accepts(shared, "json_object", None, '{"a":' + " " * 200 + "1}")


SPACED = {
    "json_schema": (NESTED, '{"origin": {"x": 1.5, "label": "ab"}, "level": 1, "when": "'),
    "any value": ({}, '{"a": [1, {"b": null}], "c": {}}'),
    "array": ({"type": "array"}, '[[1, 2], ["x"], {"a": []}]'),
    "map": ({"type": "object", "additionalProperties": {"type": "integer"}}, '{"a": 1, "b": 2}'),
    "tuple": ({"type": "array", "prefixItems": [{}, {"type": "null"}]}, "[[{}], null]"),
}


@pytest.mark.parametrize("name", SPACED)
def test_no_place_takes_whitespace_without_end(shared: XgrammarConstraint, name: str) -> None:
    """Two places that may be empty can meet, so twice `max_whitespace` is the bound."""
    schema, text = SPACED[name]
    matcher = shared.compile("json_schema", schema)
    in_string = False
    for letter in text.encode():
        assert matcher.accept(letter), text
        in_string ^= letter == ord('"')
        for blank in b"" if in_string else b" \n\t":
            probe = matcher.fork()
            run = sum(probe.accept(blank) for _ in range(200))
            assert run <= 2 * XgrammarConfig().max_whitespace


def test_choices_are_taken_literally(shared: XgrammarConstraint) -> None:
    choices = ['say "no"', "a|b", "back\\slash", "line\nbreak", "日本"]
    for text in choices:
        assert accepts(shared, "choice", choices, text)
    assert not accepts(shared, "choice", choices, "a")


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}\n</tool_call>'
CALLS = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama": '{"name": "weather", "parameters": {"city": "Oslo", "days": 2}}',
    "mistral": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}]',
    "deepseek_v4": (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Oslo</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
    ),
    "deepseek_v4_1": (
        '\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="weather">\n'
        '<｜DSML｜ parameter name="city" string="true">Oslo</｜DSML｜ parameter>\n'
        '<｜DSML｜ parameter name="days" string="false">2</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    ),
}


@pytest.mark.parametrize("markup", FORMATS)
def test_required_tools_are_held_to_their_schemas(shared: XgrammarConstraint, markup: str) -> None:
    source = {"format": markup, "tools": [WEATHER, TIME], "tool_choice": "required"}
    assert accepts(shared, "tool_calls", source, CALLS[markup])
    assert not accepts(shared, "tool_calls", source, "Hello")
    assert not accepts(shared, "tool_calls", source, CALLS[markup].replace("2", '"two"'))
    assert not accepts(shared, "tool_calls", source, CALLS[markup].replace("weather", "rain"))


@pytest.mark.parametrize("markup", FORMATS)
def test_with_auto_the_model_may_just_answer(shared: XgrammarConstraint, markup: str) -> None:
    source = {"format": markup, "tools": [WEATHER, TIME], "tool_choice": "auto"}
    assert accepts(shared, "tool_calls", source, "Hello there")
    assert accepts(shared, "tool_calls", source, CALLS[markup])


@pytest.mark.parametrize("markup", FORMATS)
def test_a_named_tool_is_the_only_one(shared: XgrammarConstraint, markup: str) -> None:
    named = {"type": "function", "function": {"name": "time"}}
    source = {"format": markup, "tools": [WEATHER, TIME], "tool_choice": named}
    assert not accepts(shared, "tool_calls", source, CALLS[markup])


@pytest.mark.parametrize("markup", ["hermes", "mistral"])
def test_parallel_calls_can_be_forbidden(shared: XgrammarConstraint, markup: str) -> None:
    call = CALLS[markup]
    twice = f"{call}\n{call}" if markup == "hermes" else f"{call[:-1]}, {call[13:]}"
    source = {"format": markup, "tools": [WEATHER], "tool_choice": "required"}
    assert accepts(shared, "tool_calls", source, twice)
    assert not accepts(shared, "tool_calls", {**source, "parallel_tool_calls": False}, twice)


@pytest.mark.parametrize("markup", FORMATS)
def test_a_call_or_an_answer_of_a_form(shared: XgrammarConstraint, markup: str) -> None:
    answers = {
        "json_schema": ({"type": "object", "properties": {"a": {"enum": [1]}}}, '{"a": 1}'),
        "json_object": ({}, '{"b": []}'),
        "regex": ("[0-9]+", "12"),
        "ebnf": ('root ::= "yes"', "yes"),
        "choice": (["left", "right"], "left"),
    }
    for kind, (source, good) in answers.items():
        asked = {"format": markup, "tools": [WEATHER], "answer": {"kind": kind, "source": source}}
        assert accepts(shared, "tool_calls", asked, good)
        assert accepts(shared, "tool_calls", asked, CALLS[markup])
        assert not accepts(shared, "tool_calls", asked, "Hello")


@pytest.mark.parametrize("markup", ["hermes", "llama", "mistral"])
def test_names_of_tools_are_written_as_json(shared: XgrammarConstraint, markup: str) -> None:
    odd: dict[str, Any] = {"type": "function", "function": {"name": 'say "é\\"'}}
    source = {"format": markup, "tools": [odd], "tool_choice": "required"}
    field = "parameters" if markup == "llama" else "arguments"
    call = json.dumps({"name": odd["function"]["name"], field: {}}, ensure_ascii=False)
    around = {"hermes": "<tool_call>\n%s\n</tool_call>", "mistral": "[TOOL_CALLS][%s]"}
    assert accepts(shared, "tool_calls", source, around.get(markup, "%s") % call)


def test_control_tokens_stand_for_their_marks() -> None:
    """A vocabulary may have the marks of calls as control tokens, which have no text."""
    control, other = EOS + 1, EOS + 2
    context = ConstraintContext(
        vocab_size=other + 1, token_text=lambda token: bytes([token][: token < 256]),
        eos_token_ids=(EOS,),
    )  # fmt: skip
    compiler = XgrammarConstraint(XgrammarConfig(), context)
    source = {"format": "mistral", "tools": [WEATHER], "tool_choice": "required"}
    plain = compiler.compile("tool_calls", source)
    assert not plain.accept(control)
    matcher = compiler.compile("tool_calls", {**source, "marks": {"[TOOL_CALLS]": control}})
    mask = np.zeros(-(-context.vocab_size // 32), np.int32)
    matcher.fill_mask(mask)
    assert [(mask[token // 32] >> token % 32) & 1 for token in (control, other)] == [1, 0]
    assert matcher.accept(control)
    assert all(matcher.accept(letter) for letter in CALLS["mistral"][12:].encode())
    assert matcher.accept(EOS)


def test_arguments_that_follow_no_schema_are_an_object(shared: XgrammarConstraint) -> None:
    for function in ({"name": "f"}, {"name": "f", "parameters": {"const": 1}, "strict": False}):
        tools = [{"type": "function", "function": function}]
        source = {"format": "hermes", "tools": tools, "tool_choice": "required"}
        for arguments, good in (('{"x": [1]}', True), ("[1]", False), ("1", False)):
            call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
            assert accepts(shared, "tool_calls", source, call) is good


@pytest.mark.parametrize(
    "source",
    [
        5,
        {},
        {"format": "morse", "tools": [WEATHER]},
        {"format": "hermes", "tools": []},
        {"format": "hermes", "tools": [{}]},
        {"format": "mistral", "tools": [{}]},
        {"format": "hermes", "tools": [WEATHER], "tool_choice": "perhaps"},
        {"format": "mistral", "tools": [WEATHER], "tool_choice": "perhaps"},
        {
            "format": "mistral",
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "x"}},
        },
        {"format": "hermes", "tools": [WEATHER], "choices": "auto"},
        {"format": "hermes", "tools": [WEATHER], "answer": "no"},
        {"format": "hermes", "tools": [WEATHER], "marks": {"<tool_call>": "x"}},
        {"format": "hermes", "tools": [WEATHER], "answer": {"kind": "poem", "source": ""}},
        {"format": "hermes", "tools": [{"type": "function", "function": {"name": 5}}]},
    ],
)
def test_bad_tool_calls_are_refused(shared: XgrammarConstraint, source: Any) -> None:
    with pytest.raises(RequestError):
        shared.compile("tool_calls", source)


# ------------------------------------------------------------------------------------ limits


def test_large_sources_are_refused_by_size() -> None:
    with pytest.raises(RequestError, match="bytes"):
        constraint(max_source_bytes=100).compile("regex", "a" * 101)


def test_deep_sources_are_refused_however_deep() -> None:
    deep: Any = True
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(RequestError, match="nested deeper"):
        constraint().compile("json_schema", deep)


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"not": {"const": 3}}, "'not' at #/properties/if"),
        ({"if": True, "then": False}, "'if'"),
        ({"type": "array", "contains": {"const": 3}}, "'contains'"),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, "'allOf' of several"),
        (
            {"anyOf": [{"$ref": "https://host/schema"}]},
            "another document at #/properties/if/anyOf/0",
        ),
    ],
)
def test_what_no_grammar_says_is_refused_by_name(
    shared: XgrammarConstraint, part: Any, word: str
) -> None:
    schema = {"type": "object", "properties": {"if": part, "not": {"type": "integer"}}}
    with pytest.raises(RequestError, match=re.escape(word)):
        shared.compile("json_schema", schema)
    function = {"name": "f", "parameters": schema, "strict": True}
    source = {"format": "hermes", "tools": [{"type": "function", "function": function}]}
    with pytest.raises(RequestError, match=f"schema of tool 'f' has .*{re.escape(word)}"):
        shared.compile("tool_calls", source)
    function["strict"] = None
    shared.compile("tool_calls", source)


@pytest.mark.parametrize("pattern", [r"^\\\(?(?=a)b$", "(?!a)b", "(?<=a)b", "(?<!a)b"])
def test_a_pattern_that_looks_around_is_refused(shared: XgrammarConstraint, pattern: str) -> None:
    with pytest.raises(RequestError, match="looks ahead or behind at #"):
        shared.compile("json_schema", {"type": "string", "pattern": pattern})


def test_words_that_are_enforced_are_none_of_those(shared: XgrammarConstraint) -> None:
    part = {"allOf": [{"$ref": "#/$defs/not"}], "title": "contains"}
    schema = {
        "type": "object",
        "properties": {"not": part, "if": {"type": "string", "pattern": r"^\(?a$"}},
        "$defs": {"not": {"enum": ["a"]}},
    }
    assert accepts(shared, "json_schema", schema, '{"not": "a", "if": "(a"}')


@pytest.mark.parametrize(("kind", "source"), [("regex", r"[^\s\S]"), ("ebnf", "root ::= root")])
def test_what_matches_nothing_is_refused(
    shared: XgrammarConstraint, kind: str, source: str
) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match="matches nothing"):
            shared.compile(kind, source)


def test_large_results_are_refused() -> None:
    with pytest.raises(RequestError, match="compiles to"):
        constraint(max_compiled_bytes=10).compile("regex", "[a-z]+")


class Hanging(XgrammarConstraint):
    """Compiles nothing before it is let go."""

    def __init__(self, **limits: Any) -> None:
        super().__init__(XgrammarConfig(compile_timeout_s=0.001, **limits), CONTEXT)
        self.gate = threading.Event()

    def _make_vocabulary(self, marks: Marks) -> Vocabulary:
        made = super()._make_vocabulary(marks)
        wait = SimpleNamespace(compile_regex=lambda source: self.gate.wait(30))
        return Vocabulary(compiler=wait, silent=made.silent)


def test_slow_sources_are_refused_in_time() -> None:
    slow = Hanging()
    with pytest.raises(RequestError, match="takes longer than"):
        slow.compile("regex", "a")
    slow.gate.set()


def test_no_more_than_so_many_are_compiled_at_once() -> None:
    busy = Hanging(max_compiling=1)
    with pytest.raises(RequestError, match="takes longer than"):
        busy.compile("regex", "a")
    with pytest.raises(RequestError, match="being compiled already"):
        busy.compile("regex", "b")
    busy.gate.set()


def test_messages_tell_the_cause_and_nothing_of_the_compiler() -> None:
    with pytest.raises(RequestError) as caught:
        constraint().compile("regex", "(")
    assert "parenthesis" in str(caught.value)
    assert ".cc" not in str(caught.value)


def test_equal_sources_are_compiled_once(shared: XgrammarConstraint) -> None:
    compiler = constraint()
    compiler.compile("regex", "[ab]+")
    kept = dict(compiler._kept)
    compiler.compile("regex", "[ab]+")
    assert dict(compiler._kept) == kept
    assert len(kept) == 1
    compiler.compile("ebnf", 'root ::= "[ab]+"')
    assert len(compiler._kept) == 2


def test_the_cache_is_bounded() -> None:
    compiler = constraint(cache_bytes=1)
    compiler.compile("regex", "[ab]+")
    assert not compiler._kept


def test_many_threads_may_compile() -> None:
    compiler = constraint(max_compiling=64)
    results: list[bool] = []

    def work(number: int) -> None:
        matcher = compiler.compile("regex", f"x{{{number + 1}}}")
        results.append(all(matcher.accept(ord("x")) for _ in range(number + 1)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 16
