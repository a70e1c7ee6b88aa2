"""The recipes keep core's contract; parser and recipe meet."""

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer_core.interfaces.parser import EventKind, ParsedEvent, ParserContext
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.testing.contracts import RecipeContract
from deepinfer_core.testing.fakes import byte_tokenizer
from deepinfer_recipe.config import ParserConfig
from deepinfer_recipe.conversation import Call, Conversation, Message, Tool
from deepinfer_recipe.parse.dialects import DeepseekV4, DeepseekV41
from deepinfer_recipe.recipe import dialect_of
from deepinfer_recipe.render.deepseek import DeepseekEncoding, DeepseekRenderer
from deepinfer_recipe.render.deepseek_text import CONTROL


class TestChat(RecipeContract):
    component = "chat"


class DeepseekContract(RecipeContract):
    lossless = False

    def context(self) -> RecipeContext:
        return RecipeContext(tokenizer=byte_tokenizer(CONTROL), chat_template=None)


class TestDeepseekV4(DeepseekContract):
    component = "deepseek_v4"


class TestDeepseekV41(DeepseekContract):
    component = "deepseek_v4_1"


def test_templates_betray_dialects() -> None:
    assert dialect_of("{{ '<tool_call>' }}") == "hermes"
    assert dialect_of("<think>{{ tools }}") == "thinking"
    assert dialect_of("{{ tools }}") == "plain"
    assert dialect_of("<think>{{ messages }}") == "hermes", "tools are told in its markup"
    assert dialect_of("<｜DSML｜ calls>") == "deepseek_v4_1"
    assert dialect_of("<｜DSML｜tool_calls>") == "deepseek_v4"
    assert dialect_of(None) == "plain"


NAMES = st.text(min_size=1, max_size=8).filter(lambda name: '">' not in name)
VALUES = st.text(max_size=12) | st.integers() | st.booleans() | st.none() | st.lists(st.integers())


@given(
    arguments=st.dictionaries(NAMES, VALUES, max_size=4),
    v41=st.booleans(),
    thought=st.text(alphabet="ab <>/\n", max_size=8).map(str.strip),
    said=st.text(alphabet="ab<｜DSML>\n", max_size=8).map(str.strip),
)
@settings(max_examples=200, deadline=None)
def test_what_is_rendered_is_parsed_back(
    arguments: dict[str, Any], v41: bool, thought: str, said: str
) -> None:
    """An answer in a prompt, taken as output, gives the answer."""
    import json

    tokenizer = byte_tokenizer(CONTROL)
    text = json.dumps(arguments)
    call = Call(call_id="1", name="get it", arguments=text)
    answer = Message(role="assistant", content=said, reasoning=thought, calls=(call,))
    talk = Conversation(messages=(answer,), tools=(Tool(name="get it"),), thinking=True)
    parts, _ = DeepseekEncoding(v41=v41).parts(talk)
    ids = DeepseekRenderer(tokenizer, v41=v41).ids(parts)
    begin, end = tokenizer.id_of("<｜Assistant｜>"), tokenizer.id_of(CONTROL[1])
    output = ids[ids.index(begin) + 1 : ids.index(end)]
    kind = DeepseekV41 if v41 else DeepseekV4
    parser = kind(ParserConfig(), ParserContext(token_of=tokenizer.id_of))
    stream, events, held = parser.stream(), list[ParsedEvent](), list[int]()
    for token in (*output, None):
        if token is not None and token not in parser.token_ids:
            held.append(token)
            continue
        events += stream.push(tokenizer.decode(held)) if held else []
        held = []
        events += [] if token is None else stream.push_token(token)
    events += stream.finish()
    text_of = partial(_joined, events)
    assert text_of(EventKind.THINKING) == thought
    assert text_of(EventKind.TEXT).strip("\n") == said
    assert json.loads(text_of(EventKind.TOOL_CALL_DELTA)) == arguments


def _joined(events: Any, kind: EventKind) -> str:
    return "".join(event.text for event in events if event.kind is kind)
