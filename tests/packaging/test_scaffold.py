"""What ``deepinfer plugins new`` renders installs, is discovered and passes its contract."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from deepinfer_core.cli.main import run
from deepinfer_core.components import Slot
from deepinfer_core.errors import ConfigError
from deepinfer_core.scaffold import render

pytestmark = pytest.mark.packaging

SLOTS = tuple(Slot)
LONG = "rows_do_not_depend or any_history or available_for or newest_confidences or poisoned"
"""Laws that take a while to check; the quick run leaves them to the slow one."""


def name_of(slot: Slot) -> str:
    return f"acme-{str(slot).replace('_', '-')}"


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One plugin per slot, in one folder."""
    folder = tmp_path_factory.mktemp("rendered")
    for slot in SLOTS:
        render(name_of(slot), slot, folder)
    return folder


@pytest.fixture(scope="module")
def installed(rendered: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them, built and installed by pip into a folder of their own."""
    target = tmp_path_factory.mktemp("installed")
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--disable-pip-version-check", "--no-index", "--target", str(target),
        *(str(path) for path in sorted(rendered.iterdir())),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}


def run_tests(rendered: Path, installed: Path, *options: str) -> str:
    folders = [str(rendered / f"deepinfer-{name_of(slot)}" / "tests") for slot in SLOTS]
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:asyncio",
        "--import-mode=importlib", "-c", os.devnull, "--rootdir", str(rendered),
        *options, *folders,
    ]  # fmt: skip
    env = environment(installed)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def test_rendered_plugins_pass_their_contracts(rendered: Path, installed: Path) -> None:
    report = run_tests(rendered, installed, "-k", f"not ({LONG})")
    assert " passed" in report


@pytest.mark.slow
def test_rendered_plugins_pass_every_law(rendered: Path, installed: Path) -> None:
    run_tests(rendered, installed)


def test_rendered_plugins_are_listed(installed: Path) -> None:
    code = "from deepinfer_core.cli import main; main(['plugins', 'list'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=environment(installed),
    )
    assert not done.stderr
    for slot in SLOTS:
        assert f"{name_of(slot)} (deepinfer-{name_of(slot)} 0.1.0)" in done.stdout


@pytest.mark.parametrize("slot", SLOTS)
def test_top_modules_are_light(rendered: Path, slot: Slot) -> None:
    """The modules that every start imports name nothing heavy outside functions."""
    source = rendered / f"deepinfer-{name_of(slot)}" / "src"
    (package,) = source.iterdir()
    for file in ("__init__.py", "config.py"):
        for node in ast.parse((package / file).read_text()).body:
            if isinstance(node, ast.ImportFrom):
                assert node.module in {
                    "__future__", "attrs", "deepinfer_core", "deepinfer_core.typed", "typing",
                        f"{package.name}.config",
                }  # fmt: skip


def test_project_file_follows_the_naming_rule(tmp_path: Path) -> None:
    folder = render("my_part", Slot.SCHEDULER, tmp_path)
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert folder.name == project["name"] == "deepinfer-my-part"
    assert project["entry-points"]["deepinfer.plugins"] == {"my-part": "deepinfer_my_part"}
    assert project["dependencies"] == ["deepinfer-core>=0.1,<0.2"]
    assert (folder / "src" / "deepinfer_my_part" / "component.py").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "cannot name a plugin"),
        ("Acme", "cannot name a plugin"),
        ("1st", "cannot name a plugin"),
        ("a--b", "cannot name a plugin"),
        ("a b", "cannot name a plugin"),
        ("../evil", "cannot name a plugin"),
        ("x" * 41, "at most 40"),
        ("lambda", "is reserved"),
        ("builtin", "is reserved"),
        ("deepinfer-core", "is reserved"),
        ("lru", "core has a eviction of its own"),
    ],
)
def test_bad_names_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        render(name, Slot.EVICTION, tmp_path)
    assert not list(tmp_path.iterdir())


def test_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    folder = render("acme", Slot.CACHE, tmp_path)
    (folder / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        render("acme", Slot.CACHE, tmp_path)
    assert (folder / "README.md").read_text() == "mine"


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        render("acme", Slot.CACHE, tmp_path / "file")


def test_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "new", "acme", "--slot", "cache", "--path", str(tmp_path)]) == 0
    assert f"made {tmp_path / 'deepinfer-acme'}" in capfd.readouterr().out
    assert run(["plugins", "new", "Acme", "--slot", "cache", "--path", str(tmp_path)]) == 2
    assert run(["plugins", "new", "acme", "--slot", "cash", "--path", str(tmp_path)]) == 2
