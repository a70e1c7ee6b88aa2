"""Whether a device can be used: the order of questions, and a remedy in every refusal."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from deepinfer_ascend import probe
from deepinfer_ascend.probe import NODE, Found, version_of, why_not
from deepinfer_core import Slot, Verified
from deepinfer_core.cli.plan import op_rows
from deepinfer_core.compose import compose
from deepinfer_core.config import EngineConfig, EngineOptions, apply_environ
from deepinfer_core.errors import CompositionError
from deepinfer_core.plugins import PluginHost

GOOD = Found(
    torch_npu="2.13.0", count=8, soc_version=260, soc="Ascend950PR_9589", cann="9.2.RC1.alpha001"
)


def never(*args: Any) -> Any:
    raise AssertionError("asked although the answer was known")


def refusal(found: Found) -> str | None:
    return why_not(
        node_exists=lambda node: node == NODE, installed=lambda name: name, question=lambda: found
    )


def test_without_a_node_nothing_else_is_asked() -> None:
    reason = why_not(node_exists=lambda node: False, installed=never, question=never)
    assert reason is not None
    assert NODE in reason
    assert "install the Ascend driver" in reason


def test_without_torch_npu_no_process_is_started() -> None:
    reason = why_not(node_exists=lambda node: True, installed=lambda name: None, question=never)
    assert "pip install 'torch-npu" in str(reason)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            "ImportError: libhccl.so: cannot open shared object file: No such file or directory",
            ("libhccl.so", "set_env.sh", "9.2", "--accelerator cpu"),
        ),
        ("RuntimeError: Two accelerators cannot be used", ("Two accelerators", "repair it")),
    ],
)
def test_a_torch_npu_that_does_not_load_is_told_apart(error: str, words: tuple[str, ...]) -> None:
    reason = str(refusal(Found(error=error)))
    assert [word for word in words if word not in reason] == []


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Found(torch_npu="2.13.0"), "npu-smi info"),
        (Found(torch_npu="2.13.0", count=1, soc_version=252, soc="Ascend910_93"), "Atlas A3"),
        (Found(torch_npu="2.13.0", count=1, soc_version=999, soc="Future"), "unknown family 999"),
        (
            Found(torch_npu="2.13.0", count=1, soc_version=260, soc="X", cann="9.1.0"),
            "upgrade CANN",
        ),
        (Found(torch_npu="2.13.0", count=1, soc_version=260, soc="X"), "found none"),
    ],
)
def test_every_refusal_names_what_to_do(found: Found, words: str) -> None:
    assert words in str(refusal(found))


def test_a_950_with_its_cann_is_taken() -> None:
    assert refusal(GOOD) is None


@pytest.mark.parametrize(
    ("text", "version"), [("9.2.RC1", (9, 2)), ("CANN 10.0", (10, 0)), ("", (0, 0)), ("x", (0, 0))]
)
def test_versions(text: str, version: tuple[int, int]) -> None:
    assert version_of(text) == version


def test_torch_npu_is_asked_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for questions, found in (
        ('print(\'{"torch_npu": "2", "count": 0}\')', Found(torch_npu="2")),
        ("raise ImportError('libhccl.so: no')", Found(error="ImportError: libhccl.so: no")),
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            Found(error="it ended with signal 11"),
        ),
    ):
        monkeypatch.setattr(probe, "_QUESTIONS", questions)
        assert probe.ask() == found


def test_a_node_without_a_usable_device_stops_auto_and_names_the_reason() -> None:
    with pytest.raises(CompositionError, match="ascend") as raised:
        compose(PluginHost(), EngineConfig(model="m"), node_exists=lambda node: node == NODE)
    assert "--accelerator cpu" in str(raised.value)


def test_the_variable_asks_for_it_and_plans_carry_the_label(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = PluginHost([], discover=True)
    config = apply_environ(
        EngineConfig(model="m", engine=EngineOptions(page_size=128)),
        {"DEEPINFER_ACCELERATOR": "ascend"},
    )
    with pytest.raises(CompositionError, match="davinci_manager"):
        compose(host, config, node_exists=lambda node: False)
    monkeypatch.setattr(probe, "why_not", lambda: None)
    plan = compose(host, config, node_exists=lambda node: node == NODE)
    for slot in (Slot.ACCELERATOR, Slot.KERNELS, Slot.ATTENTION):
        part = plan.part(slot)
        assert part is not None
        assert part.name == "ascend"
        assert part.component.verified is Verified.WIRED
    assert plan.explain().count(f"[{Verified.WIRED}]") == 3
    rows = {row["op"]: row for row in op_rows(plan)}
    assert rows["rms_norm"]["provider"] == "ascend/npu_rms_norm"
    assert {row["verified"] for row in rows.values()} == {str(Verified.WIRED)}


BROKEN_BACKEND = """
import importlib.metadata, os, sys
import deepinfer_core
real = importlib.metadata.entry_points
class Broken:
    name = "torch_npu"
    value = "torch_npu:_autoload"
    def load(self):
        raise ImportError("libhccl.so: cannot open shared object file")
def entry_points(**wanted):
    return [Broken()] if wanted.get("group") == "torch.backends" else real(**wanted)
importlib.metadata.entry_points = entry_points
{action}
assert "TORCH_DEVICE_BACKEND_AUTOLOAD" not in os.environ or {left}
"""


CLI = """
from deepinfer_core.cli import main
try:
    main(["plan", "--json"])
except SystemExit:
    import torch
"""


@pytest.mark.parametrize(
    ("action", "left", "works"),
    [
        ("import torch", False, False),
        ("deepinfer_core.Engine", False, True),
        (CLI, True, True),
    ],
)
def test_an_installed_backend_without_its_driver_breaks_nothing(
    action: str, left: bool, works: bool
) -> None:
    code = BROKEN_BACKEND.format(action=action, left=left)
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == works, done.stderr
