"""The public names of ``deepinfer_core``: sorted, complete, loaded on first use."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import deepinfer_core

ROOT = Path(deepinfer_core.__file__).resolve().parent


def test_names_are_sorted() -> None:
    assert deepinfer_core.__all__ == sorted(deepinfer_core.__all__)


@pytest.mark.parametrize("name", deepinfer_core.__all__)
def test_every_name_can_be_imported(name: str) -> None:
    assert getattr(deepinfer_core, name) is not None
    assert name in dir(deepinfer_core)


def test_names_for_type_checkers_are_the_same() -> None:
    tree = ast.parse((ROOT / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    declared = {
        alias.asname or alias.name
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert declared | {"__version__"} == set(deepinfer_core.__all__)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Enigne'"):
        _ = deepinfer_core.Enigne


def test_importing_loads_nothing_else() -> None:
    code = """
import sys
import deepinfer_core
print(sorted(name for name in sys.modules if name.startswith("deepinfer_core")))
deepinfer_core.Component
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['deepinfer_core']\n"


def test_version_is_that_of_the_distribution() -> None:
    project = ROOT.parent / "pyproject.toml"
    if not project.exists():
        pytest.skip("not a source tree")
    version = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
    assert deepinfer_core.__version__ == version
