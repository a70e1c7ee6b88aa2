"""What all wire formats use of a model: its prompts, its parser, its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import frozen

from deepinfer_core.interfaces.parser import Parser
from deepinfer_core.interfaces.wire import ThinkingLimit
from deepinfer_core.structured import StructuredOutput
from deepinfer_recipe.conversation import Conversation
from deepinfer_recipe.wire.turn import Codec, Turn

CONTEXT_TOKENS = 8
"""Prompt tokens a detokenizer looks back at."""


@frozen(kw_only=True)
class Prompt:
    """A rendered conversation.

    Attributes:
        token_ids: the prompt.
        opening: its last token ids that are the beginning of the answer (`<think>`).
    """

    token_ids: tuple[int, ...]
    opening: tuple[int, ...] = ()


class Renderer(Protocol):
    """Conversations into prompts."""

    def prompt(self, conversation: Conversation) -> Prompt:
        """Render; RequestError where it cannot be done."""
        ...


class Kit:
    """See above. Immutable, safe to use from several threads.

    Args:
        tokenizer: of the model.
        renderer: makes prompts.
        parser: makes the parser; called once, when it is first needed.
    """

    def __init__(self, tokenizer: Any, renderer: Renderer, parser: Callable[[], Parser]) -> None:
        self.tokenizer = tokenizer
        self.renderer = renderer
        self.parser = parser()
        names = (tokenizer.id_of(f"<0x{byte:02X}>") for byte in range(256))
        self.codec = Codec(
            decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False)),
            bytes_of=lambda token_id: bytes(tokenizer.bytes_of(token_id)),
            control_ids=_Control(tokenizer),
            unstable_ids=frozenset(token for token in names if token is not None),
        )

    @property
    def end_thinking(self) -> int | None:
        """The token that closes a thought, or None."""
        return self._mark(1)

    def _mark(self, place: int) -> int | None:
        marks = self.parser.thinking_marks
        token: int | None = None if marks is None else self.tokenizer.id_of(marks[place])
        return token if token in self.parser.token_ids else None

    def turn(self, prompt: Prompt, conversation: Conversation | None, stop: Sequence[str]) -> Turn:
        """Begin an output."""
        calls = conversation is not None and conversation.offers_tools
        parallel = conversation is None or conversation.parallel_calls
        return Turn(
            codec=self.codec,
            stream=self.parser.stream(calls=calls),
            followed=self.parser.token_ids,
            end_thinking=self.end_thinking,
            opening=prompt.opening,
            context_ids=prompt.token_ids[-CONTEXT_TOKENS:],
            stop=stop,
            max_calls=0 if parallel else 1,
        )

    def thinks(self, prompt: Prompt, conversation: Conversation) -> bool:
        """Whether the answer begins with a thought, as far as can be known."""
        begin, end = self._mark(0), self._mark(1)
        if begin is None or end is None or conversation.thinking is False:
            return False
        opened = [token for token in prompt.opening if token in (begin, end)]
        return not opened or opened[-1] == begin

    def structured(self, prompt: Prompt, conversation: Conversation) -> StructuredOutput | None:
        """Return what the answer must follow, or None."""
        found = self._grammar(conversation)
        if found is None:
            return None
        kind, source = found
        end = self.end_thinking
        after = (end,) if end is not None and self.thinks(prompt, conversation) else ()
        return StructuredOutput(kind=kind, source=source, start_after=after)

    def _grammar(self, conversation: Conversation) -> tuple[str, Any] | None:
        answer = conversation.answer
        if conversation.offers_tools:
            strict = any(tool.strict for tool in conversation.tools)
            must = conversation.tool_choice in ("required", "named")
            if (must or strict) and self.parser.tool_format:
                return "tool_calls", self._tool_calls(conversation)
        if answer is not None:
            return answer.kind, answer.source
        return None

    def _tool_calls(self, conversation: Conversation) -> dict[str, Any]:
        choice: Any = conversation.tool_choice
        if choice == "named":
            name = conversation.tools[0].name
            choice = {"type": "function", "function": {"name": name}}
        tools = []
        for tool in conversation.tools:
            shape = tool.as_chat()
            shape["function"]["strict"] = tool.strict
            tools.append(shape)
        return {
            "format": self.parser.tool_format,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": conversation.parallel_calls,
        }

    def thinking_limit(
        self, prompt: Prompt, conversation: Conversation, max_tokens: int | None
    ) -> ThinkingLimit | None:
        """Return how long the model may think, or None for as long as it likes."""
        end = self.end_thinking
        if max_tokens is None or end is None or not self.thinks(prompt, conversation):
            return None
        begin = self._mark(0)
        return ThinkingLimit(
            max_tokens=max_tokens,
            end_token_ids=(end,),
            thinking=begin in prompt.opening,
            begin_token_id=begin,
        )


class _Control:
    """Control tokens, and ids beyond the tokenizer's vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._special, self._size = tokenizer.special_ids, tokenizer.vocab_size

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._special or (isinstance(token_id, int) and token_id >= self._size)
