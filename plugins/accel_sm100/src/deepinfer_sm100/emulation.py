"""Triton kernels on host tensors, honestly: numbers of the hardware's types, checked memory.

Triton's own interpreter multiplies bfloat16 as bit patterns, truncates where hardware rounds, lets
kernels write past their tensors and runs programs one after another, so that races never show. Here

* conversions to narrow types round to nearest even, those to FP8 saturate; arithmetic on narrow
  types is done in float32 and rounded; products add up in float32;
* what cannot be done honestly (fused or clamped narrow numbers) raises instead of being wrong;
* accesses outside of the tensors that were passed raise;
* on request programs run in a shuffled order, and touching what another program stores raises.

What it cannot show: the order in which hardware adds, its exponentials, pipelines and barriers,
alignment, legal tile shapes, speed. A result of it is never called verified on hardware.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from functools import cache
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

Array = npt.NDArray[Any]

_FLOATS = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_NARROW = frozenset({tl.bfloat16, tl.float8e4nv, tl.float8e5})
_LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
_SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_RTZ = getattr(interpreter._ir.ROUNDING_MODE, "RTZ", None)
_NOBODY, _SEVERAL = -1, -2


class MemoryViolation(AssertionError):
    """A kernel touched memory that it may not touch."""


def _values(data: Array, dtype: Any) -> torch.Tensor:
    bits = np.ascontiguousarray(data).view(_SIGNED[dtype.primitive_bitwidth])
    return torch.from_numpy(bits.copy()).view(_FLOATS[dtype])


def _wide(data: Array, dtype: Any) -> Array:
    """Numbers of a float type as float32."""
    return _values(data, dtype).float().numpy()


def _rounded(values: torch.Tensor, dtype: Any) -> Array:
    """Numbers as the interpreter keeps them in ``dtype``."""
    if dtype in _LARGEST:
        most = _LARGEST[dtype]
        values = torch.where(values.isnan(), values, values.clamp(-most, most))
    narrow = values.to(_FLOATS[dtype])
    if dtype not in _NARROW:
        return narrow.numpy()
    width = dtype.primitive_bitwidth
    return narrow.view({8: torch.int8, 16: torch.int16}[width]).numpy().view(_UNSIGNED[width])


def _scalar(handle: Any) -> Any:
    return handle.dtype.scalar


class _HonestBuilder(interpreter.InterpreterBuilder):  # type: ignore[misc]
    """The interpreter's operations with the numbers of the hardware's types."""

    def __init__(self) -> None:
        super().__init__()
        self.options = interpreter.InterpreterOptions(sanitize_overflow=False)
        self.memory: _Memory | None = None

    # ------------------------------------------------------------------------------- numbers

    def _convert(self, src: Any, target: Any) -> Any:
        source = _scalar(src)
        data = _rounded(_values(src.data, source), target).reshape(src.data.shape)
        return interpreter.TensorHandle(data, target)

    def cast_impl(self, src: Any, dst_type: Any) -> Any:
        source, target = _scalar(src), dst_type.scalar
        if source in _FLOATS and target in _FLOATS:
            return self._convert(src, target)
        if source in _NARROW:
            src = interpreter.TensorHandle(_wide(src.data, source), tl.float32)
        if target in _NARROW:
            data = _rounded(torch.from_numpy(src.data.astype(np.float32)), target)
            return interpreter.TensorHandle(data, target)
        return super().cast_impl(src, dst_type)

    def create_fp_to_fp(self, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        source, target = _scalar(src), dst_type.scalar
        nearest = _RTZ is None or rounding_mode != _RTZ
        if nearest and source in _FLOATS and target in _FLOATS:
            return self._convert(src, target)
        return super().create_fp_to_fp(src, dst_type, rounding_mode)

    def _in_float32(self, method: Any, handles: Sequence[Any], *rest: Any) -> Any:
        narrow = next((_scalar(h) for h in handles if _scalar(h) in _NARROW), None)
        if narrow is None:
            return method(*handles, *rest)
        wide = [
            interpreter.TensorHandle(_wide(h.data, _scalar(h)), tl.float32)
            if _scalar(h) in _NARROW
            else h
            for h in handles
        ]
        result = method(*wide, *rest)
        if result.data.dtype == np.float32:
            data = _rounded(torch.from_numpy(np.ascontiguousarray(result.data)), narrow)
            return interpreter.TensorHandle(data.reshape(result.data.shape), narrow)
        return result

    def binary_op(self, lhs: Any, rhs: Any, op: Any) -> Any:
        return self._in_float32(super().binary_op, (lhs, rhs), op)

    def unary_op(self, arg: Any, op: Any) -> Any:
        return self._in_float32(super().unary_op, (arg,), op)

    def create_clampf(self, arg: Any, lo: Any, hi: Any, propagate_nans: Any) -> Any:
        _refuse_narrow("clamp", arg)
        return super().create_clampf(arg, lo, hi, propagate_nans)

    def create_fma(self, x: Any, y: Any, z: Any) -> Any:
        _refuse_narrow("fma", x)
        return super().create_fma(x, y, z)

    def create_dot(self, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        left, right = (
            _wide(h.data, _scalar(h)) if _scalar(h) in _FLOATS and _scalar(h) != tl.float64
            else h.data
            for h in (a, b)
        )  # fmt: skip
        product = np.matmul(left, right).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, _scalar(d))

    # -------------------------------------------------------------------------------- memory

    def _touch(self, kind: str, pointers: Any, mask: Any) -> None:
        if self.memory is not None:
            width = pointers.get_element_ty().primitive_bitwidth
            self.memory.touch(kind, pointers.data, mask, max(1, width // 8))

    def create_masked_load(self, ptrs: Any, mask: Any, *rest: Any) -> Any:
        self._touch("load", ptrs, mask.data)
        return super().create_masked_load(ptrs, mask, *rest)

    def create_masked_store(self, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        self._touch("store", ptrs, mask.data)
        return super().create_masked_store(ptrs, value, mask, *rest)

    def create_atomic_rmw(self, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        self._touch("atomic", ptr, mask.data)
        return super().create_atomic_rmw(op, ptr, val, mask, *rest)

    def create_atomic_cas(self, ptr: Any, *rest: Any) -> Any:
        self._touch("atomic", ptr, None)
        return super().create_atomic_cas(ptr, *rest)


def _refuse_narrow(what: str, handle: Any) -> None:
    if _scalar(handle) in _NARROW:
        raise TypeError(f"{what} of {_scalar(handle)}: widen to float32 first")


class _Memory:
    """What one launch may touch, and who touched what, by the first byte of each number.

    Args:
        tensors: arguments of the kernel.
        races: whether programs are told from each other.
    """

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]], races: bool) -> None:
        spans = sorted(
            (tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), name)
            for name, tensor in tensors
            if tensor.numel()
        )
        merged: list[list[Any]] = []
        for start, stop, name in spans:
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(stop, merged[-1][1])
                merged[-1][2] += f", {name}"
            else:
                merged.append([start, stop, name])
        self._starts = np.array([span[0] for span in merged], np.uint64)
        self._stops = np.array([span[1] for span in merged], np.uint64)
        self._names = [span[2] for span in merged]
        sizes = [span[1] - span[0] for span in merged] if races else []
        self._writers = [np.full(size, _NOBODY, np.int32) for size in sizes]
        self._readers = [np.full(size, _NOBODY, np.int32) for size in sizes]
        self._atomic = [np.zeros(size, np.bool_) for size in sizes]
        self.program = 0

    def touch(self, kind: str, pointers: Array, mask: Array | None, size: int) -> None:
        """Note an access.

        Raises:
            MemoryViolation: it is outside, or another program's.
        """
        places = pointers.reshape(-1)
        if mask is not None:
            places = places[np.broadcast_to(mask, pointers.shape).reshape(-1).astype(bool)]
        if not places.size:
            return
        places = places.astype(np.uint64)
        span = np.searchsorted(self._starts, places, side="right").astype(np.int64) - 1
        outside = span < 0
        if len(self._stops):
            outside |= places + np.uint64(size) > self._stops[np.maximum(span, 0)]
        if outside.any():
            count = int(outside.sum())
            raise MemoryViolation(f"{kind} out of bounds: {count} numbers, program {self.program}")
        if self._writers:
            for at in np.unique(span):
                offsets = (places[span == at] - self._starts[at]).astype(np.int64)
                self._note(kind, int(at), offsets)

    def _note(self, kind: str, at: int, offsets: Array) -> None:
        me, writers, readers = self.program, self._writers[at], self._readers[at]
        wrote, read, atomic = writers[offsets], readers[offsets], self._atomic[at]
        others = (wrote != _NOBODY) & (wrote != me)
        where = f"race on {self._names[at]}: program {me}"
        if kind == "load":
            if others.any():
                raise MemoryViolation(f"{where} reads what program {wrote[others][0]} stores")
            readers[offsets] = np.where((read == _NOBODY) | (read == me), me, _SEVERAL)
            return
        if kind == "atomic":
            if others.any():
                raise MemoryViolation(f"{where} updates what program {wrote[others][0]} stores")
            atomic[offsets] = True
            return
        read_by_others = (read != _NOBODY) & (read != me)
        if others.any() or read_by_others.any() or atomic[offsets].any():
            raise MemoryViolation(f"{where} stores what another program also touches")
        if len(np.unique(offsets)) != len(offsets):
            raise MemoryViolation(f"{where} stores one number from several lanes")
        writers[offsets] = me


def _extent(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * abs(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


_BUILDER = _HonestBuilder()


@cache
def _install() -> None:
    """Make the interpreter of this process the honest one."""
    interpreter.interpreter_builder = _BUILDER
    interpreter.interpreter_semantic = interpreter.TritonSemantic(_BUILDER)
    stock = interpreter.ReduceOps.apply_impl

    def reduce(self: Any, values: Any) -> Any:
        if self.combine_fn is getattr(tl.standard, "_xor_combine", None):
            found = values[0]
            data = np.bitwise_xor.reduce(found.handle.data, axis=self.axis, keepdims=self.keep_dims)
            return self.to_tensor(data, found.dtype)
        return stock(self, values)

    interpreter.ReduceOps.apply_impl = reduce


@cache
def _rewritten(function: Any) -> Any:
    function.__globals__["interpreter_semantic"] = interpreter.interpreter_semantic
    return interpreter.FunctionRewriter(function).rewrite_ast()


def _call_nested(kernel: Any, *args: Any, **kwargs: Any) -> Any:
    return _rewritten(kernel.fn)(*args, **kwargs)


@contextlib.contextmanager
def _interpreting() -> Iterator[None]:
    """Triton's language means the interpreter; nothing of it is left behind."""
    scope = interpreter._patch_lang(_probe)
    call = JITFunction.__call__
    JITFunction.__call__ = _call_nested
    try:
        yield
    finally:
        JITFunction.__call__ = call
        scope.restore()


