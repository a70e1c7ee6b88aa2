"""A stranger's plugin: a distribution outside the tree, installed by pip into a fresh venv."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from deepinfer_core.components import Slot
from deepinfer_core.compose import compose
from deepinfer_core.config import EngineConfig, PluginsConfig
from deepinfer_core.plugins import PluginHost

pytestmark = pytest.mark.packaging

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "toy-scheduler"
version = "2.3"
dependencies = ["deepinfer-core>=0.1"]
[project.entry-points."deepinfer.plugins"]
toy = "toy_scheduler"
"""

MODULE = '''
"""A scheduler that serves whoever came last."""
from attrs import field, frozen, validators
from deepinfer_core import Component, hookimpl

DEEPINFER_API = 1

@frozen(kw_only=True)
class ToyConfig:
    depth: int = field(default=3, validator=validators.ge(1))

class Toy:
    def __init__(self, config, context):
        self.depth = config.depth
    def schedule(self, round):
        for sequence in reversed([*round.running, *round.waiting]):
            round.grant(sequence, sequence.remaining)

@hookimpl
def deepinfer_schedulers():
    return (
        Component(name="toy", config_type=ToyConfig, build=Toy, auto=False, summary="last first"),
    )
'''


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "toy_scheduler").mkdir()
    (folder / "toy_scheduler" / "__init__.py").write_text(MODULE)
    return folder


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, project: Path) -> Path:
    """The interpreter of a fresh environment with the toy installed into it.

    Packages already installed here are seen through a path file, so that nothing is fetched.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    site = Path(
        subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()
    )  # fmt: skip
    # ``site.addsitedir`` also reads the path files there: that is where editable installs are.
    here = sysconfig.get_path("purelib")
    (site / "outer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    command = [
        str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        "--no-index", "--disable-pip-version-check", str(project),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=clean())
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site / "toy_scheduler").exists()
    return python


def clean() -> dict[str, str]:
    hidden = {"PYTHONPATH", "DEEPINFER_ACCELERATOR", "VIRTUAL_ENV"}
    return {key: value for key, value in os.environ.items() if key not in hidden}


def deepinfer(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from deepinfer_core.cli import main; main()"
    command = [str(python), "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=clean(), cwd=python.parent
    )


def test_it_is_discovered_and_listed(python: Path) -> None:
    done = deepinfer(python, "plugins", "list", "--json")
    assert done.returncode == 0, done.stderr
    content = json.loads(done.stdout)
    (toy,) = [item for item in content["plugins"] if item["name"] == "toy"]
    assert (toy["distribution"], toy["version"]) == ("toy-scheduler", "2.3")
    assert toy["offers"] == [["scheduler", "toy"]]
    assert not content["broken"]


def test_it_is_used_by_name_with_its_options(python: Path) -> None:
    common = ("--accelerator", "cpu", "--model", "no-such-org/no-such-model", "--json")
    sets = ("--set", "scheduler.use=toy", "--set", "scheduler.depth=7")
    done = deepinfer(python, "plan", *common, *sets)
    assert done.returncode == 0, done.stderr
    (part,) = json.loads(done.stdout)["slots"]["scheduler"]
    assert part["component"] == "toy"
    assert part["plugin"] == "toy-scheduler 2.3"
    assert part["config"] == {"depth": 7}


def test_it_changes_nothing_unless_it_is_named(python: Path) -> None:
    common = ("--accelerator", "cpu", "--model", "no-such-org/no-such-model", "--json")
    content = json.loads(deepinfer(python, "plan", *common).stdout)
    assert content["slots"]["scheduler"][0]["component"] == "fcfs"
    assert "is used only when named" in [
        item["reason"] for item in content["refused"] if item["name"] == "toy"
    ]


def test_bad_options_name_their_path(python: Path) -> None:
    done = deepinfer(python, "config", "show", "--set", "scheduler.use=toy", "--set",
                     "scheduler.depth=0")  # fmt: skip
    assert done.returncode == 2
    assert "'depth' must be >= 1: 0 @ scheduler.depth" in done.stderr


def test_it_is_not_there_outside_that_environment() -> None:
    code = "import toy_scheduler"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode


def test_the_same_plugin_as_a_module_of_the_configuration(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(project)
    config = EngineConfig(
        accelerator="cpu", scheduler="toy", plugins=PluginsConfig(load=("toy_scheduler",))
    )
    plan = compose(PluginHost(config=config.plugins), config)
    part = plan.part(Slot.SCHEDULER)
    assert part is not None
    assert (part.name, part.component.plugin) == ("toy", "toy_scheduler")


def test_the_same_plugin_passed_from_python(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(project)
    import toy_scheduler  # type: ignore[import-not-found]

    config = EngineConfig(accelerator="cpu", scheduler=toy_scheduler.ToyConfig(depth=5))
    plan = compose(PluginHost([toy_scheduler], discover=False), config)
    part = plan.part(Slot.SCHEDULER)
    assert part is not None
    assert part.build(None).depth == 5
