"""Whether an Ascend 950 can be used here, asked without touching it from this process.

The questions go from cheap to dear and each has its own answer: is there a device node, is
torch_npu installed, does it load, is there a device, is it a 950, is CANN new enough. torch_npu is
loaded in a process of its own, for a failed import of it leaves torch half changed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from attrs import frozen

from deepinfer_ascend.soc import MIN_CANN, family_of, soc_of

NODE = "/dev/davinci_manager"
"""Device node of the driver."""

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""With 0, ``import torch`` leaves installed backends alone until they are imported by name."""

_WAIT_S = 120
_ELSE = "or run on the CPU with --accelerator cpu"
_WANTED = "Ascend 950"
_CANN = ".".join(map(str, MIN_CANN))

_QUESTIONS = """
import json
import torch, torch_npu
found = {"torch_npu": torch_npu.__version__, "count": torch_npu.npu.device_count()}
if found["count"]:
    from torch_npu.npu.utils import get_cann_version
    found["soc_version"] = torch_npu.npu.get_soc_version()
    found["soc"] = torch_npu.npu.get_device_name(0)
    found["cann"] = get_cann_version("CANN")
print(json.dumps(found))
"""


@frozen(kw_only=True)
class Found:
    """What torch_npu says of the machine.

    Attributes:
        torch_npu: its version.
        count: devices.
        soc_version: torch_npu's number of the chip.
        soc: its name.
        cann: version of CANN.
        error: why torch_npu could not be loaded, "" if it could.
    """

    torch_npu: str = ""
    count: int = 0
    soc_version: int = 0
    soc: str = ""
    cann: str = ""
    error: str = ""


def ask() -> Found:
    """Load torch_npu in a process of its own and ask it."""
    environ = {**os.environ, AUTOLOAD: "0"}  # noqa: TID251 - handed on, not read
    command = [sys.executable, "-c", _QUESTIONS]
    try:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=_WAIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Found(error=f"it did not answer within {_WAIT_S} s")
    if done.returncode < 0:
        return Found(error=f"it ended with signal {-done.returncode}")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return Found(error=lines[-1] if lines else f"exit status {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return Found(**answer)


def why_not(
    *,
    node_exists: Callable[[str], bool] = os.path.exists,
    installed: Callable[[str], Any] = importlib.util.find_spec,
    question: Callable[[], Found] | None = None,
) -> str | None:
    """Why no Ascend 950 can be used here, with the next thing to do, or None.

    Args:
        node_exists: whether a device node is there.
        installed: what is known of a package without importing it, None = nothing.
        question: what torch_npu says; None = ask it, once in the life of this process.
    """
    if not node_exists(NODE):
        return (
            f"no {_WANTED}: {NODE} is missing; install the Ascend driver, or pass the device into "
            "the container"
        )
    if installed("torch_npu") is None:
        return f"{NODE} is there, but torch_npu is not installed: pip install 'torch-npu==2.13.*'"
    return _objection((question or _asked)())


def found_here() -> Found:
    """What torch_npu said when it was asked."""
    return _asked()


@cache
def _asked() -> Found:
    return ask()


def _objection(found: Found) -> str | None:
    if found.error:
        library = re.search(r"(lib\w+\.so)[^:]*: cannot open shared object", found.error)
        if library:
            return (
                f"torch_npu is installed, but CANN's {library[1]} was not found; source set_env.sh "
                f"of CANN {_CANN}, {_ELSE}"
            )
        return f"torch_npu is installed, but cannot be loaded: {found.error}; repair it, {_ELSE}"
    if not found.count:
        return (
            f"torch_npu {found.torch_npu} sees no device; look at `npu-smi info` and at "
            "ASCEND_RT_VISIBLE_DEVICES"
        )
    if soc_of(found.soc_version) is None:
        return (
            f"needs {_WANTED}, found {found.soc} ({family_of(found.soc_version)}), for which no "
            f"limits are known here; use a machine with one, {_ELSE}"
        )
    if version_of(found.cann) < MIN_CANN:
        return f"needs CANN {_CANN} or later, found {found.cann or 'none'}; upgrade CANN, {_ELSE}"
    return None


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version, (0, 0) where there is none."""
    match = re.match(r"\D*(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)
