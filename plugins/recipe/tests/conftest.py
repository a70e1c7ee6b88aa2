"""Shared: a recipe over a vocabulary of bytes, and a stand-in for the engine."""

# ruff: noqa: E501 - templates stay in one piece

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from deepinfer_core.interfaces.parser import ParserContext
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.interfaces.wire import ReadContext, ServerEvent
from deepinfer_core.requests import Delta, FinishReason, Output, RequestOutput, TokenLogprob
from deepinfer_core.testing.fakes import byte_tokenizer
from deepinfer_recipe.config import ChatConfig, ParserConfig
from deepinfer_recipe.parse.dialects import DeepseekV4, DeepseekV41, Hermes
from deepinfer_recipe.recipe import ChatRecipe, build

CONTROL = (
    "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>",
    "<think>", "</think>", "<tool_call>", "</tool_call>", "｜DSML｜",
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{\"name\": "
    "{{ c.function.name | tojson }}, \"arguments\": {{ c.function.arguments | tojson }}}"
    "</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking %}<think>{% endif %}{% endif %}"
)  # fmt: skip


class World:
    """A recipe, and an engine that says what it is told."""

    def __init__(self, dialect: str = "hermes", template: str = TEMPLATE) -> None:
        self.tokenizer = byte_tokenizer(CONTROL)
        marks = ParserContext(token_of=self.tokenizer.id_of)
        kinds = {"hermes": Hermes, "deepseek_v4": DeepseekV4, "deepseek_v4_1": DeepseekV41}
        parsers = {name: partial(kind, ParserConfig(), marks) for name, kind in kinds.items()}
        context = RecipeContext(tokenizer=self.tokenizer, chat_template=template, parsers=parsers)
        self.recipe: ChatRecipe = build(ChatConfig(parser=dialect), context)
        self.formats = {wire.name: wire for wire in self.recipe.formats()}

    def ids(self, text: str) -> list[int]:
        """Tokens of an output; control tokens that it spells are control tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def read(self, name: str, body: Mapping[str, Any], **context: Any) -> Any:
        return self.formats[name].read(json.dumps(body).encode(), ReadContext(**context))

    def run(
        self,
        exchange: Any,
        outputs: Sequence[Sequence[int]],
        *,
        sizes: Sequence[int] = (1,),
        reason: FinishReason = FinishReason.STOP,
        cached: int = 0,
    ) -> tuple[Any, list[ServerEvent]]:
        """Let the engine say token ids: one list for every output of every generation."""
        reply = exchange.reply("abc", 1_700_000_000)
        events = list(reply.start())
        results: list[RequestOutput | None] = []
        left = [list(ids) for ids in outputs]
        for place, generation in enumerate(exchange.generations):
            said = [left.pop(0) for _ in range(generation.params.n)]
            for index, ids in enumerate(said):
                for delta in deltas(generation, index, ids, sizes, reason):
                    events += reply.push(delta, place)
            results.append(result(generation, said, cached))
        events += reply.finish(results)
        return reply, events


def deltas(
    generation: Any, index: int, ids: Sequence[int], sizes: Sequence[int], reason: FinishReason
) -> list[Delta]:
    """Cut an output into deltas of some sizes, over and over."""
    found, place, turn = [], 0, 0
    while place < len(ids):
        size = max(1, sizes[turn % len(sizes)])
        part = tuple(ids[place : place + size])
        found.append(
            Delta(request_id="r", index=index, token_ids=part, logprobs=reports(generation, part))
        )
        place, turn = place + size, turn + 1
    found.append(Delta(request_id="r", index=index, finish_reason=reason))
    return found


def reports(generation: Any, ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    """One report for each token, if they are asked for."""
    top = generation.params.logprobs
    if top is None:
        return ()
    return tuple(
        TokenLogprob(
            token_id=token, logprob=-0.5, rank=1, top=((token, -0.5), (65, float("-inf")))[:top]
        )
        for token in ids
    )


def result(generation: Any, said: Sequence[Sequence[int]], cached: int) -> RequestOutput:
    outputs = tuple(
        Output(index=at, text="", token_ids=tuple(ids), finish_reason=FinishReason.STOP)
        for at, ids in enumerate(said)
    )
    return RequestOutput(
        request_id="r",
        prompt_token_ids=generation.prompt_token_ids,
        outputs=outputs,
        cached_tokens=cached,
        drafted=6,
        accepted=4,
        invariant=True,
    )


@pytest.fixture(scope="session")
def world() -> World:
    return World()


@pytest.fixture(scope="session")
def deepseek() -> World:
    return World("deepseek_v4")


@pytest.fixture(scope="session")
def plain() -> World:
    """A model whose calls nobody can read."""
    return World("plain")


@pytest.fixture(scope="session")
def toolless() -> World:
    """A model whose template knows no tools."""
    turns = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    return World("auto", turns + "{% if add_generation_prompt %}<|assistant|>{% endif %}")
