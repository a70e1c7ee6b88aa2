"""Slot ``recipe``: conversations into prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen


@frozen(kw_only=True)
class RecipeContext:
    """What a recipe builder receives.

    Attributes:
        tokenizer: the model's tokenizer.
        chat_template: its template source, or None.
    """

    tokenizer: Any
    chat_template: str | None


class Recipe(Protocol):
    """A renderer. Pure conversion; no I/O."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the prompt; RequestError where the messages cannot be rendered.

        Control tokens spelled inside user content stay plain text.
        """
        ...
