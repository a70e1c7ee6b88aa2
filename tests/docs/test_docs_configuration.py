"""docs/configuration.md names every option with its default."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from deepinfer_core.components import Slot
from deepinfer_core.config import SLOT_FIELDS, EngineConfig, EngineOptions, PluginsConfig
from deepinfer_core.plugins import PluginHost
from deepinfer_core.structure import fields_of, unstructure
from deepinfer_core.toml_text import value_text

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text("utf-8")


def documented(type_: type[Any], prefix: str, text: str) -> dict[str, bool]:
    """Say of each option whether a row of the text has it with its default."""
    found = {}
    for name, item in fields_of(type_).items():
        default: Any = item.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory()
        shown = "unset" if default is None else f"`{value_text(unstructure(default))}`"
        row = f"| `{prefix}{name}` | {shown} | "
        found[name] = row in text and f"{row}|" not in text
    return found


def test_every_option_of_the_core_is_documented() -> None:
    tables = {"plugins.": PluginsConfig, "engine.": EngineOptions}
    missing = [
        f"{prefix}{name}"
        for prefix, type_ in tables.items()
        for name, there in documented(type_, prefix, PAGE).items()
        if not there
    ]
    assert not missing
    for item in attrs.fields(EngineConfig):
        assert f"| `{item.name}` | " in PAGE or f"## `[{item.name}]`" in PAGE, item.name


OWN = [
    (slot, component)
    for slot in SLOT_FIELDS
    for component in PluginHost(discover=False).components(slot)
]


@pytest.mark.parametrize(
    ("slot", "component"), OWN, ids=[f"{slot}/{component.name}" for slot, component in OWN]
)
def test_every_component_of_core_is_documented(slot: Slot, component: Any) -> None:
    (row,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{SLOT_FIELDS[slot]}` | ")]
    assert f"`{component.name}`" in row
    if fields_of(component.config_type):
        _, heading, rest = PAGE.partition(f"### {slot} `{component.name}`\n")
        assert heading
        section = rest.partition("\n### ")[0]
        assert all(documented(component.config_type, "", section).values())
