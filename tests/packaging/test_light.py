"""What starts, lists and plans does so without torch: importing it takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

CORE = Path(__file__).parents[2] / "deepinfer_core"
HEAVY = ("torch", "transformers", "gguf", "tokenizers", "safetensors")
LIGHT = (
    "deepinfer_core",
    "deepinfer_core.errors",
    "deepinfer_core.log",
    "deepinfer_core.requests",
    "deepinfer_core.sequence",
    "deepinfer_core.batch",
    "deepinfer_core.capabilities",
    "deepinfer_core.components",
    "deepinfer_core.hookspecs",
    "deepinfer_core.plugins",
    "deepinfer_core.config",
    "deepinfer_core.config_file",
    "deepinfer_core.plan",
    "deepinfer_core.compose",
    "deepinfer_core.lock",
    "deepinfer_core.hub",
    "deepinfer_core.builtin",
    "deepinfer_core.cli",
    *(f"deepinfer_core.interfaces.{path.stem}" for path in CORE.glob("interfaces/[a-z]*.py")),
)


def heavy_modules_after(code: str) -> list[str]:
    """Run code in a fresh interpreter and name the heavy packages it imported."""
    report = f"import json, sys; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    heavy: list[str] = json.loads(done.stdout.splitlines()[-1])
    return heavy


def test_the_probe_sees_torch() -> None:
    assert "torch" in heavy_modules_after("import torch")


@pytest.mark.parametrize("module", LIGHT)
def test_module_imports_without_torch(module: str) -> None:
    assert heavy_modules_after(f"import {module}") == []


COMMANDS = (
    "bench", "chat", "config", "conformance", "generate", "inspect", "models", "plan", "plugins",
    "pull",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["--help"], *([command, "--help"] for command in COMMANDS)],
    ids=str,
)
def test_command_line_helps_without_torch(arguments: list[str]) -> None:
    code = f"""
from deepinfer_core.cli import main
try:
    main({arguments!r})
except SystemExit as stop:
    assert not stop.code, stop.code
"""
    assert heavy_modules_after(code) == []
