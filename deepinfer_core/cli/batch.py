"""``generate --input``: many prompts from a file, results into another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define, field, frozen

from deepinfer_core.cli.prompt_lines import BadLine, PromptLine
from deepinfer_core.cli.result_file import ResultFile
from deepinfer_core.cli.session import record
from deepinfer_core.errors import RequestError

if TYPE_CHECKING:
    from deepinfer_core.engine.llm import LLM
    from deepinfer_core.requests import RequestOutput, SamplingParams


@frozen(kw_only=True)
class Template:
    """How a line becomes a request.

    Attributes:
        values: arguments of `SamplingParams` for lines that do not say otherwise.
        chat: answer prompts as messages instead of continuing them.
        system: system message of prompts that are answered.
        draw_seed: makes a seed where nobody gave one.
    """

    values: Mapping[str, Any]
    chat: bool = False
    system: str | None = None
    draw_seed: Callable[[], int]

    def params(self, line: PromptLine) -> SamplingParams:
        """Return the parameters of a line, always with a seed."""
        from deepinfer_core.requests import SamplingParams
        from deepinfer_core.structured import StructuredOutput
        from deepinfer_core.thinking import ThinkingLimit

        merged = {**self.values, **line.params}
        if merged.get("seed") is None:
            merged["seed"] = self.draw_seed()
        for name, kind in (("structured", StructuredOutput), ("thinking_limit", ThinkingLimit)):
            if isinstance(merged.get(name), dict):
                merged[name] = kind.from_dict(merged[name])
        return SamplingParams(**merged)

    def prompt(self, llm: LLM, line: PromptLine) -> str | tuple[int, ...]:
        """Return the prompt of a line; conversations as token ids."""
        from deepinfer_core.engine.prompts import chat_ids

        if line.messages is not None:
            return chat_ids(llm.engine, line.messages)
        if line.prompt is None or not self.chat:
            return line.prompt or ""
        if not isinstance(line.prompt, str):
            raise RequestError("--chat needs 'prompt' to be a string, not token ids")
        return chat_ids(llm.engine, as_messages(line.prompt, self.system))


def as_messages(prompt: str, system: str | None) -> list[dict[str, str]]:
    """Return a conversation of one user message, after a system message if there is one."""
    begin = [] if system is None else [{"role": "system", "content": system}]
    return [*begin, {"role": "user", "content": prompt}]


@define
class Batch:
    """One run over a file of prompts.

    Attributes:
        llm: the model.
        model: its name, as results show it.
        template: how lines become requests.
        results: where they go.
        advance: told of each line that is over, with its result if it ran.
        complain: told what is wrong with a line.
        succeeded: lines that are done now.
        skipped: lines that were done before.
        failed: lines that were refused or failed.
    """

    llm: LLM
    model: str
    template: Template
    results: ResultFile
    advance: Callable[[RequestOutput | None], None]
    complain: Callable[[str], None]
    succeeded: int = 0
    skipped: int = 0
    failed: int = 0
    _running: dict[int, tuple[PromptLine, int | None]] = field(factory=dict, init=False)

    def run(self, lines: Iterable[PromptLine | BadLine]) -> None:
        """Run all lines that are not done, and write each result when it is complete."""
        finished = self.llm.as_completed(self._tasks(lines))
        try:
            for at, result in finished:
                line, seed = self._running.pop(at)
                shown = record(result, model=self.model, seed=seed)
                if shown["error"] is not None:
                    self._fail(line, shown["error"])
                else:
                    self.results.write({"id": line.identity, "line": line.number, **shown})
                    self.succeeded += 1
                    self.advance(result)
        finally:
            finished.close()

    def _tasks(
        self, lines: Iterable[PromptLine | BadLine]
    ) -> Iterator[tuple[str | tuple[int, ...], SamplingParams]]:
        number = 0
        for line in lines:
            if isinstance(line, BadLine):
                self._fail(line, line.problem)
                continue
            if line.identity in self.results.done:
                self.skipped += 1
                continue
            try:
                params = self.template.params(line)
                prompt = self.template.prompt(self.llm, line)
            except (RequestError, TypeError) as error:
                self._fail(line, str(error))
                continue
            self._running[number] = line, params.seed
            number += 1
            yield prompt, params

    def _fail(self, line: PromptLine | BadLine, problem: str) -> None:
        self.failed += 1
        self.complain(f"line {line.number}: {problem}")
        self.results.write(
            {
                "id": line.identity,
                "line": line.number,
                "error": {"line": line.number, "message": problem},
            }
        )
        self.advance(None)
