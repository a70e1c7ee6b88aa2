"""Calls of the device's ops as a file: recorded where they are emulated, replayed on a device.

``python -m deepinfer_ascend.testing.recording record FILE`` writes the calls that engines make;
``... replay FILE [DEVICE]`` makes each of them on the device and in the emulation, and prints how
far the results are apart.
"""

from __future__ import annotations

import base64
import importlib
import json
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from attrs import frozen
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from deepinfer_ascend import sparse
from deepinfer_ascend.testing.flash_mla import NAMESPACE

Call: TypeAlias = dict[str, Any]
"""{"library", "op", "args", "options"}: tensors as ``described``, everything else as it is."""

_FLOATS = {"torch.bfloat16", "torch.float16", "torch.float32"}


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: dict[str, Call]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls = calls

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace in ("npu", NAMESPACE):
            call = {
                "library": func.namespace,
                "op": func.name().partition("::")[2],
                "args": described(args),
                "options": described(kwargs or {}),
            }
            self._calls.setdefault(_shape_of(call), call)
        return func(*args, **(kwargs or {}))


@contextmanager
def recording() -> Iterator[dict[str, Call]]:
    """Collect the calls made within, one of each op and shape."""
    calls: dict[str, Call] = {}
    with _Recorder(calls):
        yield calls


def _shape_of(call: Call) -> str:
    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: bare(item) for name, item in value.items() if name != "data"}
        return [bare(item) for item in value] if isinstance(value, list) else value

    return json.dumps(bare(call), sort_keys=True)


def described(value: Any) -> Any:
    """A value in JSON's types.

    Of floats only shape and dtype are kept; addresses, counts, masks and codes are kept whole.
    """
    if isinstance(value, Tensor):
        found: dict[str, Any] = {
            "tensor": list(value.shape),
            "dtype": str(value.dtype),
            "stride": list(value.stride()),
        }
        if str(value.dtype) not in _FLOATS:
            raw = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            found["data"] = base64.b64encode(zlib.compress(raw)).decode()
        return found
    if isinstance(value, Mapping):
        return {name: described(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return value


def restored(value: Any, device: str, generator: torch.Generator | None = None) -> Any:
    """What ``described`` described, with new random floats; on "meta" without numbers."""
    if isinstance(value, dict) and "tensor" in value:
        return _tensor(value, device, generator)
    if isinstance(value, dict):
        return {name: restored(item, device, generator) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item, device, generator) for item in value]
    return value


def _tensor(value: dict[str, Any], device: str, generator: torch.Generator | None) -> Tensor:
    dtype = getattr(torch, value["dtype"].removeprefix("torch."))
    shape, stride = value["tensor"], value["stride"]
    if device == "meta":
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if "data" in value:
        raw = bytearray(zlib.decompress(base64.b64decode(value["data"])))
        dense = torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        dense = torch.randn(shape, generator=generator).to(dtype)
    out = torch.empty_strided(shape, stride, dtype=dtype)
    return out.copy_(dense).to(device)


def replay(call: Call, device: str, seed: int = 0) -> list[Tensor]:
    """Make a call; its results, and the tensors that it wrote to."""
    generator = torch.Generator().manual_seed(seed)
    args = restored(call["args"], device, generator)
    options = restored(call["options"], device, generator)
    result = _function(call, device)(*args, **options)
    written = args[2:4] if call["op"] == "npu_scatter_pa_kv_cache" else []
    parts = result if isinstance(result, tuple | list) else (result,)
    return [part for part in (*parts, *written) if isinstance(part, Tensor)]


def _function(call: Call, device: str) -> Any:
    """What a call is made with; of flash_mla, on a device, the library itself."""
    if call["library"] == NAMESPACE and device not in ("cpu", "meta"):
        return importlib.import_module("flash_mla").flash_mla_sparse_fwd
    return getattr(getattr(torch.ops, call["library"]), call["op"])


def replayable(calls: Iterable[Call], device: str) -> list[Call]:
    """Calls whose library is here."""
    lacks = device not in ("cpu", "meta") and sparse.why_not() is not None
    return [call for call in calls if call["library"] != NAMESPACE or not lacks]


@frozen(kw_only=True)
class Difference:
    """How far a device is from the emulation in one call.

    Attributes:
        op: which.
        error: largest difference relative to the largest number, inf where a shape differs.
    """

    op: str
    error: float


USED_RESULTS = {
    "npu_rms_norm": (0,),
    "npu_add_rms_norm": (0, 2),
    "npu_moe_gating_top_k_softmax": (0, 1),
    "npu_moe_init_routing_v2": (0, 1, 2),
    "npu_fused_infer_attention_score_v2": (0,),
    "sparse_prefill_fwd": (0,),
}
"""Results that are used and so compared; all of an op that is not listed."""


def differences(calls: Iterable[Call], device: str) -> list[Difference]:
    """Make every call on a device and in the emulation."""
    found = []
    for seed, call in enumerate(replayable(calls, device)):
        ours, theirs = replay(call, "cpu", seed), replay(call, device, seed)
        used = USED_RESULTS.get(call["op"], range(len(ours)))
        errors = [_difference(ours[at], theirs[at].cpu()) for at in used]
        found.append(Difference(op=call["op"], error=max(errors)))
    return found


def _difference(ours: Tensor, theirs: Tensor) -> float:
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if not ours.numel():
        return 0.0
    a, b = ours.double(), theirs.double()
    return float((a - b).abs().max() / a.abs().max().clamp(min=1e-30))


def main(what: str, path: str, device: str = "npu") -> int:
    """Record a file, or replay one and report."""
    from deepinfer_ascend.testing.emulation import install

    if what == "record":
        from deepinfer_ascend.testing.engines import recorded_calls

        with tempfile.TemporaryDirectory() as folder:
            Path(path).write_text(json.dumps(recorded_calls(Path(folder))))
        return 0
    if device == "npu":
        from deepinfer_ascend.runtime import load_torch_npu

        load_torch_npu()
    install()
    calls = json.loads(Path(path).read_text())
    if left := len(calls) - len(replayable(calls, device)):
        sys.stdout.write(f"{left} calls of flash_mla left out: {sparse.why_not()}\n")
    for found in differences(calls, device):
        sys.stdout.write(f"{found.error:9.2e} {found.op}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
