"""Engram: rows of huge tables, found by hashes of the last few tokens, added to the stream.

Tables are addressed by exact integer arithmetic: tokens that normalise alike count as one, each
n-gram has a hash of its own for each head, and each (n, head) has a prime number of rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import tokenizers
import torch
from attrs import frozen
from tokenizers import Regex, normalizers
from torch import Tensor

from deepinfer_core.batch import Int64
from deepinfer_core.errors import CheckpointError
from deepinfer_core.text.tokenizer import Tokenizer
from deepinfer_deepseek.checkpoint.loading import row_table
from deepinfer_deepseek.config import EngramConfig, V41Config
from deepinfer_deepseek.numerics import Loader, sigmoid, wide
from deepinfer_deepseek.rows import StepRows

_LARGEST = 2**63 - 1
_SEED = 10007
"""Times the number of a layer, it seeds the multipliers of the layer's hashes."""

_KEPT_SPACE = "\ue000"
"""Stands for a token that is one space while blanks are stripped."""


@frozen(kw_only=True, eq=False)
class Hashes:
    """How one layer finds its rows.

    Attributes:
        multipliers: [max_ngram], int64, of a token and those before it.
        primes: [num_rows], int64: sizes of the tables of each (n, head), n first.
        offsets: [num_rows], int64: where they begin.
    """

    multipliers: Int64
    primes: Int64
    offsets: Int64


def hashes_of(config: EngramConfig) -> dict[int, Hashes]:
    """Layer -> how it finds its rows."""
    primes, found = _primes_after(config.vocab_size - 1), {}
    for layer in config.layers:
        # Each search begins anew and skips what was used before, so the primes go on.
        own = np.array(list(itertools.islice(primes, config.num_rows)), np.int64)
        bound = max(1, _LARGEST // config.compressed_vocab_size // 2)
        random = np.random.default_rng(_SEED * layer)
        drawn = random.integers(0, bound, size=config.max_ngram, dtype=np.int64)
        found[layer] = Hashes(multipliers=drawn * 2 + 1, primes=own, offsets=np.cumsum(own) - own)
    return found


def check_rows(config: EngramConfig) -> None:
    """Compare the tables' sizes with the primes that they follow from.

    Raises:
        CheckpointError: they differ.
    """
    hashes = hashes_of(config)
    problems = [
        f"engram_num_embeddings of layer {layer}: {rows}, but its primes sum up to "
        f"{hashes[layer].primes.sum()}"
        for layer, rows in zip(config.layers, config.rows, strict=True)
        if hashes[layer].primes.sum() != rows
    ]
    if problems:
        raise CheckpointError("the Engram tables do not have the sizes of their hashes", problems)


def _primes_after(number: int) -> Iterator[int]:
    return (n for n in itertools.count(number + 1) if n > 1 and _is_prime(n))


def _is_prime(number: int) -> bool:
    return all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def row_numbers(hashes: Hashes, compressed: Int64) -> Int64:
    """Rows of each token's n-grams.

    Args:
        hashes: of a layer.
        compressed: [n, max_ngram], int64: compressed ids of a token and those before it.

    Returns:
        [n, num_rows], int64.
    """
    heads = len(hashes.primes) // (compressed.shape[1] - 1)
    products = compressed * hashes.multipliers
    mixed = np.bitwise_xor.accumulate(products, 1)[:, 1:]
    rows: Int64 = np.repeat(mixed, heads, 1) % hashes.primes + hashes.offsets
    return rows


def compressed_ids(tokenizer: Tokenizer, vocab_size: int) -> Int64:
    """[vocab_size], int64: one number for all tokens whose text normalises alike, as first seen."""
    normalise = _normaliser()
    known: dict[str, int] = {}
    ids = np.empty(vocab_size, np.int64)
    for token in range(vocab_size):
        text = tokenizer.decode([token], skip_special_tokens=False)
        if "\ufffd" in text:
            key = tokenizer.token(token)
        else:
            key = normalise.normalize_str(text).replace(_KEPT_SPACE, " ") or text
        ids[token] = known.setdefault(key, len(known))
    return ids


def check_ids(config: EngramConfig, compressed: Int64) -> None:
    """Compare a tokenizer with the one that the tables were made with.

    Raises:
        CheckpointError: it tells another number of tokens apart.
    """
    count = int(compressed.max()) + 1
    if count != config.compressed_vocab_size:
        raise CheckpointError(
            f"the tokenizer has {count} different tokens for Engram, but "
            f"engram_compressed_vocab_size is {config.compressed_vocab_size}: it is not the "
            "tokenizer of this model"
        )


def _normaliser() -> tokenizers.normalizers.Normalizer:
    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _KEPT_SPACE),
            normalizers.Strip(),
        ]
    )


