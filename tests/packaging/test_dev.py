"""``./dev`` runs every check, whatever the others say, and fails if one fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = """#!/bin/sh
echo "${0##*/} $*" >>calls
case "$*" in
    *pytest*) echo "1 passed in 0.01s" ;;
    *'version("torch")'*) echo "2.13.0" ;;
esac
! grep -qxF -- "${0##*/} $*" failing 2>/dev/null
"""
CHECKS = (
    "ruff check --quiet .",
    "ruff format --quiet --diff .",
    "mypy ",
    "lint-imports --no-logo",
    "python -m pip check",
    "python -m pytest -q --hypothesis-profile=ci",
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder in which every tool that ./dev calls only notes that it was called."""
    for name in ("dev", "requirements-dev.txt", "pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    bin_folder = tmp_path / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    for name in ("python", "ruff", "mypy", "lint-imports", "deepinfer"):
        (bin_folder / name).write_text(TOOL)
        (bin_folder / name).chmod(0o755)
    return tmp_path


def dev(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", checkout / "dev", *arguments],
        cwd=checkout.parent,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def calls(checkout: Path) -> list[str]:
    return (checkout / "calls").read_text().splitlines()


def installs(checkout: Path) -> list[str]:
    return [line for line in calls(checkout) if " pip install " in line]


def test_all_checks_run_and_the_tests_speak_last(checkout: Path) -> None:
    done = dev(checkout, "test")
    assert done.returncode == 0, done.stderr
    assert [line for line in calls(checkout) if line in CHECKS] == list(CHECKS)
    assert done.stdout.splitlines()[-1] == "1 passed in 0.01s"


@pytest.mark.parametrize("failing", CHECKS)
def test_one_failure_fails_the_run_but_hides_nothing(checkout: Path, failing: str) -> None:
    (checkout / "failing").write_text(f"{failing}\n")
    done = dev(checkout, "test")
    assert done.returncode != 0
    assert set(CHECKS) <= set(calls(checkout))
    assert done.stderr.splitlines()[-1].startswith("dev: failed: ")


def test_other_arguments_go_to_pytest(checkout: Path) -> None:
    dev(checkout, "test", "--slow", "-k", "some name")
    assert "python -m pytest -q --hypothesis-profile=ci --slow -k some name" in calls(checkout)


def test_a_torch_that_is_there_stays(checkout: Path) -> None:
    dev(checkout, "setup")
    assert installs(checkout)
    assert not [line for line in installs(checkout) if "torch" in line]
    assert "torch" not in (checkout / ".venv" / "requirements.txt").read_text()
    assert (checkout / ".venv" / "constraints.txt").read_text() == "torch==2.13.0\n"


def test_nothing_is_installed_twice(checkout: Path) -> None:
    dev(checkout, "setup")
    first = installs(checkout)
    dev(checkout, "test")
    assert installs(checkout) == first


def test_a_changed_requirement_is_installed(checkout: Path) -> None:
    dev(checkout, "setup")
    first = len(installs(checkout))
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    dev(checkout, "setup")
    assert len(installs(checkout)) == 2 * first


def test_a_failed_installation_stops_and_is_tried_again(checkout: Path) -> None:
    dev(checkout, "setup")
    (checkout / "failing").write_text("\n".join(installs(checkout)))
    (checkout / ".venv" / "installed-everything").unlink()
    done = dev(checkout, "test")
    assert done.returncode != 0
    assert not set(calls(checkout)) & set(CHECKS)
    assert not (checkout / ".venv" / "installed-everything").exists()


def test_demo_installs_no_tools_and_asks_the_question(checkout: Path) -> None:
    done = dev(checkout, "demo", "Who was Ada Lovelace?")
    assert done.returncode == 0, done.stderr
    assert calls(checkout)[-1].endswith("--chat --max-tokens 128 Who was Ada Lovelace?")
    assert (checkout / ".venv" / "requirements.txt").read_text().startswith("-e .\n")
    assert "pytest" not in (checkout / ".venv" / "requirements.txt").read_text()


def test_unknown_command_is_an_error(checkout: Path) -> None:
    done = dev(checkout, "tset")
    assert done.returncode != 0
    assert "unknown command: tset" in done.stderr
