"""Cache groups: which layers share a layout of attention state, and how it is recovered.

A model's attention state is a bundle of groups. Each group has its own page size, bytes per page,
block table and lifetime, and says how it comes back when a prefix is found in a cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from attrs import field, frozen, validators


class GroupKind(StrEnum):
    """What one entry of a group stands for."""

    FULL = "full"
    """One entry a token, all kept."""
    WINDOW = "window"
    """One entry a token, only the last ``window`` needed."""
    COMPRESSED = "compressed"
    """One entry for every ``ratio`` tokens, all kept."""
    STATE = "state"
    """A fixed-size slot a sequence (compressor partials, recurrent state)."""


class ReplayRule(StrEnum):
    """How a group's state of a found prefix is recovered."""

    STORED = "stored"
    """Its pages are in the cache."""
    SNAPSHOT = "snapshot"
    """The last ``window - 1`` positions are stored at page boundaries."""
    EXACT = "exact"
    """Re-run ``n_window_layers * (window - 1)`` tokens."""
    BOUNDED = "bounded"
    """Re-run ``replay_tokens`` tokens; approximate by design."""
    FRESH = "fresh"
    """Nothing of it is needed: what lies before the end of a hit is never read."""


def _layers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _rules(values: Iterable[ReplayRule]) -> tuple[ReplayRule, ...]:
    return tuple(values)


@frozen(kw_only=True)
class CacheGroupSpec:
    """One cache group of a model.

    Attributes:
        name: unique within the model.
        kind: what an entry stands for.
        layers: model layers that read the group; the first of ``writers`` (or all) write it.
        writers: layers that write it; empty means every layer of ``layers`` writes its own entries.
        num_kv_heads: heads stored per entry and layer.
        key_dim: numbers per head of a key.
        value_dim: numbers per head of a value; 0 where key and value are one vector.
        dtype: storage dtype name ("float32", "bfloat16", "int8", "float8_e4m3fn", ...).
        scale_bytes: extra bytes per entry and layer for quantisation scales; by default none, with
            "int8" a float32 for each vector.
        page_size: tokens per page; a multiple of ``ratio``.
        window: tokens visible to a query including itself; 0 = unlimited.
        ratio: tokens per entry (1 unless compressed).
        replay: rules the model allows, preferred first.
        trained_for_bounded: the model declares that it was trained for bounded replay.
        replay_tokens: rows that the model declares to be enough for a bounded replay, 0 = none.
        truncated: rows below ``Batch.keep_from`` are neither written to it nor visible in it.
        deepens: its layers reach further back through it than through their other windows; False
            where exact replay need not count it.
    """

    name: str
    kind: GroupKind = GroupKind.FULL
    layers: tuple[int, ...] = field(converter=_layers)
    writers: tuple[int, ...] = field(default=(), converter=_layers)
    num_kv_heads: int = field(validator=validators.ge(1))
    key_dim: int = field(validator=validators.ge(1))
    value_dim: int = field(validator=validators.ge(0))
    dtype: str = "float32"
    scale_bytes: int = field()
    page_size: int = field(default=64, validator=validators.ge(1))
    window: int = field(default=0, validator=validators.ge(0))
    ratio: int = field(default=1, validator=validators.ge(1))
    replay: tuple[ReplayRule, ...] = field(default=(ReplayRule.STORED,), converter=_rules)
    trained_for_bounded: bool = False
    replay_tokens: int = field(default=0, validator=validators.ge(0))
    truncated: bool = False
    deepens: bool = True

    @scale_bytes.default
    def _scale_of_each_vector(self) -> int:
        vectors = self.num_kv_heads * (2 if self.value_dim else 1)
        return vectors * dtype_bytes("float32") if self.dtype == "int8" else 0

    def __attrs_post_init__(self) -> None:
        """Refuse layouts that cannot be addressed."""
        if self.page_size % self.ratio:
            raise ValueError(f"page_size {self.page_size} is not a multiple of ratio {self.ratio}")
        if self.kind is GroupKind.WINDOW and self.window < 1:
            raise ValueError(f"window group {self.name!r} needs window >= 1")

    @property
    def storage_layers(self) -> tuple[int, ...]:
        """Layers that own storage."""
        return self.writers or self.layers

    @property
    def entries_per_page(self) -> int:
        """Entries of one layer in one page."""
        return self.page_size // self.ratio

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all layers that own storage."""
        numbers = self.num_kv_heads * (self.key_dim + self.value_dim)
        entry = numbers * dtype_bytes(self.dtype) + self.scale_bytes
        return entry * self.entries_per_page * len(self.storage_layers)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold positions ``0 .. num_tokens - 1``."""
        if self.kind is GroupKind.STATE:
            return 1
        return -(-num_tokens // self.page_size)

    def unfinished_page(self, num_tokens: int) -> int | None:
        """Index of the page that is written on after ``num_tokens`` positions; a state's always.

        A fork copies it, because both sides go on writing there; None where there is no such page.
        """
        if num_tokens == 0:
            return None
        if self.kind is GroupKind.STATE:
            return 0
        return None if num_tokens % self.page_size == 0 else num_tokens // self.page_size

    def first_live_page(self, num_tokens: int) -> int:
        """Index of the first page that a query at position ``num_tokens`` can still see."""
        if not self.window or self.kind is GroupKind.STATE:
            return 0
        return max(0, num_tokens - self.window + 1) // self.page_size


_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def dtype_bytes(name: str) -> int:
    """Bytes of one number of a dtype, by name; everything not listed is one byte wide."""
    return _DTYPE_BYTES.get(name, 1)
