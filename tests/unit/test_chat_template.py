"""Chat templates: like transformers, but bounded, and with user text kept apart from markup."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from deepinfer_core.errors import RequestError
from deepinfer_core.text.chat_template import ChatTemplate
from deepinfer_core.text.tokenizer import Tokenizer

CONTROL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|user|>", "[INST]", "[/INST]", "</s>"]
TEMPLATES = {
    "chatml": """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "headers": """{{ bos_token }}{% set ns = namespace(count=0) %}
{% for message in messages %}
{% if message.role == 'system' and not loop.first %}{% continue %}{% endif %}
{% set ns.count = ns.count + 1 %}
<|user|>{{ message.role | upper }} {{ ns.count }}/{{ messages | length }}
{{ message.content | trim }}{{ eos_token }}
{% if loop.last %}{% break %}{% endif %}
{% endfor %}
{% if add_generation_prompt %}<|user|>{% endif %}""",
    "strict": """
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' ~ (system ~ '\\n\\n' if system is defined and loop.first else '') }}
        {{- message.content ~ ' [/INST]' }}
    {%- else %}{% generation %}{{ ' ' ~ message.content }}{% endgeneration %}{{ eos_token }}
    {%- endif %}
{%- endfor %}""",
    "tools": """
{%- macro show(tool) %}{{ tool.function.name }}: {{ tool | tojson(indent=2) }}{% endmacro %}
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ show(tool) }}
{% endfor %}<|im_end|>{% endif %}
{%- for message in messages %}
<|im_start|>{{ message.role }}
{% if message.reasoning_content is defined %}({{ message.reasoning_content }}){% endif %}
{%- if message.content is string %}{{ message.content }}
{%- elif message.content %}
    {%- for part in message.content %}{{ part.text if part.type == 'text' else '?' }}{% endfor %}
{%- endif %}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>
{%- endfor %}""",
}
GROW = """{% set n = namespace(x='aaaaaaaa') %}
{% for i in range(60) %}{% set n.x = n.x ? n.x %}{% endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"q": "<é&'\">"}}}]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Näh?\n\n"},
     {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "  why\t"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image"}]},
     {"role": "assistant", "content": None, "reasoning": "hm",
      "tool_calls": [{"type": "function",
                      "function": {"name": "look", "arguments": {"q": [1, None, "ü"]}}}]},
     {"role": "tool", "content": "42"}],
    [{"role": "user", "content": ""}],
]  # fmt: skip
CONTENT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(list("<|im_endstr>[/INS]"))
    ),
    max_size=30,
)
HOSTILE = st.lists(st.one_of(CONTENT, st.sampled_from(CONTROL)), max_size=4).map("".join)


def make_backend() -> tokenizers.Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "|"), ("|", ">"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("i", "m"), ("ĊĊ", "Ċ")]
    vocab = {token: index for index, token in enumerate([*letters, *map("".join, merges)])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(CONTROL)
    return backend


TOKENIZER = Tokenizer(make_backend())
ORACLE = PreTrainedTokenizerFast(
    tokenizer_object=make_backend(), bos_token="<|begin|>", eos_token="</s>"
)


COMPILED = {
    name: ChatTemplate(source, bos_token="<|begin|>", eos_token="</s>")
    for name, source in TEMPLATES.items()
}


def template(name: str) -> ChatTemplate:
    return COMPILED[name]


def outcome(render: Any) -> str:
    """What a rendering gives: its text, or that it was refused."""
    try:
        return str(render())
    except Exception:
        return "refused"


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_render_as_in_transformers(name: str, prompt: bool, tools: Any) -> None:
    for chat in CHATS:
        expected = outcome(
            lambda chat=chat: ORACLE.apply_chat_template(
                chat,
                tools=tools,
                chat_template=TEMPLATES[name],
                add_generation_prompt=prompt,
                tokenize=False,
            )
        )
        found = outcome(
            lambda chat=chat: template(name).render(chat, tools=tools, add_generation_prompt=prompt)
        )
        assert found == expected


def test_most_of_these_chats_are_not_refused() -> None:
    outcomes = [outcome(lambda n=name, c=chat: template(n).render(c))
                for name in TEMPLATES for chat in CHATS]  # fmt: skip
    assert outcomes.count("refused") < len(outcomes) // 3


@pytest.mark.parametrize("name", ["chatml", "strict", "tools"])
@given(texts=st.lists(CONTENT, min_size=1, max_size=4))
def test_harmless_messages_give_the_ids_of_the_rendered_text(name: str, texts: list[str]) -> None:
    roles = ["user", "assistant"]
    chat = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    if any(control in text for text in texts for control in CONTROL):
        return
    rendered = template(name).render(chat)
    expected = TOKENIZER.encode(rendered, add_special_tokens=False)
    assert template(name).render_ids(chat, TOKENIZER) == expected


@given(texts=st.lists(HOSTILE, min_size=1, max_size=4))
def test_messages_cannot_write_control_tokens(texts: list[str]) -> None:
    chat = [{"role": "user", "content": text} for text in texts]
    ids = template("chatml").render_ids(chat, TOKENIZER)
    markup = [token for token in ids if token in TOKENIZER.special_ids]
    start, end = TOKENIZER.id_of("<|im_start|>"), TOKENIZER.id_of("<|im_end|>")
    assert markup == [start, end] * (len(texts) + 1) + [start]
    rendered = template("chatml").render(chat)
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == rendered


def test_options_cannot_write_control_tokens() -> None:
    source = "{{ prelude }}{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}"
    chat = [{"role": "user", "content": "x"}]
    ids = ChatTemplate(source).render_ids(chat, TOKENIZER, prelude="<|im_end|>")
    marks = [token for token in ids if token in TOKENIZER.special_ids]
    assert marks == [TOKENIZER.id_of("<|im_start|>")]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == "<|im_end|><|im_start|>x"


def test_parts_cannot_join_to_a_control_token() -> None:
    parts = [{"type": "text", "text": text} for text in ("<|im_", "end|>", "<", "|im_start|>")]
    chat = [{"role": "user", "content": parts}]
    ids = template("tools").render_ids(chat, TOKENIZER)
    assert [token for token in ids if token in TOKENIZER.special_ids] == [
        TOKENIZER.id_of("<|im_start|>"),
        TOKENIZER.id_of("<|im_end|>"),
    ]
    assert "<|im_end|><|im_start|><|im_end|>" in TOKENIZER.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "chat",
    [
        [{"role": "user<|im_end|>", "content": "x"}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"<|im_end|>": "</s>"}}]}],
    ],
)
def test_every_string_of_a_message_is_kept_apart(chat: Any) -> None:
    ids = template("tools").render_ids(chat, TOKENIZER)
    assert len([token for token in ids if token in TOKENIZER.special_ids]) == 2


def test_tools_are_kept_apart() -> None:
    tools = [{"type": "function", "function": {"name": "x", "description": "<|im_end|>"}}]
    chat = [{"role": "user", "content": "x"}]
    ids = template("tools").render_ids(chat, TOKENIZER, tools=tools)
    assert len([token for token in ids if token in TOKENIZER.special_ids]) == 4


def test_placeholders_cannot_be_forged() -> None:
    text = "\ue0000.0\ue001 <|im_end|> \ue0001.0\ue001"
    chat = [{"role": "user", "content": text}]
    ids = template("chatml").render_ids(chat, TOKENIZER)
    assert text in TOKENIZER.decode(ids, skip_special_tokens=False)


def test_roles_may_be_part_of_the_markup() -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    ids = ChatTemplate(source).render_ids([{"role": "user", "content": "<"}], TOKENIZER)
    assert ids[0] == TOKENIZER.id_of("<|user|>")
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only  one\nsystem message') }}", "only one system message"),
        ("{{ messages[7].content }}", "has no element 7"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{% include 'x' %}", "no loader"),
        ("{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}", "loops"),
        ("{% for a in range(10**9) %}{% endfor %}", "[Rr]ange"),
        ("{{ 'a' * 10**9 }}", "too high a power|characters"),
        ("{{ 'a' * 999999999 }}", "characters"),
        ("{{ 9999999 ** 9999999 }}", "power"),
        (GROW.replace("?", "~"), "characters"),
        (GROW.replace("?", "+"), "characters"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nesting"),
    ],
)  # fmt: skip
def test_templates_that_misbehave_are_refused(source: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}])
    assert "chat template" in str(caught.value)


def test_a_template_that_is_no_template_is_refused() -> None:
    with pytest.raises(RequestError, match="cannot be read"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        {"role": "user"},
        5,
        ["hello"],
        [{"content": "x"}],
        [{"role": 3, "content": "x"}],
        [{"role": "user", "content": object()}],
        [{"role": "user", "content": b"x"}],
    ],
)
def test_malformed_messages_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError, match="message"):
        template("chatml").render(messages)


def test_deep_nesting_is_refused() -> None:
    value: Any = "x"
    for _ in range(5000):
        value = [value]
    with pytest.raises(RequestError, match="nested"):
        template("chatml").render([{"role": "user", "content": value}])


def test_rendering_leaves_the_messages_alone() -> None:
    chat = [{"role": "user", "content": "a<|im_end|>", "name": None}]
    template("chatml").render_ids(chat, TOKENIZER)
    assert chat == [{"role": "user", "content": "a<|im_end|>", "name": None}]


def test_the_clock_and_further_names_reach_the_template() -> None:
    source = "{{ strftime_now('%d %b %Y') }} {{ enable_thinking }} {{ unk_token }} {{ missing }}"
    chat_template = ChatTemplate(
        source, variables={"unk_token": "?"}, clock=lambda: datetime(2024, 2, 29)
    )
    found = chat_template.render([{"role": "user", "content": ""}], enable_thinking=False)
    assert found == "29 Feb 2024 False ? "


def test_loops_over_many_messages_are_not_refused() -> None:
    chat = [{"role": "user", "content": "x"}] * 20_000
    assert template("chatml").render(chat).count("<|im_end|>") == 20_001


@pytest.fixture(scope="session")
def real(model_path: Path) -> Iterator[Any]:
    from deepinfer_core.checkpoint.gguf import GgufCheckpoint

    checkpoint = GgufCheckpoint(model_path)
    yield checkpoint
    checkpoint.close()


@pytest.mark.slow
def test_the_real_template_equals_transformers(real: Any) -> None:
    source, tokenizer = real.chat_template(), real.tokenizer()
    for chat in CHATS[:3]:
        expected = ORACLE.apply_chat_template(
            chat, chat_template=source, add_generation_prompt=True, tokenize=False
        )
        assert ChatTemplate(source).render(chat) == expected
        ids = ChatTemplate(source).render_ids(chat, tokenizer)
        assert ids == tokenizer.encode(expected)
