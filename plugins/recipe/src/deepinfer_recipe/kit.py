"""What all wire formats use of a model: its prompts, its parser, its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import frozen

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.parser import Parser
from deepinfer_core.structured import StructuredOutput
from deepinfer_core.thinking import ThinkingLimit
from deepinfer_recipe.conversation import Conversation
from deepinfer_recipe.wire.turn import Codec, Turn, spelled

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

    def _call_marks(self) -> frozenset[int]:
        """The tokens that the parser follows as marks of calls."""
        thinking = (self._mark(0), self._mark(1))
        return frozenset(token for token in self.parser.token_ids if token not in thinking)

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
        """Whether the answer may begin with a thought, as far as can be known."""
        begin, end = self._mark(0), self._mark(1)
        if begin is None or end is None or conversation.prefill or conversation.thinking is False:
            return False
        return self._opened(prompt) != end

    def _opened(self, prompt: Prompt) -> int | None:
        """Return the last mark of thinking with which the prompt begins the answer."""
        marks = (self._mark(0), self._mark(1))
        return next((token for token in reversed(prompt.opening) if token in marks), None)

    def structured(self, prompt: Prompt, conversation: Conversation) -> StructuredOutput | None:
        """Return what the answer must follow, or None.

        Raises:
            ProtocolError: the conversation asks for what no grammar can be made of.
        """
        found = self._grammar(conversation)
        if found is None:
            return None
        kind, source = found
        if not self.thinks(prompt, conversation):
            return StructuredOutput(kind=kind, source=source)
        after = () if self.end_thinking is None else (self.end_thinking,)
        opener = None if self._opened(prompt) is not None else self._mark(0)
        return StructuredOutput(kind=kind, source=source, start_after=after, opener=opener)

    def _grammar(self, conversation: Conversation) -> tuple[str, Any] | None:
        answer = conversation.answer
        if answer is not None and conversation.prefill:
            raise ProtocolError(
                "a format of the whole answer cannot be kept where its beginning is given; "
                "leave one of them out",
                param="messages",
            )
        if conversation.offers_tools:
            held = _must_call(conversation) or _is_strict(conversation)
            if self.parser.tool_format and (held or answer is not None):
                return "tool_calls", self._tool_calls(conversation)
            if held:
                raise _unenforceable(conversation)
        return None if answer is None else (answer.kind, answer.source)

    def _tool_calls(self, conversation: Conversation) -> dict[str, Any]:
        """Return a source of kind ``tool_calls``.

        A tool that must be called is held to its schema even if nobody called it strict: the
        grammar is there anyway, and a model that is forced to call it may not know better. It is
        not refused for what a grammar cannot say (``strict: None``), which nobody promised.
        """
        choice: Any = conversation.tool_choice
        if choice == "named":
            name = conversation.tools[0].name
            choice = {"type": "function", "function": {"name": name}}
        must = _must_call(conversation)
        tools = []
        for tool in conversation.tools:
            shape = tool.as_chat()
            shape["function"]["strict"] = tool.strict or (None if must else False)
            tools.append(shape)
        source: dict[str, Any] = {
            "format": self.parser.tool_format,
            "tools": tools,
            "tool_choice": choice,
            "parallel_tool_calls": conversation.parallel_calls,
        }
        if marks := self._call_marks():
            source["marks"] = {spelled(self.codec, token): token for token in sorted(marks)}
        answer = conversation.answer
        if answer is not None and not must:
            source["answer"] = {"kind": answer.kind, "source": answer.source}
        return source

    def thinking_limit(self, prompt: Prompt, conversation: Conversation) -> ThinkingLimit | None:
        """Return how long the model may think; None for as long as it likes, or not at all."""
        budget, begin, end = conversation.budget, self._mark(0), self._mark(1)
        if budget is None or end is None or not self.thinks(prompt, conversation):
            return None
        calls: frozenset[int] = frozenset()
        if self.parser.calls_end_thoughts and conversation.offers_tools:
            calls = self._call_marks()
        return ThinkingLimit(
            max_tokens=budget.max_tokens,
            end_token_ids=(end,),
            thinking=self._opened(prompt) == begin,
            begin_token_id=begin,
            call_token_ids=tuple(sorted(calls)),
        )


def _must_call(conversation: Conversation) -> bool:
    return conversation.tool_choice in ("required", "named")


def _is_strict(conversation: Conversation) -> bool:
    return any(tool.strict for tool in conversation.tools)


def _unenforceable(conversation: Conversation) -> ProtocolError:
    what, field = ("a strict tool", "tools")
    if _must_call(conversation):
        what, field = ("a call", "tool_choice")
    return ProtocolError(
        f"{field}: {what} cannot be enforced, as no grammar is known for the calls of this model; "
        "choose 'auto' and no strict tools, or set recipe.parser to the dialect that it speaks",
        param=field,
    )


class _Control:
    """Control tokens, and ids beyond the tokenizer's vocabulary."""

    def __init__(self, tokenizer: Any) -> None:
        self._special, self._size = tokenizer.special_ids, tokenizer.vocab_size

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._special or (isinstance(token_id, int) and token_id >= self._size)
