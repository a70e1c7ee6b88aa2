"""DeepSeek prompts by DeepSeek's own package ``deepseek-recipe``, where its very text is wanted."""

from __future__ import annotations

from typing import Any

from deepinfer_core.errors import RequestError
from deepinfer_recipe.conversation import Conversation, Message
from deepinfer_recipe.kit import Prompt
from deepinfer_recipe.render import deepseek_text as fixed
from deepinfer_recipe.render.deepseek import Control, DeepseekRenderer, Parts


class PackageRenderer(DeepseekRenderer):
    """As `DeepseekRenderer`, rendered by the package.

    Args:
        tokenizer: of the model.
        v41: whether the model is V4.1, not V4.
    """

    def __init__(self, tokenizer: Any, *, v41: bool) -> None:
        super().__init__(tokenizer, v41=v41)
        import deepseek_recipe

        self._package: Any = deepseek_recipe
        kind = deepseek_recipe.DeepseekV41Encoding if v41 else deepseek_recipe.DeepseekV4Encoding
        self._theirs = kind()

    def prompt(self, conversation: Conversation) -> Prompt:
        """Render a conversation.

        Raises:
            RequestError: it begins the answer, which the package cannot do here.
        """
        if conversation.prefill:
            raise RequestError("deepseek-recipe renders no beginnings of answers; use our renderer")
        rendered = self._theirs.render_conversation(self._conversation(conversation))
        parts: Parts = []
        place = 0
        for start, end in rendered.special_ranges:
            parts += [rendered.prompt[place:start], Control(rendered.prompt[start:end])]
            place = end
        parts.append(rendered.prompt[place:])
        last = max(at for at, part in enumerate(parts) if part == Control(fixed.ASSISTANT))
        return Prompt(token_ids=self.ids(parts), opening=self.ids(parts[last:]))

    def _conversation(self, conversation: Conversation) -> Any:
        answer = conversation.answer
        given: dict[str, Any] = {}
        if answer is not None and answer.kind == "json_object":
            given["response_format"] = "json_object"
        elif answer is not None and answer.kind == "json_schema":
            given["response_schema"] = answer.source
        thinking = conversation.thinking is not False
        choice = "required" if conversation.tool_choice == "named" else conversation.tool_choice
        effort = {"minimal": "low", "medium": "high"}.get(conversation.effort or "high")
        return self._package.Conversation(
            [self._message(message, thinking) for message in conversation.messages],
            thinking_mode=thinking,
            tools=[
                self._package.ToolDefinition(tool.name, tool.description, tool.parameters)
                for tool in conversation.tools
            ],
            tool_choice="auto" if choice == "required" and thinking else choice,
            reasoning_effort=effort or conversation.effort or "high",
            **given,
        )

    def _message(self, message: Message, thinking: bool) -> Any:
        package = self._package
        if message.role == "assistant":
            calls = [package.ToolCall(c.call_id, c.name, c.arguments) for c in message.calls]
            reasoning = message.reasoning if thinking else None
            return package.AssistantMessage(message.content, reasoning, calls or None)
        if message.role == "tool":
            return package.ToolMessage(message.content, message.call_id)
        kinds = {
            "system": package.SystemMessage,
            "reminder": package.LatestReminderMessage,
            "user": package.UserMessage,
        }
        return kinds[message.role](message.content)
