"""Let the target answer prompts, many at a time: what a draft model learns from."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TextIO

from attrs import frozen

from deepinfer_core import LLM, EngineConfig, EngineOptions, SamplingParams
from deepinfer_core.config import Choice
from deepinfer_core.errors import ConfigError, reason
from deepinfer_core.requests import RequestOutput
from deepinfer_dspark.config import RecorderConfig


@frozen(kw_only=True)
class AnswerOptions:
    """How answers are made.

    Attributes:
        rounds: answers of each prompt; the first is greedy.
        temperature: of the further ones.
        max_tokens: of an answer.
        max_sequences: answered at the same time.
        seed: of order and draws.
    """

    rounds: int = 2
    temperature: float = 0.7
    max_tokens: int = 200
    max_sequences: int = 64
    seed: int = 1


@frozen(kw_only=True)
class Question:
    """A prompt and how it is to be answered.

    Attributes:
        key: names it in the file of answers, so that a run can go on.
        text: the user's message.
        domain: of the prompt.
        params: of the answer.
    """

    key: str
    text: str
    domain: str
    params: SamplingParams


def read_prompts(paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Read (message, domain) from files of JSON lines with ``turns`` or ``prompt``.

    Raises:
        ConfigError: a file is missing or a line holds no prompt.
    """
    found = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"cannot read prompts from {path}: {reason(error)}") from error
        for number, line in enumerate(filter(str.strip, lines), 1):
            try:
                record = json.loads(line)
                text = record["turns"][0] if "turns" in record else record["prompt"]
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ConfigError(
                    f"{path}, line {number}: expected an object with 'turns' or 'prompt'"
                ) from error
            found.append((str(text), str(record.get("domain", ""))))
    return found


def questions(prompts: Sequence[tuple[str, str]], options: AnswerOptions) -> Iterator[Question]:
    """Every prompt once a round, each round in another order."""
    for round_number in range(options.rounds):
        order = list(range(len(prompts)))
        Random(f"{options.seed} {round_number}").shuffle(order)
        for index in order:
            key = f"{round_number}:{index}"
            yield Question(
                key=key,
                text=prompts[index][0],
                domain=prompts[index][1],
                params=SamplingParams(
                    temperature=options.temperature if round_number else 0.0,
                    max_tokens=options.max_tokens,
                    seed=Random(f"{options.seed} {key}").getrandbits(32),
                ),
            )


def answer_prompts(
    model: Path,
    prompts: Sequence[Path],
    out: Path,
    options: AnswerOptions,
    report: Callable[[Mapping[str, Any]], None],
    record: RecorderConfig | None = None,
) -> None:
    """Answer every prompt, and append each answer to a file as it is complete.

    Args:
        model: the target.
        prompts: files of prompts.
        out: file of answers; those it holds are not made again.
        options: how.
        report: told how far it is, every 32 answers.
        record: where the target's layer outputs are kept meanwhile; None = nowhere.

    Raises:
        ConfigError: prompts cannot be read.
        DeepInferError: the engine cannot be built.
    """
    pool = read_prompts(prompts)
    done = _keys(out)
    config = EngineConfig(
        model=str(model),
        engine=EngineOptions(max_sequences=options.max_sequences),
        drafter=Choice() if record is None else record,
        budget=Choice() if record is None else Choice(use="fixed"),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with LLM(config=config) as llm, out.open("a") as file:
        asked: list[Question] = []
        tasks = _tasks(llm, pool, options, done, asked)
        tokens = 0
        for count, (at, result) in enumerate(llm.as_completed(tasks), 1):
            tokens += _write(file, asked[at], result)
            if count % 32 == 0:
                report({"answers": len(done) + count, "new_tokens": tokens})
        report({"answers": len(done) + len(asked), "new_tokens": tokens})


def _tasks(
    llm: LLM,
    pool: Sequence[tuple[str, str]],
    options: AnswerOptions,
    done: frozenset[str],
    asked: list[Question],
) -> Iterator[tuple[tuple[int, ...], SamplingParams]]:
    for question in questions(pool, options):
        if question.key not in done:
            ids = llm.engine.chat([{"role": "user", "content": question.text}])
            asked.append(question)
            yield tuple(ids), question.params


def _write(file: TextIO, question: Question, result: RequestOutput) -> int:
    """Append one answer; returns its tokens, 0 for a failed request."""
    if result.error is not None or not result.outputs:
        return 0
    answer = result.outputs[0].token_ids
    record = {
        "key": question.key,
        "domain": question.domain,
        "temperature": question.params.temperature,
        "prompt": list(result.prompt_token_ids),
        "answer": list(answer),
    }
    file.write(json.dumps(record) + "\n")
    file.flush()
    return len(answer)


def _keys(path: Path) -> frozenset[str]:
    """Keys of the whole lines of a file; a half-written last line is cut off."""
    if not path.is_file():
        return frozenset()
    text = path.read_text()
    if text and not text.endswith("\n"):
        text = text[: text.rfind("\n") + 1]
        path.write_text(text)
    return frozenset(json.loads(line).get("key", "") for line in text.splitlines())
