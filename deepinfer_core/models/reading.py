"""Typed reading of Hugging Face configurations, shared by model families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepinfer_core.errors import CheckpointError
from deepinfer_core.models.rope import KINDS, RopeSpec, is_positive, problems_of

MOST = 10_000
"""Layers, experts and the like: more of them are a mistake that would take for ever to find."""

MOST_POSITIONS = 2**24
"""Longest context: each position has its angles in memory."""


class ConfigReader:
    """Typed access that collects problems instead of raising."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.problems: list[str] = []

    def positive(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """A whole number of at least 1; ``most`` is for what is counted one by one."""
        return self._whole(key, default, 1, most, "a positive whole number")

    def count(self, key: str, default: int | None = None, most: int | None = None) -> int:
        """A whole number, 0 included; for ``most`` see ``positive``."""
        return self._whole(key, default, 0, most, "a whole number >= 0")

    def _whole(
        self, key: str, default: int | None, least: int, most: int | None, expected: str
    ) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < least:
            self.problems.append(f"{key}: expected {expected}, got {value!r}")
            return least
        if most is not None and value > most:
            self.problems.append(f"{key}: at most {most} are supported, got {value}")
            return least
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.config.get(key)
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            self.problems.append(f"{key}: expected a list of whole numbers, got {value!r}")
            return ()
        return tuple(value)

    def listed(self, key: str) -> list[Any] | None:
        """A list of anything, None if there is none."""
        value = self.config.get(key)
        if value is None or isinstance(value, list | tuple):
            return None if value is None else list(value)
        self.problems.append(f"{key}: expected a list, got {value!r}")
        return None

    def only(self, fields: Mapping[str, Any]) -> None:
        """Fields of which one value only is supported; one that is not there has it."""
        for key, value in fields.items():
            if self.config.get(key, value) != value:
                self.problems.append(
                    f"{key}: only {value!r} is supported, got {self.config[key]!r}"
                )

    def number(self, key: str, default: float) -> float:
        """A number above 0."""
        value = self.config.get(key)
        value = default if value is None else value
        if not is_positive(value):
            self.problems.append(f"{key}: expected a positive number, got {value!r}")
            return default
        return float(value)

    def table(self, key: str) -> dict[str, Any]:
        """A table, empty if there is none."""
        value = self.config.get(key)
        if value is None or isinstance(value, Mapping):
            return dict(value or {})
        self.problems.append(f"{key}: expected a table, got {value!r}")
        return {}

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.problems.append(f"{key}: expected true or false, got {value!r}")
            return default
        return value


def refuse(architecture: str, problems: Sequence[str]) -> None:
    """Raise CheckpointError if a configuration has problems, naming all of them."""
    if problems:
        raise CheckpointError(f"configuration of {architecture} cannot be used", problems)


def read_heads(read: ConfigReader, hidden: int) -> tuple[int, int, int]:
    """Query heads, key-value heads, numbers per head."""
    heads = read.positive("num_attention_heads")
    kv_heads = read.positive("num_key_value_heads", heads)
    if heads % kv_heads:
        read.problems.append(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    return heads, kv_heads, read.positive("head_dim", hidden // heads or None)


def read_ends(read: ConfigReader) -> tuple[int, ...]:
    """Ids that end a sequence."""
    found = read.config.get("eos_token_id")
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(type(token) is int for token in ids):
        read.problems.append(f"eos_token_id: expected a token id or a list of them, got {found!r}")
        return ()
    return tuple(ids)


def read_rope(
    read: ConfigReader,
    head_dim: int,
    max_position: int,
    options: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """Rotary embedding.

    Args:
        read: the configuration.
        head_dim: numbers per head.
        max_position: positions the model is made for.
        options: of a kind of layers that has its own; None takes the configuration's.
    """
    config = read.config
    if options is None:
        options = read.table("rope_parameters") or read.table("rope_scaling")
    options = dict(options)
    if any(isinstance(value, Mapping) for value in options.values()):
        read.problems.append("rope_parameters: different ones by layer type are not supported")
        options = {}
    kind = options.get("rope_type") or options.get("type") or "default"
    if kind not in KINDS:
        read.problems.append(f"rope type {kind!r} is not one of {', '.join(KINDS)}")
        kind = "default"
    for key in ("rope_theta", "partial_rotary_factor"):
        if options.get(key) is None:
            options[key] = config.get(key)
    original = "original_max_position_embeddings"
    options[original] = config.get(original) or options.get(original) or max_position
    theta = _rope_number(read, options, "rope_theta", 10000.0)
    share = _rope_number(read, options, "partial_rotary_factor", 1.0)
    rotary_dim = int(head_dim * share)
    if share > 1 or rotary_dim % 2:
        read.problems.append(
            f"head_dim {head_dim} with partial_rotary_factor {share:g}: "
            f"cannot rotate {rotary_dim} numbers in pairs"
        )
    read.problems += problems_of(kind, options, rotary_dim)
    if kind == "yarn" and theta == 1:
        read.problems.append("rope_theta 1 with rope type 'yarn': all numbers turn alike")
    return RopeSpec(
        kind=kind, theta=theta, rotary_dim=rotary_dim, max_position=max_position, options=options
    )


def _rope_number(read: ConfigReader, options: Mapping[str, Any], key: str, default: float) -> float:
    value = default if options[key] is None else options[key]
    if not is_positive(value):
        read.problems.append(f"{key}: expected a positive number, got {value!r}")
        return default
    return float(value)
