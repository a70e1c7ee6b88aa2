"""The references of all ops as a kernel set: slow, and right by definition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.components import Priority, Verified
from deepinfer_core.interfaces.kernels import OpFacts, OpProvider
from deepinfer_core.ops import reference


class ReferenceKernels:
    """A provider for every op: its reference."""

    def providers(self) -> Sequence[OpProvider]:
        """One provider an op."""
        return [
            OpProvider(
                op=op,
                name="reference",
                build=builder(make),
                priority=Priority.REFERENCE,
                verified=Verified.REFERENCE,
            )
            for op, make in reference.OPS.items()
        ]


def builder(make: Callable[[], Any]) -> Callable[[OpFacts], Any]:
    """An ``OpProvider.build`` that makes the same thing whatever the facts."""
    return lambda facts: make()
