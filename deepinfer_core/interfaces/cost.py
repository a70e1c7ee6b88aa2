"""FLOPs of prefill: what a model computes for a prompt, and what a cached beginning saves.

Pure arithmetic, without a device: an upper bound of what a cache can gain, reached where FLOPs and
nothing else decide how fast prefill is.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class AttentionCost:
    """Layers whose attention costs the same.

    Attributes:
        flops: of one layer-set for one token and one visible entry: 4 x layers x heads x head size.
        window: entries visible at most, 0 = all.
        ratio: tokens per entry.
    """

    flops: float
    window: int = 0
    ratio: int = 1

    def span(self, start: int, stop: int) -> float:
        """FLOPs of the tokens ``start .. stop - 1``."""
        return self.flops * (self._sum(stop) - self._sum(start))

    def _sum(self, count: int) -> float:
        """Visible entries, added up over the first ``count`` tokens."""
        if not self.window or count <= self.window * self.ratio:
            return count * (count + 1) / 2 / self.ratio
        growing = self.window * self.ratio
        return self._sum(growing) + (count - growing) * self.window


@frozen(kw_only=True)
class StageCost:
    """Layers that compute the same rows of a prompt.

    Attributes:
        linear: FLOPs of one row: 2 for every weight that takes part.
        attention: what depends on the context.
        last_rows: only so many rows at the end of a prompt are computed, 0 = all.
        replayed: rows before the end of a hit that are computed again.
        name: for those who read about it, "" if it is the only one.
    """

    linear: float
    attention: tuple[AttentionCost, ...] = ()
    last_rows: int = 0
    replayed: int = 0
    name: str = ""

    def flops(self, start: int, stop: int) -> float:
        """Of a prompt of ``stop`` tokens whose first ``start`` are cached."""
        first = max(0, start - self.replayed)
        if self.last_rows:
            first = max(first, stop - self.last_rows)
        return self.span(first, stop)

    def span(self, start: int, stop: int) -> float:
        """Of the rows ``start .. stop - 1``, all of them computed."""
        return self.linear * (stop - start) + sum(part.span(start, stop) for part in self.attention)


@frozen(kw_only=True)
class PrefillCost:
    """FLOPs of prefill, which bound what a cache can save.

    Attributes:
        stages: all layers.
        head: of the one row that gets logits.
    """

    stages: tuple[StageCost, ...]
    head: float

    def flops(self, start: int, stop: int) -> float:
        """Of a prompt of ``stop`` tokens whose first ``start`` are cached."""
        return self.head + sum(stage.flops(start, stop) for stage in self.stages)

    def decode(self, position: int) -> float:
        """Of one generated token at a position."""
        return self.head + sum(stage.span(position, position + 1) for stage in self.stages)

    def ratio(self, num_tokens: int, hit_rate: float) -> float:
        """How much faster a prompt is prefilled with this share of it cached, if FLOPs decide."""
        computed = max(1, round(num_tokens * (1 - hit_rate)))
        return self.flops(0, num_tokens) / self.flops(num_tokens - computed, num_tokens)
