"""All distributions of the repository agree on versions, pins, names and dependencies."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
KINDS = ("accel_", "spec_", "cache_", "attn_", "sched_")
# Used where they are installed, and by the extra [testing].
OPTIONAL = {"huggingface_hub", "hypothesis", "matplotlib", "pytest"}
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
each_plugin = pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)


def read(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def stem_of(folder: Path) -> str:
    for kind in KINDS:
        if folder.name.startswith(kind):
            return folder.name.removeprefix(kind)
    return folder.name


def third_party_imports(package: Path) -> dict[str, set[str]]:
    """Return the top-level names a package imports from others, and the files that do."""
    found: dict[str, set[str]] = {}
    for path in package.rglob("*.py"):
        if "templates" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                found.setdefault(name.partition(".")[0], set()).add(path.name)
    ours = {package.name, *sys.stdlib_module_names}
    return {name: files for name, files in found.items() if name not in ours}


def hook_config() -> dict[str, Any]:
    config: dict[str, Any] = read(ROOT)["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    return config


def test_core_is_named_and_started_as_documented() -> None:
    project = read(ROOT)["project"]
    assert project["name"] == "deepinfer-core"
    assert project["scripts"] == {"deepinfer": "deepinfer_core.cli:main"}
    assert project["entry-points"] == {"deepinfer.plugins": {"builtin": "deepinfer_core.builtin"}}


def test_pin_admits_exactly_this_minor_version() -> None:
    major, minor, _ = read(ROOT)["project"]["version"].split(".")
    assert hook_config()["pin"] == f">={major}.{minor},<{major}.{int(minor) + 1}"


def test_every_extra_of_a_plugin_is_a_folder_and_the_reverse() -> None:
    assert hook_config()["plugins"] == {stem_of(folder): folder.name for folder in PLUGINS}


def test_development_installs_core_and_every_plugin_editable() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    editable = [line for line in lines if line.startswith("-e ")]
    assert editable == ["-e .", *(f"-e plugins/{folder.name}" for folder in PLUGINS)]


def test_torch_pin_comes_before_everything_else() -> None:
    lines = (ROOT / "requirements-dev.txt").read_text().splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert requirements[0].startswith("torch==")


def test_core_declares_what_it_imports_and_imports_what_it_declares() -> None:
    lines = read(ROOT)["project"]["dependencies"]
    declared = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in lines}
    imported = third_party_imports(ROOT / "deepinfer_core")
    missing = {name: where for name, where in imported.items() if name not in declared | OPTIONAL}
    assert missing == {}
    assert declared - set(imported) == set()


@each_plugin
def test_plugin_has_the_version_and_python_of_core(folder: Path) -> None:
    core, plugin = read(ROOT)["project"], read(folder)["project"]
    assert plugin["version"] == core["version"]
    assert plugin["requires-python"] == core["requires-python"]


@each_plugin
def test_plugin_follows_the_naming_rule(folder: Path) -> None:
    project, stem = read(folder)["project"], stem_of(folder)
    assert project["name"] == f"deepinfer-{stem}"
    assert project["entry-points"]["deepinfer.plugins"] == {stem: f"deepinfer_{stem}"}
    assert (folder / "src" / f"deepinfer_{stem}" / "__init__.py").is_file()
    assert (folder / "src" / f"deepinfer_{stem}" / "py.typed").is_file()


@each_plugin
def test_plugin_pins_core_and_no_other_plugin(folder: Path) -> None:
    dependencies = read(folder)["project"]["dependencies"]
    ours = [line for line in dependencies if line.startswith("deepinfer")]
    assert ours == [f"deepinfer-core{hook_config()['pin']}"]


@each_plugin
def test_uv_finds_the_plugin_in_the_workspace(folder: Path) -> None:
    workspace = {"workspace": True}
    assert read(folder)["tool"]["uv"]["sources"]["deepinfer-core"] == workspace
    assert read(ROOT)["tool"]["uv"]["sources"][f"deepinfer-{stem_of(folder)}"] == workspace
