"""One conversation, whatever protocol it came in: frozen values, checked where they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen


@frozen(kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: what the model calls it.
        description: for the model.
        parameters: JSON schema of its arguments, or None.
        strict: whether arguments must follow the schema.
    """

    name: str
    description: str | None = None
    parameters: Any = None
    strict: bool = False

    def as_chat(self) -> dict[str, Any]:
        """Return it as Chat Completions and chat templates spell it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@frozen(kw_only=True)
class Call:
    """A call that was made.

    Attributes:
        call_id: by which its result refers to it.
        name: of the tool.
        arguments: JSON text, as the model wrote it.
    """

    call_id: str
    name: str
    arguments: str


@frozen(kw_only=True)
class Message:
    """One message.

    Attributes:
        role: system, user, assistant, tool or reminder.
        content: its text.
        reasoning: the thought before an assistant's text, if it is known.
        calls: calls of an assistant.
        call_id: for a tool: the call that this is the result of.
        name: for a tool: its name, if the client says so.
    """

    role: str
    content: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    name: str | None = None


@frozen(kw_only=True)
class AnswerFormat:
    """What the answer must look like.

    Attributes:
        kind: json_object, json_schema, regex, ebnf or choice.
        source: the schema, expression, grammar or list; None for json_object.
    """

    kind: str
    source: Any = None


@frozen(kw_only=True)
class ThinkingBudget:
    """How much an answer may be thought about.

    Attributes:
        max_tokens: tokens of thought.
        field: of the body that says so.
    """

    max_tokens: int
    field: str


@frozen(kw_only=True)
class Conversation:
    """What a model is asked.

    Attributes:
        messages: in order.
        tools: what may be called.
        tool_choice: auto, none, required, or named (the only tool of ``tools`` must be called).
        parallel_calls: whether one answer may hold several calls.
        thinking: whether to think first; None leaves it to the model's template.
        effort: how hard: minimal, low, medium, high, xhigh or max; None for the default.
        budget: how much it may think, or None for as much as it likes.
        answer: what the answer must look like, or None.
        prefill: the beginning of the answer, which the model continues; "" for none.
        options: further names that a chat template sees.
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: str = "auto"
    parallel_calls: bool = True
    thinking: bool | None = None
    effort: str | None = None
    budget: ThinkingBudget | None = None
    answer: AnswerFormat | None = None
    prefill: str = ""
    options: Mapping[str, Any] = field(factory=dict)

    @property
    def offers_tools(self) -> bool:
        """Whether the answer may hold calls."""
        return bool(self.tools) and self.tool_choice != "none"
