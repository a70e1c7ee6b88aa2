"""How far engines are from a reference on the same weights, measured on the same held texts.

Each text is read once, as a prompt: row i of the logits predicts token i + 1. Perplexity says how
well an engine predicts the texts; the divergence KL(reference || engine) and the agreement of the
likeliest tokens say how much it differs from the reference, whatever either makes of the text.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from importlib.resources import files
from typing import Any

import numpy as np
import torch
from attrs import define, field, frozen
from torch import Tensor

from deepinfer_core.bench.percentiles import percentile
from deepinfer_core.engine.batching import LogitRow, build_batch
from deepinfer_core.engine.parts import EngineParts
from deepinfer_core.engine.round import Grant
from deepinfer_core.errors import EngineError, RequestError
from deepinfer_core.requests import Request
from deepinfer_core.sequence import Sequence as EngineSequence

Report = dict[str, Any]

LOGIT_ROWS = 64
"""Rows whose logits exist at the same time."""

SALT = "bench quality"
"""Keeps what is measured apart from prefixes that somebody stored."""


def held_prompts() -> bytes:
    """The bundled texts, one JSON object a line."""
    return files("deepinfer_core.bench").joinpath("held_prompts.jsonl").read_bytes()


class Scorer:
    """Reads texts with an engine's parts, beside its scheduler.

    Args:
        parts: of an engine that does nothing else.
        chunk_tokens: most tokens of a step; 1 computes them as decoding does.
    """

    def __init__(self, parts: EngineParts, chunk_tokens: int) -> None:
        self._parts = parts
        self._chunk = min(chunk_tokens, parts.config.engine.max_batch_tokens)
        self._steps = 0

    def logits(self, token_ids: Sequence[int]) -> Iterator[Tensor]:
        """Yield [rows, vocab_size] float32 pieces of all rows of a text, in order.

        Raises:
            RequestError: the text is longer than the engine takes.
            EngineError: its pages cannot be had.
        """
        limit = min(self._parts.max_length, self._parts.capacity)
        if len(token_ids) > limit:
            raise RequestError(f"a text of {len(token_ids)} tokens; this engine takes {limit}")
        cache, self._steps = self._parts.cache, self._steps + 1
        request = Request(request_id=f"text-{self._steps}", prompt_token_ids=tuple(token_ids))
        sequence = EngineSequence(
            sequence_id=self._steps,
            request=request,
            index=0,
            arrival_s=0.0,
            limit=len(token_ids),
            seed=0,
        )
        cache.open(sequence.sequence_id, token_ids, salt=f"{SALT} {self._steps}")
        try:
            if not cache.reserve(sequence.sequence_id, len(token_ids)):
                raise EngineError(f"no pages for a text of {len(token_ids)} tokens; is it idle?")
            for start in range(0, len(token_ids), self._chunk):
                yield from self._step(sequence, start, min(len(token_ids), start + self._chunk))
        finally:
            cache.release(sequence.sequence_id)

    def _step(self, sequence: EngineSequence, start: int, stop: int) -> Iterator[Tensor]:
        parts = self._parts
        grant = Grant(sequence, start, stop - start, admitted=False, samples=False)
        rows = [LogitRow(grant=grant, position=at, samples=False) for at in range(start, stop)]
        batch = build_batch(
            step=self._steps,
            grants=[grant],
            rows=rows,
            cache=parts.cache,
            spec=parts.spec,
            sampled_rows={},
            copies=parts.cache.take_copies(),
        )
        output = parts.executor.launch(batch).wait()
        parts.cache.commit(sequence.sequence_id, stop, sequence.tokens)
        for first in range(0, len(rows), LOGIT_ROWS):
            last = min(len(rows), first + LOGIT_ROWS)
            yield _computed(parts, lambda a=first, b=last: output.logits(a, b))  # type: ignore[misc]


def _computed(parts: EngineParts, work: Callable[[], Tensor]) -> Tensor:
    return parts.accelerator.launch(work).wait().cpu()


@define
class ReferenceLogits:
    """What the reference said of every row, in a temporary file: it can be far larger than memory.

    Attributes:
        vocab_size: numbers of a row.
    """

    vocab_size: int
    _file: Any = field(factory=tempfile.TemporaryFile, init=False)
    _rows: int = field(default=0, init=False)

    def append(self, logits: Tensor) -> None:
        """Add rows."""
        self._file.write(logits.numpy().tobytes())
        self._rows += logits.shape[0]

    def rows(self, start: int, stop: int) -> Tensor:
        """[stop - start, vocab_size]."""
        self._file.seek(start * self.vocab_size * 4)
        data = self._file.read((stop - start) * self.vocab_size * 4)
        values = np.frombuffer(data, np.float32).reshape(-1, self.vocab_size)
        return torch.from_numpy(values.copy())

    def close(self) -> None:
        """Delete the file."""
        self._file.close()


@define
class Tally:
    """What is found out row by row."""

    surprise: list[float] = field(factory=list)
    divergence: list[float] = field(factory=list)
    agree: int = 0
    rows: int = 0

    def add(self, logits: Tensor, reference: Tensor, following: Sequence[int]) -> None:
        """Count rows.

        Args:
            logits: [rows, vocab_size].
            reference: likewise.
            following: the token after each row; the last row of a text has none.
        """
        log_p = torch.log_softmax(reference.double(), -1)
        log_q = torch.log_softmax(logits.double(), -1)
        if not bool(torch.isfinite(logits.amax(-1)).all()):
            raise EngineError("the engine's logits are not finite; nothing can be compared")
        # An impossible token on both sides is 0 * (-inf - -inf).
        terms = torch.where(log_p == -torch.inf, 0.0, log_p.exp() * (log_p - log_q))
        self.divergence += terms.sum(-1).clamp_(min=0).tolist()
        self.agree += int((logits.argmax(-1) == reference.argmax(-1)).sum())
        self.rows += logits.shape[0]
        targets = torch.tensor(list(following), dtype=torch.int64)
        self.surprise += (-log_q[torch.arange(len(targets)), targets]).tolist()

    def report(self) -> Report:
        """JSON-ready figures."""
        return {
            "perplexity": math.exp(math.fsum(self.surprise) / len(self.surprise)),
            "kl_mean": math.fsum(self.divergence) / len(self.divergence),
            "kl_p99": percentile(self.divergence, 99),
            "kl_max": max(self.divergence),
            "argmax_agreement": self.agree / self.rows,
        }


@frozen(kw_only=True)
class Variant:
    """An engine to compare.

    Attributes:
        name: as the report shows it.
        sets: what differs from the configuration, as for ``--set``.
    """

    name: str
    sets: tuple[str, ...] = ()


REFERENCE = Variant(
    name="reference",
    sets=(
        'dtype="float32"',
        'kernels.use=["torch"]',
        'attention.use="paged"',
        'cache.use="pages"',
        'kv_store.use="none"',
        'drafter.use="none"',
    ),
)
"""Core's own parts in float32."""


