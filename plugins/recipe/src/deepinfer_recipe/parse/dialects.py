"""The parsers: a dialect is a set of marks and the machine that follows them."""

from __future__ import annotations

from deepinfer_core.interfaces.parser import ParserContext, ParserStream
from deepinfer_recipe.config import ParserConfig
from deepinfer_recipe.parse.dsml import Dsml, DsmlMarks
from deepinfer_recipe.parse.json_calls import JsonCalls, JsonMarks
from deepinfer_recipe.parse.marks import Tokens, Watch
from deepinfer_recipe.parse.mistral import MistralCalls
from deepinfer_recipe.parse.outline import Outer, outline


class Dialect:
    """Base of the parsers here: thinking only.

    Args:
        config: options.
        context: finds tokens.
    """

    tool_format = ""
    calls_end_thoughts = False
    marks: tuple[str, ...] = ()

    def __init__(self, config: ParserConfig, context: ParserContext) -> None:
        self.thinking_marks = config.thinking_marks
        self.tokens = Tokens(context, (*(self.thinking_marks or ()), *self.marks))
        self._plain = outline(self.tokens, self.thinking_marks, {})

    @property
    def token_ids(self) -> frozenset[int]:
        """Tokens that are followed."""
        return self.tokens.ids

    def stream(self, *, calls: bool = True) -> ParserStream:
        """Return a state for one output."""
        return self.calls() if calls else Outer(self.tokens, self._plain)

    def calls(self) -> ParserStream:
        """Return a state for one output that may hold calls."""
        return Outer(self.tokens, self._plain)


class Hermes(Dialect):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``: Hermes, Qwen and many others."""

    tool_format = "hermes"
    marks = ("<tool_call>", "</tool_call>")

    def __init__(self, config: ParserConfig, context: ParserContext) -> None:
        super().__init__(config, context)
        start, close = map(self.tokens.mark, self.marks)
        self._json = JsonMarks(
            outline=outline(self.tokens, self.thinking_marks, {self.marks[0]: "open"}),
            inside=Watch({close: "close"} if close != self.marks[1] else {}),
            after=Watch({close: "close", start: "open"}),
        )

    def calls(self) -> ParserStream:
        """Return a state for one output."""
        return JsonCalls(self.tokens, self._json)


class Llama(Dialect):
    """``{"name": ..., "parameters": ...}`` at the start, or after ``<|python_tag|>``."""

    tool_format = "llama"
    marks = ("<|python_tag|>",)

    def __init__(self, config: ParserConfig, context: ParserContext) -> None:
        super().__init__(config, context)
        (tag,) = map(self.tokens.mark, self.marks)
        self._json = JsonMarks(
            outline=outline(self.tokens, self.thinking_marks, {self.marks[0]: "open"}),
            after=Watch({tag: "open"}),
            bare=True,
            separator=";",
        )

    def calls(self) -> ParserStream:
        """Return a state for one output."""
        return JsonCalls(self.tokens, self._json)


class Mistral(Dialect):
    """``[TOOL_CALLS][{"name": ..., "arguments": ...}]`` and ``[TOOL_CALLS]name[ARGS]{...}``."""

    tool_format = "mistral"
    marks = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")

    def __init__(self, config: ParserConfig, context: ParserContext) -> None:
        super().__init__(config, context)
        start, arguments, call_id = map(self.tokens.mark, self.marks)
        self._json = JsonMarks(
            outline=outline(self.tokens, self.thinking_marks, {self.marks[0]: "open"}),
            after=Watch({start: "open"}),
        )
        self._header = Watch({arguments: "arguments", call_id: "call_id", start: "open"})

    def calls(self) -> ParserStream:
        """Return a state for one output."""
        return MistralCalls(self.tokens, self._json, self._header)


class DeepseekV4(Dialect):
    """DSML as DeepSeek V4 writes it."""

    tool_format = "deepseek_v4"
    calls_end_thoughts = True
    marks = ("｜DSML｜",)
    gap = ""
    block = "tool_calls"

    def __init__(self, config: ParserConfig, context: ParserContext) -> None:
        super().__init__(config, context)
        block = f"<｜DSML｜{self.gap}{self.block}>"
        self._dsml = DsmlMarks.of(
            self.tokens,
            outline(
                self.tokens,
                self.thinking_marks,
                {block: "block"},
                calls_end_thoughts=self.calls_end_thoughts,
            ),
            gap=self.gap,
            block=self.block,
        )

    def calls(self) -> ParserStream:
        """Return a state for one output."""
        return Dsml(self.tokens, self._dsml)


class DeepseekV41(DeepseekV4):
    """DSML as DeepSeek V4.1 writes it: a blank after the token, and shorter names."""

    tool_format = "deepseek_v4_1"
    gap = " "
    block = "calls"
