"""Training texts on disk: prompts with the target's own answers, and what the target said of them.

``answers.jsonl`` holds one JSON object a line: ``prompt`` and ``answer`` (token ids), ``domain``,
``temperature``. Features are computed once a text, by the engine as it answers (``recorder``) or
when they are first asked for, and kept in float16 in a file of their own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from attrs import asdict, frozen
from torch import Tensor

from deepinfer_core.errors import ConfigError, reason
from deepinfer_dspark.training.target import Target

UNKNOWN = 2
"""Last tokens of a text that an engine never runs, or has not told of when the text ends."""


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
        raise ConfigError(f"cannot read answers from {path}: {reason(error)}") from error
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


@frozen(kw_only=True, eq=False)
class Features:
    """What the target said of a text.

    Attributes:
        features: [n, m * hidden_size], float16, layer outputs side by side.
        hidden: [n, hidden_size], float16, the final normed output.
        log_norm: [n], float32, logarithm of the softmax's denominator over the whole vocabulary.
    """

    features: Tensor
    hidden: Tensor
    log_norm: Tensor

    @staticmethod
    def narrowed(taps: Sequence[Tensor]) -> Tensor:
        """Layer outputs side by side in float16, cut to its range."""
        limit = torch.finfo(torch.float16).max
        return torch.cat([tap.clamp(-limit, limit).half() for tap in taps], -1)


class FeatureFolder:
    """A file of features for each text, found by its tokens.

    Args:
        folder: made when it is missing.
        taps: names of the layer outputs; other ones make other files.
    """

    def __init__(self, folder: Path, taps: Sequence[str]) -> None:
        self._folder, self._taps = folder, " ".join(taps)
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, token_ids: Sequence[int], found: Features) -> None:
        """Keep the features of a text."""
        path = self._path(token_ids)
        partial = path.with_suffix(".partial")
        torch.save(asdict(found), partial)
        partial.replace(path)

    def read(self, token_ids: Sequence[int]) -> Features | None:
        """Features of a text, or of all but its last tokens: an engine need not compute those."""
        for left_out in range(min(UNKNOWN, len(token_ids) - 1) + 1):
            path = self._path(token_ids[: len(token_ids) - left_out])
            if path.is_file():
                return Features(**torch.load(path, mmap=True, weights_only=True))
        return None

    def _path(self, token_ids: Sequence[int]) -> Path:
        content = f"{self._taps}: {' '.join(map(str, token_ids))}".encode()
        return self._folder / f"{hashlib.blake2b(content, digest_size=16).hexdigest()}.pt"


class FeatureStore:
    """Texts with features, computed when first asked for and kept in a folder.

    Args:
        target: the frozen target.
        taps: names of the layer outputs.
        folder: where they are kept.
        max_tokens: longer texts are cut.
    """

    def __init__(self, target: Target, taps: Sequence[str], folder: Path, max_tokens: int) -> None:
        self._target, self._taps, self._max = target, tuple(taps), max_tokens
        self._folder = FeatureFolder(folder, taps)

    def get(self, answer: Answer) -> Text:
        """Return a text with its features."""
        ids = answer.token_ids
        found = self._folder.read(ids)
        if found is None:
            found = self._compute(ids)
            self._folder.write(ids, found)
        known = min(len(found.log_norm), self._max)
        return Text(
            token_ids=torch.tensor(ids[:known]),
            start=len(answer.prompt) - 1,
            features=found.features[:known],
            hidden=found.hidden[:known],
            log_norm=found.log_norm[:known],
        )

    @torch.inference_mode()
    def _compute(self, ids: Sequence[int]) -> Features:
        taps, hidden = self._target.run(ids, self._taps)
        norms = [self._target.model.head(part).logsumexp(-1) for part in hidden.split(64)]
        return Features(
            features=Features.narrowed(taps), hidden=hidden.half(), log_norm=torch.cat(norms)
        )
