"""Every dialect keeps core's contract of parsers; broken twins of the machine are caught."""

# ruff: noqa: E501 - examples stay in one piece

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, ParserContext
from deepinfer_core.testing.contracts import ParserContract
from deepinfer_core.testing.contracts.base import failures
from deepinfer_core.testing.contracts.parser import MARKS
from deepinfer_recipe.config import ParserConfig
from deepinfer_recipe.parse.dialects import DeepseekV4, Hermes, Mistral

Events = tuple[ParsedEvent, ...]


def text(text: str) -> ParsedEvent:
    return ParsedEvent(kind=EventKind.TEXT, text=text)


def thinking(text: str) -> ParsedEvent:
    return ParsedEvent(kind=EventKind.THINKING, text=text)


def call(name: str, arguments: str, index: int = 0, *, complete: bool = True) -> Events:
    begin = ParsedEvent(kind=EventKind.TOOL_CALL_BEGIN, call_index=index, name=name)
    delta = ParsedEvent(kind=EventKind.TOOL_CALL_DELTA, call_index=index, text=arguments)
    end = ParsedEvent(kind=EventKind.TOOL_CALL_END, call_index=index, complete=complete)
    return (begin, delta, end) if arguments else (begin, end)


THOUGHTS: tuple[tuple[str, Events], ...] = (
    ("<think>\nHm.\n</think>\n\nYes.\n", (thinking("Hm."), text("Yes.\n"))),
    ("<think>Hm.", (thinking("Hm."),)),
    ("<think></think>Yes.", (text("Yes."),)),
    ("A</think>B", (text("A</think>B"),)),
)

DSML = (
    "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>", '<｜DSML｜invoke name="f">', "</｜DSML｜invoke>",
    '<｜DSML｜parameter name="a b" string="true">', '<｜DSML｜parameter name="a" string="false">',
    "</｜DSML｜parameter>", "<｜DSML｜", '<｜DSML｜parameter name="a">', "｜DSML｜", '">',
)  # fmt: skip


class TestThinking(ParserContract):
    component = "thinking"
    examples = THOUGHTS


