"""Rows taken out of a matrix."""

import pytest
import torch

from deepinfer_core.sampling.row_views import take_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rows", [[], [3], [0, 1, 2], [1, 3, 5], [0, 1, 3], [5, 0, 0], [4, 2, 0]])
def test_rows_come_in_the_order_asked_for(dtype: torch.dtype, rows: list[int]) -> None:
    x = torch.arange(24).view(6, 4).to(dtype)
    with torch.inference_mode():
        assert torch.equal(take_rows(x, rows), x[torch.tensor(rows, dtype=torch.int64)])


def test_rows_at_even_distances_are_no_copy() -> None:
    x = torch.zeros(6, 4)
    take_rows(x, [1, 3, 5]).fill_(7.0)
    assert x[:, 0].tolist() == [0, 7, 0, 7, 0, 7]