def remember(scorer: Scorer, texts: Iterable[Sequence[int]], kept: ReferenceLogits) -> None:
    """Let the reference read all texts."""
    for text in texts:
        for logits in scorer.logits(text):
            kept.append(logits)


def compare(scorer: Scorer, texts: Iterable[Sequence[int]], kept: ReferenceLogits) -> Report:
    """Let an engine read all texts and compare it with the reference, row by row."""
    tally, seen = Tally(), 0
    for text in texts:
        at = 0
        for logits in scorer.logits(text):
            count = logits.shape[0]
            tally.add(logits, kept.rows(seen, seen + count), text[at + 1 : at + 1 + count])
            at, seen = at + count, seen + count
    return tally.report()


def measure(
    opened: Callable[[Variant], AbstractContextManager[EngineParts]],
    texts: Callable[[EngineParts], Sequence[Sequence[int]]],
    reference: Variant,
    variants: Sequence[Variant],
    *,
    chunk_tokens: int,
    notice: Callable[[str], None],
) -> Report:
    """Compare engines with a reference, one at a time.

    Args:
        opened: builds what a variant says, and closes it.
        texts: token ids of the texts, by the reference's tokenizer.
        reference: what is right.
        variants: what is compared with it.
        chunk_tokens: most tokens of a step.
        notice: told what is going on.
    """
    with opened(reference) as parts:
        token_ids = texts(parts)
        kept = ReferenceLogits(parts.spec.vocab_size)
        notice(f"{reference.name}: {sum(map(len, token_ids))} tokens of {len(token_ids)} texts")
        with closing(kept):
            remember(Scorer(parts, chunk_tokens), token_ids, kept)
            rows = [_row(reference, parts, compare(Scorer(parts, chunk_tokens), token_ids, kept))]
            for variant in variants:
                notice(variant.name)
                with opened(variant) as others:
                    found = compare(Scorer(others, chunk_tokens), token_ids, kept)
                    rows.append(_row(variant, others, found))
    return {
        "benchmark": "quality",
        "texts": len(token_ids),
        "tokens": sum(map(len, token_ids)),
        "chunk_tokens": chunk_tokens,
        "variants": rows,
    }


def _row(variant: Variant, parts: EngineParts, figures: Report) -> Report:
    details = parts.plan.details
    shown = {key: details[key] for key in ("dtype", "invariant", "ops") if key in details}
    return {"name": variant.name, "sets": list(variant.sets), **figures, "plan": shown}
