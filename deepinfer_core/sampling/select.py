"""Finding tokens in a row: by condition, and the first few in order.

numpy does on the host what torch's CPU kernels do several times slower; results are the same on
every device, ties included.
"""

from __future__ import annotations

import numpy as np
import torch


def where(condition: torch.Tensor) -> torch.Tensor:
    """Return the places that are true.

    Args:
        condition: [n], bool.

    Returns:
        [number true], int64, ascending.
    """
    if condition.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(condition.numpy()))
    return torch.nonzero(condition).squeeze(-1)


def head(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest values: larger first, the lower place among equals.

    Args:
        values: [n], floating point, without NaN.
        count: how many, from 0; at most n are returned.

    Returns:
        [count], int64.
    """
    count = min(count, values.shape[0])
    if count == 0:
        return torch.empty(0, dtype=torch.int64, device=values.device)
    if count == values.shape[0]:
        return torch.sort(values, descending=True, stable=True).indices
    last = _largest(values, count)
    found = where(values >= last)
    if found.shape[0] > count:  # more equals at the end than there is room for
        above = where(values > last)
        equal = where(values == last)[: count - above.shape[0]]
        found = torch.sort(torch.cat([above, equal])).values
    return found[torch.sort(values[found], descending=True, stable=True).indices]


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the count-th largest value, as a scalar tensor."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        place = values.shape[0] - count
        return torch.from_numpy(np.partition(values.numpy(), place)[place : place + 1])[0]
    return torch.topk(values, count).values[-1]
