"""Slot ``recipe``: conversations into prompts, and what clients of servers say about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from deepinfer_core.interfaces.parser import Parser
from deepinfer_core.interfaces.wire import WireFormat


@frozen(kw_only=True)
class RecipeContext:
    """What a recipe builder receives.

    Attributes:
        tokenizer: the model's tokenizer.
        chat_template: its template source, or None.
        architecture: the model's architecture name, "" if unknown.
        parsers: makers of the parsers that are available, by name.
        eos_token_ids: ids that end an output.
        max_length: tokens of the longest sequence; None if unknown.
    """

    tokenizer: Any
    chat_template: str | None
    architecture: str = ""
    parsers: Mapping[str, Callable[[], Parser]] = field(factory=dict)
    eos_token_ids: Sequence[int] = ()
    max_length: int | None = None


class Recipe(Protocol):
    """Conversions between people, clients and the model. Pure; no I/O; safe to use from threads."""

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

    def formats(self) -> Sequence[WireFormat]:
        """Wire formats that servers may offer with this recipe; none if it only renders."""
        ...
