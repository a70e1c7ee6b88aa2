"""The lightning indexer: which compressed entries a query attends to."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from deepinfer_deepseek.attention import ALIGNED, BLOCK
from deepinfer_deepseek.formats import CacheFormats
from deepinfer_deepseek.groups import keys_of
from deepinfer_deepseek.numerics import Loader, Rotation, wide
from deepinfer_deepseek.rows import StepRows
from deepinfer_deepseek.stack import StackConfig


class Indexer:
    """Ranks entries for one layer and those that take its list."""

    def __init__(
        self,
        config: StackConfig,
        layer: int,
        load: Loader,
        rotation: Rotation,
        formats: CacheFormats,
    ) -> None:
        base, index = f"layers.{layer}.attn.indexer.", config.index
        self._layer, self._index, self._ratio = layer, index, config.ratios[layer]
        self._rotation, self._formats = rotation, formats
        self._queries = load.projection(f"{base}wq_b")
        self._weights = load.projection(f"{base}weights_proj")
        self._factor = index.head_dim**-0.5 * index.num_heads**-0.5
        self._makes_candidates = index.candidate_layer == layer
        self._obeys_candidates = (
            index.candidate_layer is not None
            and layer > index.candidate_layer
            and config.index_key_source(layer) == config.index_key_source(index.candidate_layer)
        )

    def rank(
        self, x: Tensor, low_rank: Tensor, angles: tuple[Tensor, Tensor], rows: StepRows
    ) -> Tensor:
        """Choose entries.

        Args:
            x: [n, hidden], attention input.
            low_rank: [n, q_rank], the normed low-rank query.
            angles: of the rows' positions.
            rows: which they are.

        Returns:
            [n, topk], int64: numbers of entries, ascending, then -1.
        """
        index = self._index
        q = self._queries(low_rank).unflatten(-1, (index.num_heads, index.head_dim))
        q = self._formats.index(self._rotation.turn(q, angles))
        weights = wide(self._weights(x)) * self._factor
        storage, plan = rows.group(keys_of(self._ratio))
        vectors = storage.keys(self._layer)
        chosen = torch.full((x.shape[0], index.topk), -1, dtype=torch.int64, device=x.device)
        for sequence, start, stop in rows.spans:
            count = rows.num_entries(sequence, self._ratio)
            if not count:
                continue
            keys = vectors.index_select(0, plan.entry_slots(sequence, count))
            found = scores(q[start:stop], weights[start:stop], keys)
            visible = (rows.positions[start:stop] + 1) // self._ratio
            found.masked_fill_(torch.arange(count) >= visible.unsqueeze(1), -torch.inf)
            if self._obeys_candidates:
                found.masked_fill_(~rows.candidates[sequence], -torch.inf)
            if self._makes_candidates:
                rows.candidates[sequence] = candidates(
                    found, visible, index.candidate_block_size, index.candidate_blocks
                )
            best = top_entries(found, index.topk)
            chosen[start:stop, : best.shape[1]] = best
        return chosen


def scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Weighted sums over heads of what of each product is positive.

    Args:
        q: [n, heads, dim].
        weights: [n, heads].
        keys: [count, dim].

    Returns:
        [n, count], in at least float32.
    """
    count, heads, rows = keys.shape[0], q.shape[1], q.shape[0] * q.shape[1]
    beyond = -q.shape[2] % ALIGNED
    flat = functional.pad(wide(q).flatten(0, 1), (0, beyond, 0, -rows % 4)).unsqueeze(0)
    keys = functional.pad(wide(keys), (0, beyond, 0, -count % BLOCK))
    # Always as many entries: a score must not depend on their number.
    found = []
    for part in keys.split(BLOCK):
        products = torch.bmm(flat, part.t().unsqueeze(0))[0, :rows].clamp_(min=0)
        products = products.view(-1, heads, BLOCK)
        total = weights[:, :1] * products[:, 0]
        for head in range(1, heads):
            total += weights[:, head : head + 1] * products[:, head]
        found.append(total)
    return torch.cat(found, 1)[:, :count]


def top_entries(found: Tensor, topk: int) -> Tensor:
    """Numbers of the largest scores of each row, ascending, then -1; lower numbers win ties.

    Args:
        found: [n, count], ``-inf`` where an entry must not be chosen.
        topk: most entries of a row.

    Returns:
        [n, min(topk, count)], int64.
    """
    count = found.shape[1]
    ordered, ids = torch.sort(found, dim=-1, descending=True, stable=True)
    best = ids[:, :topk].masked_fill(ordered[:, :topk] == -torch.inf, count)
    best = best.sort(-1).values
    return best.masked_fill_(best == count, -1)


def candidates(found: Tensor, visible: Tensor, block: int, most: int) -> Tensor:
    """Entries of the best blocks; the block of the newest visible entry is always one.

    Args:
        found: [n, count] scores, ``-inf`` where invisible.
        visible: [n], entries that each row sees.
        block: entries of a block.
        most: blocks kept.

    Returns:
        [n, count], bool.
    """
    count = found.shape[1]
    padded = functional.pad(found, (0, -count % block), value=-torch.inf)
    best = padded.unflatten(-1, (-1, block)).amax(-1)
    newest = ((visible - 1) // block).clamp(min=0).unsqueeze(1)
    best = best.scatter(1, newest, torch.inf)
    chosen = top_entries(best, most)
    keeps = torch.zeros(best.shape[0], best.shape[1] + 1, dtype=torch.bool, device=found.device)
    keeps.scatter_(1, chosen.masked_fill(chosen < 0, best.shape[1]), True)
    return keeps[:, :-1].repeat_interleave(block, 1)[:, :count]
