"""Wrong recipes, each a small change of ``template``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deepinfer_core.builtin.template_recipe import TemplateRecipe
from deepinfer_core.interfaces.recipe import RecipeContext
from deepinfer_core.testing.fakes import CHAT_TEMPLATE

Messages = Sequence[Mapping[str, Any]]


class _Recipe(TemplateRecipe):
    """The correct one; the wrong ones change its messages or its answer."""

    template: str = CHAT_TEMPLATE

    def __init__(self, context: RecipeContext) -> None:
        super().__init__(RecipeContext(tokenizer=context.tokenizer, chat_template=self.template))
        self.tokenizer = context.tokenizer

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        return self.done(
            super().render(
                self.changed(messages),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                options=options,
            )
        )

    def changed(self, messages: Messages) -> Messages:
        return messages

    def done(self, ids: list[int]) -> list[int]:
        return ids


class _DropsTheSystemMessage(_Recipe):
    """Renders only what user and model said."""

    def changed(self, messages: Messages) -> Messages:
        if isinstance(messages, list) and len(messages) > 1:
            return [message for message in messages if message.get("role") != "system"]
        return messages


class _MutatesMessages(_Recipe):
    """Tidies the caller's messages up."""

    def changed(self, messages: Messages) -> Messages:
        for message in messages:
            if isinstance(message, dict):
                message.setdefault("name", "")
        return messages


class _RendersText(_Recipe):
    """Renders to text and encodes that, control tokens and all."""

    def render(self, messages: Messages, **arguments: Any) -> list[int]:
        ids = super().render(messages, **arguments)
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class _EncodesMessagesOneByOne(_Recipe):
    """Escapes whole control tokens only, message by message, and joins texts afterwards."""

    template = "{% for message in messages %}{{ message.content }}{% endfor %}<|assistant|>"

    def render(self, messages: Messages, **arguments: Any) -> list[int]:
        super().render(messages, **arguments)
        text = "".join(message["content"] for message in messages) + "<|assistant|>"
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class _SameForAllRoles(_Recipe):
    """Marks every message as the user's."""

    template = CHAT_TEMPLATE.replace("{{ message.role }}", "user")


class _NewestFirst(_Recipe):
    """Turns the conversation round."""

    template = CHAT_TEMPLATE.replace("in messages", "in messages | reverse")


class _SortsMessages(_Recipe):
    """Puts messages in the order of their texts."""

    template = CHAT_TEMPLATE.replace("in messages", "in messages | sort(attribute='content')")


class _AlwaysPrompts(_Recipe):
    """Ends every prompt with the beginning of an answer."""

    template = CHAT_TEMPLATE.replace("if add_generation_prompt", "if true")


class _PromptsInFront(_Recipe):
    """Says at the beginning whose turn it is."""

    template = (
        "{% if add_generation_prompt %}<|assistant|>{% endif %}" + CHAT_TEMPLATE.split("{% if")[0]
    )


class _Remembers(_Recipe):
    """Adds the messages of earlier calls."""

    def __init__(self, context: RecipeContext) -> None:
        super().__init__(context)
        self.said: list[Mapping[str, Any]] = []

    def render(self, messages: Messages, **arguments: Any) -> list[int]:
        ids = super().render([*self.said, *messages], **arguments)
        self.said = list(messages)
        return ids


class _RaisesKeyErrors(_Recipe):
    """Reads messages without looking."""

    def changed(self, messages: Messages) -> Messages:
        return [{"role": message["role"], "content": message["content"]} for message in messages]


class _RendersAnything(_Recipe):
    """Makes text of whatever it gets."""

    def changed(self, messages: Messages) -> Messages:
        if isinstance(messages, list):
            return [
                {**message, "content": str(message.get("content"))}
                if isinstance(message, dict)
                else message
                for message in messages
            ]
        return messages


class _OutOfVocabulary(_Recipe):
    """Adds a token that the tokenizer does not have."""

    def done(self, ids: list[int]) -> list[int]:
        return [*ids, self.tokenizer.vocab_size]


class _HalfRefused(_Recipe):
    """Keeps the good messages of a conversation that was refused."""

    def __init__(self, context: RecipeContext) -> None:
        super().__init__(context)
        self.pending: list[Mapping[str, Any]] = []

    def changed(self, messages: Messages) -> Messages:
        found = [*self.pending, *messages]
        self.pending = [message for message in found[:1] if isinstance(message, dict)]
        return found

    def done(self, ids: list[int]) -> list[int]:
        self.pending = []
        return ids


class _TakesAnything:
    """A wire format that checks nothing."""

    name, path = "any", "/any"

    def read(self, body: bytes, context: Any) -> Any:
        return body

    def error(self, fault: Any) -> Mapping[str, Any]:
        return {}


class _SpeaksToAnybody(_Recipe):
    """Offers a format that refuses nothing."""

    def formats(self) -> Any:
        return (_TakesAnything(),)


class _SpeaksTwice(_Recipe):
    """Offers one path twice."""

    def formats(self) -> Any:
        return (_TakesAnything(), _TakesAnything())


CORRECT: Callable[[RecipeContext], TemplateRecipe] = TemplateRecipe

BROKEN: dict[str, tuple[Callable[[Any], Any], str]] = {
    "drops the system message": (
        _DropsTheSystemMessage,
        "test_every_message_is_there_in_order",
    ),
    "newest first": (_NewestFirst, "test_every_message_is_there_in_order"),
    "sorts messages": (_SortsMessages, "test_the_order_of_messages_makes_a_difference"),
    "same for all roles": (_SameForAllRoles, "test_roles_make_a_difference"),
    "mutates messages": (_MutatesMessages, "test_arguments_are_left_alone"),
    "renders text": (_RendersText, "test_content_cannot_spell_control_tokens"),
    "joins messages": (_EncodesMessagesOneByOne, "test_halves_do_not_join"),
    "always prompts": (_AlwaysPrompts, "test_the_generation_prompt_is_a_suffix"),
    "prompts in front": (_PromptsInFront, "test_the_generation_prompt_is_a_suffix"),
    "remembers": (_Remembers, "test_rendering_is_repeatable"),
    "raises key errors": (_RaisesKeyErrors, "test_bad_messages_are_refused"),
    "renders anything": (_RendersAnything, "test_bad_messages_are_refused"),
    "out of the vocabulary": (_OutOfVocabulary, "test_prompts_are_token_ids"),
    "speaks to anybody": (_SpeaksToAnybody, "test_formats_can_be_mounted"),
    "speaks twice": (_SpeaksTwice, "test_formats_can_be_mounted"),
    "half refused": (_HalfRefused, "test_a_refusal_leaves_no_trace"),
}
