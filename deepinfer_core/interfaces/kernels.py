"""Slot ``kernels``: sets of op providers.

An op is a named operation of ``deepinfer_core.ops`` with a reference in plain torch that is also
its specification. A provider is one implementation of one op, with a reason when it cannot serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from deepinfer_core.components import Priority, Verified


@frozen(kw_only=True)
class OpFacts:
    """What a provider may judge by when the op table is bound.

    Attributes:
        device_type: torch device type ("cpu", "cuda", "npu").
        dtype: computation dtype of the model.
        weight_format: "dense" or the name of a packed format ("q4_1", "fp8_32x32", ...).
        shapes: op dependent sizes, e.g. ``{"in": 576, "out": 1536}``; empty where unknown.
        batch_invariant: whether results must not depend on the other rows.
    """

    device_type: str
    dtype: str
    weight_format: str = "dense"
    shapes: dict[str, int] = field(factory=dict)
    batch_invariant: bool = False


def _no_objection(facts: OpFacts) -> str | None:
    return None


@frozen(kw_only=True)
class OpProvider:
    """One implementation of one op.

    Attributes:
        op: name of the op in ``deepinfer_core.ops.OPS``.
        name: unique among the providers of the op.
        build: returns the implementation, an object with the methods of the op's reference.
        why_not: why this provider cannot serve, or None.
        priority: higher wins among those without an objection.
        verified: how far its results were compared with the reference.
        batch_invariant: whether its rows are independent of each other bit for bit.
    """

    op: str
    name: str
    build: Callable[[OpFacts], Any]
    why_not: Callable[[OpFacts], str | None] = _no_objection
    priority: int = Priority.PORTABLE
    verified: Verified = Verified.TESTED
    batch_invariant: bool = False


@frozen(kw_only=True)
class KernelsContext:
    """What a kernels builder receives."""

    device_type: str


class KernelSet(Protocol):
    """What the ``kernels`` slot builds."""

    def providers(self) -> Sequence[OpProvider]:
        """Every provider of the set; called once when the op table is bound."""
        ...
