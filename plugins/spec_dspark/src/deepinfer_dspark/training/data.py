"""Training texts on disk: prompts with the target's own answers, and what the target said of them.

``answers.jsonl`` holds one JSON object a line: ``prompt`` and ``answer`` (token ids), ``domain``,
``temperature``. Features are computed once a text and kept in float16 beside it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.errors import ConfigError
from deepinfer_dspark.training.target import Target


@frozen(kw_only=True)
class Answer:
    """A prompt and what the target answered.

    Attributes:
        index: line of the file, from 0.
        prompt: token ids.
        answer: token ids.
        domain: "math", "code", "chat" or whatever the prompts say.
        temperature: at which it was drawn.
    """

    index: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    domain: str
    temperature: float

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The whole text."""
        return self.prompt + self.answer


@frozen(kw_only=True, eq=False)
class Text:
    """A text with the target's view of it.

    Attributes:
        token_ids: [T], int64.
        start: first position that may be an anchor.
        features: [T, m * hidden_size], float16, layer outputs side by side.
        hidden: [T, hidden_size], float16, the final normed output.
        log_norm: [T], float32, logarithm of the softmax's denominator over the whole vocabulary.
    """

    token_ids: Tensor
    start: int
    features: Tensor
    hidden: Tensor
    log_norm: Tensor


def read_answers(path: Path, *, skip: int = 0) -> Iterator[Answer]:
    """Read a file of answers, leaving out the first ``skip`` lines and a half-written last one.

    Raises:
        ConfigError: the file is missing or a line is no answer.
    """
    try:
        lines = path.read_text().split("\n")[:-1]
    except OSError as error:
        raise ConfigError(f"cannot read answers from {path}: {error.strerror or error}") from error
    for index, line in enumerate(lines[skip:], skip):
        try:
            found = json.loads(line)
            yield Answer(
                index=index,
                prompt=tuple(found["prompt"]),
                answer=tuple(found["answer"]),
                domain=str(found.get("domain", "")),
                temperature=float(found.get("temperature", 0.0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path}, line {index + 1}: no answer ({error!r})") from error


class FeatureStore:
    """Texts with features, computed when first asked for and kept in a folder.

    Args:
        target: the frozen target.
        taps: names of the layer outputs.
        folder: where they are kept.
        max_tokens: longer texts are cut.
    """

    def __init__(self, target: Target, taps: Sequence[str], folder: Path, max_tokens: int) -> None:
        self._target, self._taps = target, tuple(taps)
        self._folder, self._max = folder, max_tokens
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, answer: Answer) -> Text:
        """Return a text with its features."""
        path = self._folder / f"{answer.index:06d}.pt"
        ids = answer.token_ids[: self._max]
        if path.is_file():
            stored = torch.load(path, mmap=True, weights_only=True)
        else:
            stored = self._compute(ids)
            partial = path.with_suffix(".partial")
            torch.save(stored, partial)
            partial.replace(path)
        return Text(
            token_ids=torch.tensor(ids),
            start=len(answer.prompt) - 1,
            features=stored["features"],
            hidden=stored["hidden"],
            log_norm=stored["log_norm"],
        )

    @torch.inference_mode()
    def _compute(self, ids: Sequence[int]) -> dict[str, Tensor]:
        taps, hidden = self._target.run(ids, self._taps)
        norms = [self._target.model.head(part).logsumexp(-1) for part in hidden.split(64)]
        limit = torch.finfo(torch.float16).max
        features = torch.cat(taps, -1).clamp(-limit, limit)
        return {
            "features": features.half(),
            "hidden": hidden.half(),
            "log_norm": torch.cat(norms),
        }
