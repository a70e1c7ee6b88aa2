"""Inputs for every op of the core: fresh random numbers, odd sizes, and the cases that go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor

from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_core.testing.numerics import Family

ROWS = (1, 2, 5, 33)
"""Row counts that every case is made with."""


@frozen(kw_only=True, eq=False)
class OpCase:
    """One call of an op, in float64.

    Attributes:
        name: says which case it is.
        family: what is computed.
        prepare: arguments of ``prepare``; None where the op has none.
        run: arguments of ``run`` before the handle; those in ``by_row`` have one entry a row.
        by_row: indices of arguments that are indexed by row.
        options: keyword arguments of ``run``.
        exact: arguments that are float32 whatever the dtype (cosines, weights of experts).
        reuses: indices of arguments that the op may overwrite.
    """

    name: str
    family: Family
    prepare: tuple[Any, ...] | None = None
    run: tuple[Any, ...]
    by_row: tuple[int, ...] = (0,)
    options: Mapping[str, Any] = field(factory=dict)
    exact: tuple[int, ...] = ()
    reuses: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of the call."""
        return int(self.run[self.by_row[0]].shape[0])

    def cast(self, dtype: torch.dtype, device: torch.device) -> OpCase:
        """The same case rounded to a dtype, on a device."""

        def convert(value: Any, exact: bool) -> Any:
            if isinstance(value, list | tuple):
                return [convert(item, exact) for item in value]
            if not isinstance(value, Tensor):
                return value
            if value.dtype.is_floating_point:
                wide = torch.float64 if dtype == torch.float64 else torch.float32
                value = value.to(wide if exact else dtype)
            return value.to(device)

        prepare = self.prepare and tuple(convert(value, False) for value in self.prepare)
        run = tuple(convert(value, at in self.exact) for at, value in enumerate(self.run))
        return evolve(self, prepare=prepare, run=run)

    def copied(self) -> OpCase:
        """The same case with copies of its tensors, for ops that may reuse them."""

        def copy(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [copy(item) for item in value]
            return value.clone() if isinstance(value, Tensor) else value

        prepare = self.prepare and tuple(map(copy, self.prepare))
        return evolve(self, prepare=prepare, run=tuple(map(copy, self.run)))

    def rows(self, chosen: list[int]) -> OpCase:
        """The same case with some of its rows, in the order given."""
        run = tuple(
            value[chosen] if at in self.by_row else value for at, value in enumerate(self.run)
        )
        return evolve(self, run=run)

    def strided(self) -> OpCase:
        """The same numbers where no row-wise argument is contiguous."""

        def spread(value: Tensor) -> Tensor:
            wide = value.new_full((*value.shape[:-1], value.shape[-1] + 3), 77)
            wide[..., 1:-2] = value
            return wide[..., 1:-2]

        run = tuple(
            spread(value) if at in self.by_row and value.dim() > 1 else value
            for at, value in enumerate(self.run)
        )
        return evolve(self, run=run)

    def call(self, op: Any, handle: Any = None) -> tuple[Tensor, ...]:
        """Run an implementation; the result as a tuple."""
        arguments = self.run if self.prepare is None else (*self.run, handle)
        result = op.run(*arguments, **self.options)
        return result if isinstance(result, tuple) else (result,)

    def prepared(self, op: Any) -> Any:
        """The handle, or None where the op has none."""
        return None if self.prepare is None else op.prepare(*self.prepare)


class _Draw:
    """Random numbers of one case."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        return scale * torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def below(self, limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, generator=self._generator)

    def ordered(self, rows: int, columns: int) -> Tensor:
        """Numbers well apart from each other, shuffled by row."""
        noise = torch.rand(rows, columns, generator=self._generator, dtype=torch.float64)
        return (noise.argsort(-1).double() - columns / 2) / 4


def _linear(draw: _Draw, rows: int) -> Iterator[OpCase]:
    for width, out, biased in ((32, 32, False), (72, 40, True), (33, 17, False), (130, 5, True)):
        weight = draw.normal(out, width, scale=width**-0.5)
        yield OpCase(
            name=f"{width} to {out}{', bias' if biased else ''}",
            family=Family.PRODUCT,
            prepare=(weight, draw.normal(out) if biased else None),
            run=(draw.normal(rows, width),),
        )


def _embedding(draw: _Draw, rows: int) -> Iterator[OpCase]:
    ids = draw.below(29, rows)
    ids[0], ids[-1] = 0, 28
    yield OpCase(name="table", family=Family.COPY, prepare=(draw.normal(29, 13),), run=(ids,))


def _rms_norm(draw: _Draw, rows: int) -> Iterator[OpCase]:
    for name, shape, scale in (
        ("plain", (rows, 37), 1.0),
        ("small", (rows, 64), 1e-3),
        ("large", (rows, 64), 1e4),
        ("heads", (rows, 3, 16), 1.0),
    ):
        x = draw.normal(*shape, scale=scale)
        yield OpCase(
            name=name, family=Family.REDUCTION, run=(x, 1 + draw.normal(shape[-1], scale=0.1), 1e-5)
        )
    yield OpCase(
        name="zeros",
        family=Family.REDUCTION,
        run=(torch.zeros(rows, 8, dtype=torch.float64), draw.normal(8), 1e-6),
    )


def _add_rms_norm(draw: _Draw, rows: int) -> Iterator[OpCase]:
    for width, scale in ((37, 1.0), (64, 1e-3)):
        x, delta = draw.normal(rows, width, scale=scale), draw.normal(rows, width, scale=scale)
        yield OpCase(
            name=f"{width}",
            family=Family.REDUCTION,
            run=(x, delta, 1 + draw.normal(width, scale=0.1), 1e-5),
            by_row=(0, 1),
            reuses=(0,),
        )


def _rope(draw: _Draw, rows: int) -> Iterator[OpCase]:
    for heads, width, rotated in ((3, 16, 16), (1, 24, 8), (5, 64, 64)):
        angles = draw.normal(rows, rotated // 2, scale=10.0)
        for interleaved in (False, True):
            yield OpCase(
                name=f"{rotated} of {width}{', interleaved' if interleaved else ''}",
                family=Family.ELEMENT,
                run=(draw.normal(rows, heads, width), angles.cos(), angles.sin()),
                by_row=(0, 1, 2),
                options={"interleaved": interleaved},
                exact=(1, 2),
            )


def _gated(draw: _Draw, rows: int) -> Iterator[OpCase]:
    for half, scale in ((19, 1.0), (64, 20.0)):
        x = draw.normal(rows, 2 * half, scale=scale)
        yield OpCase(name=f"{half}", family=Family.ELEMENT, run=(x,))


def _moe_gate(draw: _Draw, rows: int) -> Iterator[OpCase]:
    for experts, top_k, renormalise in ((8, 2, True), (7, 3, False), (4, 4, True)):
        yield OpCase(
            name=f"{top_k} of {experts}{', renormalised' if renormalise else ''}",
            family=Family.REDUCTION,
            run=(draw.ordered(rows, experts), top_k),
            options={"renormalise": renormalise},
        )
    ties = draw.below(2, rows, 8).double()
    yield OpCase(name="ties", family=Family.REDUCTION, run=(ties, 3), options={"renormalise": True})


def _moe_experts(draw: _Draw, rows: int) -> Iterator[OpCase]:
    clamped = GatedActivation(alpha=1.7, limit=0.8, offset=1.0)
    for experts, top_k, width, inner, act in (
        (4, 2, 24, 16, None),
        (5, 1, 33, 9, None),
        (6, 3, 64, 48, clamped),
    ):
        gate_up = [draw.normal(2 * inner, width, scale=width**-0.5) for _ in range(experts)]
        down = [draw.normal(width, inner, scale=inner**-0.5) for _ in range(experts)]
        scores = draw.normal(rows, experts - 1)  # the last expert gets no token
        weights, ids = torch.softmax(scores, -1).topk(top_k, dim=-1)
        sizes = (2 * inner, width)
        biases = [[draw.normal(size, scale=0.1) for _ in range(experts)] for size in sizes]
        yield OpCase(
            name=f"{top_k} of {experts}{'' if act is None else ', biased and clamped'}",
            family=Family.ATTENTION,
            prepare=(gate_up, down) if act is None else (gate_up, down, biases, act),
            run=(draw.normal(rows, width), weights, ids),
            by_row=(0, 1, 2),
            exact=(1,),
        )


def _sampled(draw: _Draw, rows: int) -> Iterator[OpCase]:
    """Every filter alone and together, flat and steep rows, ties, banned tokens."""
    knobs = (
        ("plain", 1.0, 0, 1.0, 0.0),
        ("cold", 0.05, 0, 1.0, 0.0),
        ("hot", 50.0, 0, 1.0, 0.0),
        ("top-k", 0.8, 7, 1.0, 0.0),
        ("top-k of more than there are", 1.0, 5000, 1.0, 0.0),
        ("top-p", 1.3, 0, 0.9, 0.0),
        ("a small top-p", 1.0, 0, 1e-6, 0.0),
        ("min-p", 2.0, 0, 1.0, 0.02),
        ("all", 1.7, 40, 0.97, 0.001),
    )
    for name, temperature, top_k, top_p, min_p in knobs:
        for kind, logits in (
            ("steep", draw.normal(rows, 1003, scale=4.0)),
            ("ties", draw.below(4, rows, 517).double()),
            ("banned", draw.normal(rows, 301)),
        ):
            if kind == "banned":
                logits[:, 5:290] = -torch.inf
            yield OpCase(
                name=f"{name}, {kind}",
                family=Family.COPY,
                run=(
                    logits.float().double(),
                    torch.full((rows,), temperature, dtype=torch.float64),
                    torch.full((rows,), top_k),
                    torch.full((rows,), top_p, dtype=torch.float64),
                    torch.full((rows,), min_p, dtype=torch.float64),
                    draw.below(2**62, rows),
                ),
                by_row=(0, 1, 2, 3, 4, 5),
                exact=(0, 1, 3, 4),
            )


CASES: dict[str, Callable[[_Draw, int], Iterator[OpCase]]] = {
    "linear": _linear,
    "embedding": _embedding,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "rope": _rope,
    "silu_mul": _gated,
    "gelu_mul": _gated,
    "moe_gate": _moe_gate,
    "moe_experts": _moe_experts,
    "draw": _sampled,
}
"""Op -> its cases for a number of rows."""


def cases(op: str, rows: tuple[int, ...] = ROWS, seed: int = 0) -> Iterator[OpCase]:
    """Every case of an op, with each number of rows."""
    for count in rows:
        yield from CASES[op](_Draw(seed + count), count)