class TestHermes(ParserContract):
    component = "hermes"
    examples = (
        *THOUGHTS,
        (
            ('<think>a</think>\nb\n<tool_call>\n{"name": "f", "arguments": {"x": "}\\""}}\n'
            '</tool_call>\n<tool_call>{"arguments": [1], "name": "g"}</tool_call>\nc'),
            (
                thinking("a"), text("b"), *call("f", '{"x": "}\\""}'),
                *call("g", "[1]", 1), text("c"),
            ),
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', call("f", '{"a": 1}')),
        ('<tool_call>{"name": "f"}</tool_call>', call("f", "{}")),
        ('<tool_call>{"name": "f", "arguments": "Rome"}</tool_call>', call("f", '"Rome"')),
        (
            '<tool_call>{"name": "f", "arguments": Rome}</tool_call>',
            (text('<tool_call>{"name": "f", "arguments": Rome}</tool_call>'),),
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "b',
            call("f", '{"a": "b', complete=False),
        ),
        ('<tool_call>{"name": "f", "arguments": {}', call("f", "{}")),
        ("say <tool_call> twice", (text("say <tool_call> twice"),)),
        ('<tool_call>{"nome": 3}</tool_call>', (text('<tool_call>{"nome": 3}</tool_call>'),)),
    )  # fmt: skip


class TestLlama(ParserContract):
    component = "llama"
    marks = (*MARKS, "<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}', ";", '{"type": ')
    examples = (
        *THOUGHTS,
        (
            '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
            (*call("f", '{"a": 1}'), *call("g", "{}", 1)),
        ),
        ('\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', call("f", '{"a": 1}')),
        ('{"name": "Bob", "age": 3}', (text('{"name": "Bob", "age": 3}'),)),
        ('\n {"name": "Bob", "age": 3}', (text('\n {"name": "Bob", "age": 3}'),)),
        (' \n{"name": "f", "parameters": {}}', call("f", "{}")),
        ('{"name": "f", "parameters": }', (text('{"name": "f", "parameters": }'),)),
        ('{"city": "Rome"} is JSON', (text('{"city": "Rome"} is JSON'),)),
        ('So: {"name": "f", "parameters": {}}', (text('So: {"name": "f", "parameters": {}}'),)),
    )


class TestMistral(ParserContract):
    component = "mistral"
    marks = (*MARKS, "[ARGS]", "[CALL_ID]", "[TOOL_CALLS]f[ARGS]{", "[", "]", "[THINK]", "[/THINK]")
    examples = (
        ("[THINK]a[/THINK]b", (thinking("a"), text("b"))),
        (
            '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1, {}]}}, {"name": "g", "arguments": {}}]',
            (*call("f", '{"a": [1, {}]}'), *call("g", "{}", 1)),
        ),
        (
            'x[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{}',
            (text("x"), *call("f", '{"a": 1}'), *call("g", "{}", 1)),
        ),
        ("[TOOL_CALLS]f{}", call("f", "{}")),
        ("see [TOOL_CALLS] there\nand", (text("see [TOOL_CALLS] there\nand"),)),
    )


def dsml(text: str, gap: str, block: str) -> str:
    return text.replace("｜DSML｜tool_calls", f"｜DSML｜{gap}{block}").replace(
        "｜DSML｜invoke", f"｜DSML｜{gap}invoke"
    ).replace("｜DSML｜parameter", f"｜DSML｜{gap}parameter")  # fmt: skip


WEATHER = (
    'ok\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get">\n<｜DSML｜parameter name="first name" '
    'string="true">Al "x"\n</｜DSML｜parameter>\n<｜DSML｜parameter name="k"q" string="false">{"n": 1}'
    '</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="none">\n</｜DSML｜invoke>\n'
    "</｜DSML｜tool_calls>"
)
DSML_EXAMPLES: tuple[tuple[str, Events], ...] = (
    *THOUGHTS,
    (
        WEATHER + "after",
        (
            text("ok"), *call("get", '{"first name": "Al \\"x\\"\\n", "k\\"q": {"n": 1}}'),
            *call("none", "{}", 1), text("after"),
        ),
    ),
    (
        ('<think>a<｜DSML｜tool_calls><｜DSML｜invoke name="f">'
        '<｜DSML｜parameter name="a">Tokyo</｜DSML｜parameter>'
        '<｜DSML｜parameter name="a" string="false">True</｜DSML｜parameter>'
        "</｜DSML｜invoke></｜DSML｜tool_calls>"),
        (thinking("a"), *call("f", '{"a": "Tokyo", "a (2)": "True"}')),
    ),
    (
        '<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">x',
        call("f", '{"a": "x', complete=False),
    ),
    (
        ('<｜DSML｜tool_calls><｜DSML｜invoke name="f"><｜DSML｜parameter string="true" name="a">x'
        "</｜DSML｜invoke></｜DSML｜tool_calls>"),
        call("f", '{"a": "x"}'),
    ),
    ("the <｜DSML｜tool_calls> tag", (text("the <｜DSML｜tool_calls> tag"),)),
)  # fmt: skip


EXAMPLES_41 = tuple(
    (
        dsml(said, " ", "calls"),
        tuple(evolve(event, text=dsml(event.text, " ", "calls")) for event in meant),
    )
    for said, meant in DSML_EXAMPLES
)


class TestDeepseekV4(ParserContract):
    component = "deepseek_v4"
    marks = (*MARKS, *DSML)
    examples = DSML_EXAMPLES


class TestDeepseekV41(ParserContract):
    component = "deepseek_v4_1"
    marks = (*MARKS, *(dsml(mark, " ", "calls") for mark in DSML))
    examples = EXAMPLES_41


@pytest.mark.parametrize(
    ("kind", "said", "end", "complete"),
    [
        (Hermes, '<tool_call>\n{"name": "f", "arguments": {}}', "\n</tool_call>", True),
        (Mistral, "[TOOL_CALLS]f[ARGS]{}", "[TOOL_CALLS]", True),
        (DeepseekV4, WEATHER[: WEATHER.index("</｜DSML｜tool")], "</｜DSML｜tool_calls>", True),
        (DeepseekV4, WEATHER[: WEATHER.rindex("</｜DSML｜invoke")], "</｜DSML｜invoke>", False),
    ],
)
def test_a_mark_cut_off_after_a_call_is_no_text(
    kind: Any, said: str, end: str, complete: bool
) -> None:
    parser = kind(ParserConfig(), ParserContext(token_of=lambda spelling: None))
    for size in range(len(end)):
        stream = parser.stream()
        events = [*stream.push(said + end[:size]), *stream.finish()]
        assert events[-1].kind is EventKind.TOOL_CALL_END, (end[:size], events)
        assert events[-1].complete is complete


# ------------------------------------------------------------------------- broken twins


class Twin(TestDeepseekV4):
    """Runs the contract on a parser whose stream is changed."""

    change: Any = None

    def make(self, context: ParserContext) -> Any:
        parser = DeepseekV4(ParserConfig(), context)
        calls = parser.calls
        parser.calls = lambda: type(self).change(calls())  # type: ignore[method-assign]
        return parser


def forget_held(stream: Any) -> Any:
    stream.finish = stream._taken
    return stream


def unescaped(stream: Any) -> Any:
    argue = stream.argue
    stream.argue = lambda text: argue(text.replace("\\", ""))
    return stream


def never_ends(stream: Any) -> Any:
    stream.end = lambda *, complete=True: None
    return stream


def whole_marks_only(stream: Any) -> Any:
    push = stream.push

    def eager(text: str) -> Any:
        events = list(push(text))
        held, stream._held = stream._held, ""
        stream.say(EventKind.TEXT, held)
        return [*events, *stream._taken()]

    stream.push = eager
    return stream


def forgets_strays(stream: Any) -> Any:
    stream._say_stray = lambda: None
    return stream


@pytest.mark.parametrize(
    ("change", "law"),
    [
        (forget_held, "test_plain_text_passes"),
        (unescaped, "test_examples"),
        (never_ends, "test_events_are_well_formed"),
        (whole_marks_only, "test_chunks_make_no_difference"),
        (forgets_strays, "test_ordinary_words_survive"),
    ],
)
def test_broken_twins_are_caught(change: Any, law: str) -> None:
    class Changed(Twin):
        pass

    Changed.change = staticmethod(change)
    assert law in failures(Changed, Changed().make, only=[law])