def _probe() -> None:
    """Its globals are those whose language is switched."""


_core = tl.core  # the scope looks for modules among the globals of a function


class Emulator:
    """Launches kernels on the host.

    Args:
        races: raise when programs touch what others store.
        order: seed of the order in which programs run; None = ascending.
    """

    emulated = True

    def __init__(self, *, races: bool = False, order: int | None = None) -> None:
        _install()
        self._races, self._order = races, order

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Run a kernel for every place of the grid; options of compilation are ignored.

        Raises:
            MemoryViolation: see the class.
        """
        function = _rewritten(kernel.fn)
        names = kernel.arg_names
        given = {name: value for name, value in meta.items() if name in names}
        bound = inspect.getcallargs(kernel.fn, *args, **given)
        tensors = [(name, v) for name, v in bound.items() if isinstance(v, torch.Tensor)]
        constant = {param.name for param in kernel.params if param.is_constexpr}
        memory = _Memory(tensors, self._races)
        size = (*grid, 1, 1)[:3]
        places = list(itertools.product(*map(range, size)))
        if self._order is not None:
            Random(self._order).shuffle(places)
        with _interpreting(), np.errstate(all="ignore"):
            values = {
                name: value if name in constant else interpreter._implicit_cvt(value)
                for name, value in bound.items()
            }
            _BUILDER.set_grid_dim(*size)
            _BUILDER.memory = memory
            try:
                for x, y, z in places:
                    memory.program = (x * size[1] + y) * size[2] + z
                    _BUILDER.set_grid_idx(x, y, z)
                    function(**values)
            finally:
                _BUILDER.memory = None
