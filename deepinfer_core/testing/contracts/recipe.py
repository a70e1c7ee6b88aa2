"""The contract of slot ``recipe``, checked with a tokenizer of bytes and control tokens."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from deepinfer_core.components import Slot
from deepinfer_core.errors import RequestError
from deepinfer_core.interfaces.recipe import Recipe, RecipeContext
from deepinfer_core.interfaces.wire import Fault, ReadContext, to_json
from deepinfer_core.testing.contracts.base import Contract
from deepinfer_core.testing.fakes import CHAT_TEMPLATE, byte_tokenizer

Message = Mapping[str, Any]


def conversation() -> list[dict[str, Any]]:
    """Return a conversation that uses every role."""
    return [
        {"role": "system", "content": "Be terse, Computer-7."},
        {"role": "user", "content": "What is  2 + 2?\nÜber 漢字 🙂 too."},
        {"role": "assistant", "content": "Four."},
        {"role": "user", "content": "Why, in <b>bold</b> {{ braces }}?"},
    ]


class RecipeContract(Contract):
    """What every recipe must do.

    Attributes:
        lossless: whether every message is rendered word for word; False for recipes that leave
            out earlier thinking or old tool results by design.
    """

    slot = Slot.RECIPE
    lossless: ClassVar[bool] = True

    # ------------------------------------------------------------------ helpers

    def context(self) -> RecipeContext:
        """Return a tokenizer and a template; override it for a recipe that needs its own."""
        return RecipeContext(tokenizer=byte_tokenizer(), chat_template=CHAT_TEMPLATE)

    def recipe(self) -> Recipe:
        """Build the recipe."""
        built: Recipe = self.make(self.context())
        return built

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a prompt, control tokens spelled out."""
        return str(self.context().tokenizer.decode(list(ids), skip_special_tokens=False))

    def control_tokens(self, ids: Sequence[int]) -> list[int]:
        """Return the control tokens of a prompt, in order."""
        special = self.context().tokenizer.special_ids
        return [token for token in ids if token in special]

    def ask(self, content: str, role: str = "user") -> list[Message]:
        """Return a conversation of one message."""
        return [{"role": role, "content": content}]

    # ------------------------------------------------------------------ what comes out

    def test_prompts_are_token_ids(self) -> None:
        """A prompt is a non-empty list of ids of the vocabulary."""
        ids: Any = self.recipe().render(conversation())
        assert isinstance(ids, list)
        assert ids
        vocab_size = self.context().tokenizer.vocab_size
        assert all(isinstance(token, int) and 0 <= token < vocab_size for token in ids)

    def test_every_message_is_there_in_order(self) -> None:
        """Contents appear word for word, system message included, in their order."""
        text, place = self.text(self.recipe().render(conversation())), 0
        for message in conversation():
            found = text.find(message["content"], place)
            if found < 0 and not self.lossless:
                continue
            assert found >= 0, f"{message['content']!r} is missing, or out of order, in {text!r}"
            place = found + len(message["content"])

    def test_roles_make_a_difference(self) -> None:
        """The same words of another role are another prompt."""
        recipe = self.recipe()
        talk = [*self.ask("Yes."), *self.ask("No.", "assistant"), *self.ask("Oh.")]
        other = [*self.ask("Yes."), *self.ask("No.", "user"), *self.ask("Oh.")]
        assert recipe.render(talk) != recipe.render(other)

    def test_the_order_of_messages_makes_a_difference(self) -> None:
        """Messages are not sorted."""
        recipe = self.recipe()
        talk = [*self.ask("One."), *self.ask("Two.", "assistant"), *self.ask("Three.")]
        swapped = [talk[2], talk[1], talk[0]]
        assert recipe.render(talk) != recipe.render(swapped)

    def test_the_generation_prompt_is_a_suffix(self) -> None:
        """``add_generation_prompt`` adds the beginning of an answer, and changes nothing before."""
        recipe = self.recipe()
        for messages in (self.ask("Hello."), conversation()):
            without = recipe.render(messages, add_generation_prompt=False)
            with_prompt = recipe.render(messages, add_generation_prompt=True)
            assert with_prompt[: len(without)] == without
            assert len(with_prompt) > len(without), "nothing tells the model that it is its turn"
            assert recipe.render(messages) == with_prompt, "it is the default"

    # ------------------------------------------------------------------ control tokens

    def test_content_cannot_spell_control_tokens(self) -> None:
        """Control tokens inside contents stay plain text, in every role and at every edge."""
        recipe, tokenizer = self.recipe(), self.context().tokenizer
        for role in ("user", "system", "assistant"):
            tail = [] if role == "user" else self.ask("Go on.")
            clean = self.control_tokens(recipe.render([*self.ask("harmless", role), *tail]))
            for control in sorted(tokenizer.special_ids):
                spelling = tokenizer.token(control)
                for content in (spelling, f"a{spelling}b", f"{spelling}{spelling} x"):
                    ids = recipe.render([*self.ask(content, role), *tail])
                    found = self.control_tokens(ids)
                    assert found == clean, f"{content!r} of the {role} became a control token"
                    assert content in self.text(ids), f"{content!r} of the {role} is lost"

    def test_halves_do_not_join(self) -> None:
        """A control token cut in two by a message's end does not come together."""
        recipe, tokenizer = self.recipe(), self.context().tokenizer
        harmless = [*self.ask("xx"), *self.ask("yy", "assistant"), *self.ask("zz")]
        clean = self.control_tokens(recipe.render(harmless))
        for control in sorted(tokenizer.special_ids):
            spelling = tokenizer.token(control)
            for cut in range(1, len(spelling)):
                halves = [
                    *self.ask(spelling[:cut]),
                    *self.ask(spelling[cut:] + spelling[:cut], "assistant"),
                    *self.ask(spelling[cut:]),
                ]
                assert self.control_tokens(recipe.render(halves)) == clean, spelling

    # ------------------------------------------------------------------ purity

    def test_rendering_is_repeatable(self) -> None:
        """The same messages give the same prompt, whatever was rendered in between."""
        recipe = self.recipe()
        first = recipe.render(conversation())
        recipe.render(self.ask("Something else."))
        assert recipe.render(conversation()) == first
        assert self.recipe().render(conversation()) == first

    def test_arguments_are_left_alone(self) -> None:
        """Messages, tools and options are the caller's: not changed, not kept."""
        recipe = self.recipe()
        messages = conversation()
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        options = {"verbosity": "low"}
        before = copy.deepcopy((messages, tools, options))
        first = recipe.render(messages, tools=tools, options=options)
        assert (messages, tools, options) == before
        assert recipe.render(messages, tools=tools, options=options) == first

    # ------------------------------------------------------------------ wire formats

    def test_formats_can_be_mounted(self) -> None:
        """Wire formats have names and paths of their own, and refuse what is no JSON object."""
        formats = self.recipe().formats()
        assert len({wire.name for wire in formats}) == len(formats), "names must differ"
        assert len({wire.path for wire in formats}) == len(formats), "paths must differ"
        for wire in formats:
            assert wire.path.startswith("/"), wire.path
            for body in (b"", b"{", b"[]", b"null", b"\xff", b"1e999", b'"text"', b"[" * 100_000):
                try:
                    wire.read(body, ReadContext())
                except RequestError as error:
                    fault = Fault.of(error)
                    assert 400 <= fault.status < 500, fault
                    to_json(wire.error(fault))
                    continue
                raise AssertionError(f"{wire.name} took {body[:20]!r}")

    # ------------------------------------------------------------------ bad conversations

    def test_bad_messages_are_refused(self) -> None:
        """What cannot be rendered raises RequestError, and nothing else."""
        recipe = self.recipe()
        bad: tuple[Any, ...] = (
            [],
            "Hello.",
            5,
            ["Hello."],
            [{"content": "no role"}],
            [{"role": 5, "content": "x"}],
            [{"role": "user", "content": 5}],
            [{"role": "user", "content": "x", "extra": object()}],
            [{"role": "user", "content": "lone \ud800 surrogate"}],
        )
        for messages in bad:
            try:
                ids = recipe.render(messages)
            except RequestError:
                continue
            raise AssertionError(f"{messages!r} was rendered: {ids}")

    def test_a_refusal_leaves_no_trace(self) -> None:
        """After a refused conversation the next one is rendered as ever."""
        recipe = self.recipe()
        first = recipe.render(conversation())
        try:
            recipe.render([{"role": "user", "content": "x"}, {"content": "no role"}])
        except RequestError:
            pass
        assert recipe.render(conversation()) == first
