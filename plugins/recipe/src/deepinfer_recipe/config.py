"""Options of the components."""

from __future__ import annotations

from attrs import field, frozen
from attrs.validators import in_

from deepinfer_core.typed import typed

THINK = ("<think>", "</think>")


@frozen(kw_only=True, field_transformer=typed)
class ParserConfig:
    """Options of the parsers.

    Attributes:
        think: what opens a thought; "" for models that do not think.
        end_think: what closes it.
    """

    think: str = THINK[0]
    end_think: str = THINK[1]

    @property
    def thinking_marks(self) -> tuple[str, str] | None:
        """Both, or None."""
        return (self.think, self.end_think) if self.think else None


@frozen(kw_only=True, field_transformer=typed)
class MistralConfig(ParserConfig):
    """Options of ``mistral``."""

    think: str = "[THINK]"
    end_think: str = "[/THINK]"


@frozen(kw_only=True, field_transformer=typed)
class ChatConfig:
    """Options of the recipes.

    Attributes:
        parser: name of the parser that reads the model's answers; "auto" looks at the chat
            template.
    """

    parser: str = "auto"


@frozen(kw_only=True, field_transformer=typed)
class DeepseekConfig(ChatConfig):
    """Options of the DeepSeek recipes.

    Attributes:
        renderer: "native", or "deepseek-recipe" for DeepSeek's own package.
    """

    renderer: str = field(default="native", validator=in_(("native", "deepseek-recipe")))
