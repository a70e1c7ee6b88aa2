"""Wheels and source distributions hold what they should, and a wheel works on its own."""

from __future__ import annotations

import email
import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.packaging


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a program and return what it printed; fail with its errors."""
    done = subprocess.run(
        command, cwd=cwd, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def build(target: str, source: Path, into: Path, **variables: str) -> Path:
    """Build one distribution with the build backend alone: no isolation, no index."""
    run(
        sys.executable, "-m", "hatchling", "build", "-t", target, "-d", into, cwd=source,
        **variables,
    )  # fmt: skip
    (built,) = into.iterdir()
    return built


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_string(archive.read(name).decode())


def sources() -> set[str]:
    """Every file below deepinfer_core that git does not ignore."""
    listed = run(
        "git", "ls-files", "-co", "--exclude-standard", "-z", "--", "deepinfer_core", cwd=ROOT
    )
    return {name for name in listed.split("\0") if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"), DEEPINFER_RELEASE="1")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"), DEEPINFER_RELEASE="1")


def test_wheel_is_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == sources()
    assert "deepinfer_core/py.typed" in names


def test_wheel_holds_the_templates_of_new_plugins(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        templates = [n for n in archive.namelist() if "/scaffold/templates/" in n]
    assert any("pyproject.toml" in name for name in templates)


def test_wheel_declares_command_plugin_and_licence(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = [n for n in names if n.endswith("/entry_points.txt")]
        text = archive.read(entry_points).decode()
    assert "deepinfer = deepinfer_core.cli:main" in text
    assert "builtin = deepinfer_core.builtin" in text
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_released_wheel_names_no_folder(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "deepinfer-core"
    assert not [line for line in metadata.get_all("Requires-Dist", []) if "file:" in line]
    assert {"all", "testing"} <= set(metadata.get_all("Provides-Extra", []))


def test_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    rebuilt = build("wheel", source, tmp_path / "rebuilt")
    with zipfile.ZipFile(rebuilt) as ours, zipfile.ZipFile(wheel) as theirs:
        assert sorted(ours.namelist()) == sorted(theirs.namelist())
    assert metadata_of(rebuilt).items() == metadata_of(wheel).items()


def test_installed_wheel_runs_outside_the_checkout(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env")
    run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel, cwd=tmp_path)
    where = run(python, "-c", "import deepinfer_core; print(deepinfer_core.__file__)", cwd=tmp_path)
    assert str(tmp_path / "env") in where
    assert "generate" in run(python.with_name("deepinfer"), "--help", cwd=tmp_path)


def make_environment(folder: Path) -> Path:
    """Make a virtual environment that sees the packages of this one, and return its python.

    What is installed into it comes first on its path, so that it can have its own deepinfer-core.
    """
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    (site,) = folder.glob("lib/python*/site-packages")
    theirs = Path(next(path for path in sys.path if path.endswith("site-packages")))
    (site / "zz_third_party.pth").write_text(f"{theirs}\n")
    return folder / "bin" / "python"
