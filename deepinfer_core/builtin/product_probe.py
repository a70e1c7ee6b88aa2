"""Does BLAS give a row the same bits whatever shares its product? No interface promises it."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

_PLACES = ((4, 0), (4, 1), (8, 3), (12, 6), (20, 5))
"""(rows, first row) to try; odd places meet other alignments, the counts remainders of kernels."""

_BATCHES = 3
"""Matrices of one batched product."""


def dependent_products(
    *, key_dim: int, value_dim: int, page_size: int, dtype: torch.dtype
) -> str | None:
    """Try the products of paged attention: queries with a page's keys, weights with its values.

    Numbers of rows are multiples of four, as the backend's are.

    Args:
        key_dim: numbers of a key as stored.
        value_dim: numbers of a value as stored.
        page_size: tokens per page.
        dtype: of the products.

    Returns:
        Which product's rows depend on how many there are, where they begin, or on the batch; None
        if none does.
    """
    generator = torch.Generator().manual_seed(0)
    for what, inner, outer, transposed in (
        ("queries with keys", key_dim, page_size, True),
        ("weights with values", page_size, value_dim, False),
    ):
        rows = torch.rand(64, inner, generator=generator, dtype=torch.float64).to(dtype)
        shape = (_BATCHES, outer, inner) if transposed else (_BATCHES, inner, outer)
        pages = torch.rand(shape, generator=generator, dtype=torch.float64).to(dtype)
        if transposed:
            pages = pages.transpose(1, 2)
        if _differ(rows, pages):
            return (
                f"products of {what} ([n, {inner}] by [{inner}, {outer}], {dtype}) give a row "
                "other bits when other rows come with it"
            )
    return None


def _differ(rows: Tensor, pages: Tensor) -> bool:
    every = torch.bmm(rows.expand(_BATCHES, *rows.shape), pages)
    for count, first in _PLACES:
        some = rows[first : first + count].expand(_BATCHES, count, -1)
        wanted = every[:, first : first + count]
        if not torch.equal(torch.bmm(some.contiguous(), pages), wanted):
            return True
        if not torch.equal(torch.bmm(some[:1], pages[:1]), wanted[:1]):
            return True
    return False


class _Linear(Protocol):
    def prepare(self, weight: Tensor, bias: Tensor | None = None) -> Any: ...

    def run(self, x: Tensor, handle: Any) -> Tensor: ...


def wrong_products(linear: _Linear, dtype: torch.dtype) -> str | None:
    """Try a ``linear`` op on small numbers: why its results cannot be used, or None."""
    weight, x = _sample(96, 80, dtype), _sample(37, 80, dtype)
    found = linear.run(x, linear.prepare(weight))
    if torch.allclose(found, functional.linear(x, weight), rtol=2e-2, atol=2e-1):
        return None
    return "its products are wrong on this machine"


def dependent_rows(linear: _Linear, dtype: torch.dtype) -> str | None:
    """Try whether rows of a ``linear`` op depend on how many there are, or on where they stand."""
    for inner, outer in ((80, 96), (37, 21)):
        x = _sample(37, inner, dtype)
        handle = linear.prepare(_sample(outer, inner, dtype))
        full = linear.run(x, handle)
        for count in (1, 2, 3, 4, 5, 8, 13, 16, 29, 36):
            for first in (0, 37 - count):
                found = linear.run(x[first : first + count], handle)
                if not torch.equal(found, full[first : first + count]):
                    return f"rows differ with the batch ({count} rows) on this machine"
    return None


def _sample(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, columns, generator=generator).to(dtype)