class NgramHasher:
    """Finds the rows of a step for every Engram layer.

    Args:
        config: of the tables.
        compressed: [vocab_size], int64, see ``compressed_ids``.
    """

    def __init__(self, config: EngramConfig, compressed: Int64) -> None:
        self._config, self._compressed = config, compressed
        self._hashes = hashes_of(config)

    def rows(self, token_ids: Tensor, rows: StepRows) -> dict[int, Tensor]:
        """Layer -> rows of its table, [n, num_rows], int64.

        Args:
            token_ids: [n], int64, of all rows of the step.
            rows: all rows of the step.
        """
        grams = self._grams(token_ids.cpu().numpy(), rows)
        pad = self._compressed[self._config.pad_token_id]
        compressed = np.where(grams < 0, pad, self._compressed[np.maximum(grams, 0)])
        return {
            layer: torch.from_numpy(row_numbers(hashes, compressed)).to(token_ids.device)
            for layer, hashes in self._hashes.items()
        }

    def _grams(self, token_ids: Int64, rows: StepRows) -> Int64:
        """[n, max_ngram], int64: each token and those before it, -1 before the beginning."""
        before, longest = rows.batch.previous_ids, self._config.max_ngram
        parts: list[Int64] = []
        for sequence, start, stop in rows.spans:
            known = before[sequence, before.shape[1] - (longest - 1) :]
            ids = np.concatenate([known, token_ids[start:stop]]).astype(np.int64)
            windows = np.lib.stride_tricks.sliding_window_view(ids, longest)
            parts.append(windows[:, ::-1])
        return np.concatenate(parts)


class Engram:
    """One layer's table and how its rows enter the stream.

    Args:
        config: of the model.
        layer: before whose attention it stands.
        load: for its parameters.
    """

    def __init__(self, config: V41Config, layer: int, load: Loader) -> None:
        base = f"layers.{layer}.engram."
        self._eps, self._copies = config.norm_eps, config.hc_copies
        self._table = row_table(load.request, f"{base}embed.weight")
        self._project = load.projection(f"{base}wkv")
        self._weight = load.wide(f"{base}q_weight") * load.wide(f"{base}k_weight")

    def add(self, stream: Tensor, rows: Tensor) -> Tensor:
        """Add to the stream what the table says.

        Args:
            stream: [n, copies, hidden].
            rows: [n, num_rows], int64: rows of the table.

        Returns:
            [n, copies, hidden].
        """
        found = self._table.rows(rows).flatten(1)
        *keys, value = wide(self._project(found)).chunk(self._copies + 1, -1)
        gate = self._gate(wide(stream), torch.stack(keys, 1))
        return (wide(stream) + gate.unsqueeze(-1) * value.unsqueeze(1)).to(stream.dtype)

    def _gate(self, stream: Tensor, keys: Tensor) -> Tensor:
        """[n, copies]: how well each copy and its key agree."""
        size = stream.shape[-1]
        norms = [torch.rsqrt(x.square().sum(-1) / size + self._eps) for x in (stream, keys)]
        dots = (stream * self._weight * keys).sum(-1) * norms[0] * norms[1] / math.sqrt(size)
        return sigmoid(dots.sign() * dots.abs().clamp(min=1e-6).sqrt())
