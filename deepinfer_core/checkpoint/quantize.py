"""Dense weights -> packed ones, for weights that may lose a little."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.checkpoint.tensors import PackedTensor

Q8_GROUP = 32
"""Numbers that share a scale in Q8_0."""


def quantize_q8_0(weight: Tensor) -> PackedTensor:
    """Pack a weight in GGUF's Q8_0: a float16 scale and 32 whole numbers of 8 bits for each group.

    Args:
        weight: [rows, columns], a multiple of 32 columns; finite.

    Raises:
        ValueError: there are other columns.
    """
    rows, columns = weight.shape
    if columns % Q8_GROUP:
        raise ValueError(f"Q8_0 takes a multiple of {Q8_GROUP} columns, not {columns}")
    groups = weight.detach().float().reshape(-1, Q8_GROUP)
    scale = (groups.abs().amax(1, keepdim=True) / 127).to(torch.float16)
    # Divided by what is stored, so that its rounding costs nothing more.
    numbers = torch.where(scale > 0, groups / scale.float(), 0.0).round_().clamp_(-127, 127)
    data = torch.cat([scale.view(torch.uint8), numbers.to(torch.int8).view(torch.uint8)], 1)
    return PackedTensor(
        format="q8_0",
        shape=(rows, columns),
        data=data.reshape(rows, -1),
        block_size=Q8_GROUP,
        bytes_per_block=Q8_GROUP + 2,
    )
