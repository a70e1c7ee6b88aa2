"""Kernel set "sm100": ordered providers of core's ops, libraries first, own kernels second."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepinfer_core.components import Priority, Verified
from deepinfer_core.interfaces.kernels import KernelsContext, OpFacts, OpProvider
from deepinfer_sm100 import ops
from deepinfer_sm100.launching import Launcher, launcher_for

DTYPES = ("float32", "bfloat16", "float16")


class Sm100Kernels:
    """The set.

    Args:
        device_type: "cuda", or "cpu" for the emulation.
        launch: starts kernels; None = as the device type asks for.
    """

    def __init__(self, device_type: str, launch: Launcher | None = None) -> None:
        self._device_type = device_type
        self._launch = launch or launcher_for(device_type)

    def objection(self, facts: OpFacts) -> str | None:
        """Why own kernels cannot serve, or None."""
        if facts.device_type != self._device_type:
            return f"runs on {self._device_type}, not {facts.device_type}"
        if facts.dtype not in DTYPES:
            return f"{', '.join(DTYPES)} only, not {facts.dtype}"
        if facts.weight_format != "dense":
            return f"dense weights only, not {facts.weight_format}"
        return None

    def providers(self) -> Sequence[OpProvider]:
        """Every provider, best first."""
        launch = self._launch
        makers: dict[str, Callable[[OpFacts], Any]] = {
            "linear": lambda facts: ops.TiledLinear(launch),
            "rms_norm": lambda facts: ops.RmsNorm(launch),
            "add_rms_norm": lambda facts: ops.AddRmsNorm(launch),
            "rope": lambda facts: ops.Rope(launch),
            "silu_mul": lambda facts: ops.GateMul(launch),
            "gelu_mul": lambda facts: ops.GateMul(launch, gelu=True),
            "moe_gate": lambda facts: ops.MoeGate(launch),
            "moe_experts": lambda facts: ops.GroupedExperts(launch),
            "draw": lambda facts: ops.Draw(launch),
        }
        return [
            OpProvider(
                op=op,
                name="triton",
                build=make,
                why_not=self.objection,
                # The emulation was asked for by name, beside kernels that are made for the host.
                priority=Priority.OVERRIDE if launch.emulated else Priority.SPECIALIZED,
                verified=Verified.EMULATED,
                batch_invariant=True,
            )
            for op, make in makers.items()
        ]


def build(config: Any, context: KernelsContext) -> Sm100Kernels:
    """Make the set."""
    return Sm100Kernels(context.device_type)
