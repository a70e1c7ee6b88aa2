"""Extras point into a checkout, and at an index everywhere else."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFIG = {
    "pin": ">=0.1,<0.2",
    "plugins": {"prefix": "cache_prefix", "sm100": "accel_sm100"},
    "extras": {"testing": ["pytest>=8"]},
}


def extras_of(root: Path, config: dict[str, Any]) -> dict[str, list[str]]:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    metadata: dict[str, Any] = {}
    module.Extras(str(root), config).update(metadata)
    extras: dict[str, list[str]] = metadata["optional-dependencies"]
    return extras


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("DEEPINFER_RELEASE", raising=False)
    (tmp_path / "plugins").mkdir()
    return tmp_path


def test_checkout_names_its_own_folders(checkout: Path) -> None:
    uri = (checkout / "plugins" / "accel_sm100").as_uri()
    assert extras_of(checkout, CONFIG)["sm100"] == [f"deepinfer-sm100 @ {uri}"]


def test_all_is_every_plugin_but_no_other_extra(checkout: Path) -> None:
    extras = extras_of(checkout, CONFIG)
    assert extras["all"] == extras["prefix"] + extras["sm100"]
    assert extras["testing"] == ["pytest>=8"]


def test_release_names_no_folder(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPINFER_RELEASE", "1")
    assert extras_of(checkout, CONFIG)["prefix"] == ["deepinfer-prefix>=0.1,<0.2"]


def test_source_distribution_names_no_folder(checkout: Path) -> None:
    (checkout / "plugins").rmdir()
    assert extras_of(checkout, CONFIG)["all"] == [
        "deepinfer-prefix>=0.1,<0.2",
        "deepinfer-sm100>=0.1,<0.2",
    ]


def test_no_plugins_is_an_empty_all(checkout: Path) -> None:
    assert extras_of(checkout, {"pin": ">=0.1"}) == {"all": []}
