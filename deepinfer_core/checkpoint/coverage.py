"""Does a checkpoint hold what a model expects?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from deepinfer_core.errors import CheckpointError

if TYPE_CHECKING:
    from deepinfer_core.checkpoint.tensors import TensorInfo, WeightSpec

# Buffers that some exporters write and that every model computes for itself.
KNOWN_BUFFERS = (
    r".*\.rotary_emb\.(inv_freq|cos_cached|sin_cached)",
    r".*\.attn\.(masked_)?bias",
)
_MAX_LISTED = 50


class _Described(Protocol):
    """The part of a checkpoint that is needed here."""

    def names(self) -> tuple[str, ...]: ...

    def info(self, name: str) -> TensorInfo: ...


def check_coverage(
    checkpoint: _Described, specs: Sequence[WeightSpec], ignore: Sequence[str] = KNOWN_BUFFERS
) -> None:
    """Compare a checkpoint's tensors with a model's, without reading weights.

    Names, shapes and formats are compared.

    Args:
        checkpoint: what is there.
        specs: what the model expects.
        ignore: regular expressions of names that may be there without being expected.

    Raises:
        CheckpointError: tensors are missing, misshaped, of a wrong format or unexpected; all are
            listed (each kind up to fifty).
    """
    present = set(checkpoint.names())
    expected = {spec.name: spec for spec in specs}
    missing, misshaped, wrong = [], [], []
    for name, spec in expected.items():
        if name not in present:
            if not spec.optional:
                missing.append(f"missing: {name} {list(spec.shape)}")
            continue
        info = checkpoint.info(name)
        if info.shape != spec.shape:
            misshaped.append(
                f"misshaped: {name} is {list(info.shape)}, the model expects {list(spec.shape)}"
            )
        if spec.formats and info.format not in spec.formats:
            expects = " or ".join(spec.formats)
            wrong.append(f"wrong format: {name} is {info.format}, the model expects {expects}")
    ignored = re.compile("|".join(f"(?:{pattern})" for pattern in ignore) or r"(?!)")
    unexpected = [
        f"unexpected: {name} {list(checkpoint.info(name).shape)}"
        for name in sorted(present - expected.keys())
        if not ignored.fullmatch(name)
    ]
    problems = [*_clip(missing), *_clip(misshaped), *_clip(wrong), *_clip(unexpected)]
    if problems:
        raise CheckpointError("the checkpoint does not fit the model", problems)


def _clip(problems: list[str]) -> list[str]:
    rest = len(problems) - _MAX_LISTED
    return problems if rest <= 0 else [*problems[:_MAX_LISTED], f"... and {rest} more like these"]
