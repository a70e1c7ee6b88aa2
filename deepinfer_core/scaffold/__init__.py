"""The making of plugins: ``deepinfer plugins new`` renders ``templates`` into a package.

What comes out installs, is discovered and passes the contract of its slot without an edit.
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from string import Template

from deepinfer_core import __version__
from deepinfer_core.components import Slot
from deepinfer_core.errors import ConfigError, reason
from deepinfer_core.plugins import PluginHost

_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_RESERVED = frozenset({"core", "builtin", "sm100", "ascend", "dspark", "prefix", "recipe", "all"})
_LONGEST = 40

_INDENT = "\n            "
_FIELDS: Mapping[Slot, str] = {
    Slot.ATTENTION: _INDENT.join(
        [
            "offers={",
            "    Feature.PAGED_KV,",
            "    Feature.MIXED_BATCH,",
            "    Feature.WINDOW,",
            "    Feature.SINKS,",
            "    Feature.BATCH_INVARIANT,",
            "},",
        ]
    ),
    Slot.ACCELERATOR: _INDENT.join(
        ["offers={Feature.BATCH_INVARIANT},", 'tags={"cpu"},  # torch device type']
    ),
    Slot.CACHE: "offers={Feature.PAGED_KV, Feature.ROLLBACK, Feature.FORK},",
    Slot.MODEL: _INDENT.join(
        ["offers={Feature.TAPS},", 'tags={"${cls}ForCausalLM"},  # architectures']
    ),
}
"""What a component of a slot says of itself beside its name, as source text."""

_IMPORTS: Mapping[Slot, str] = dict.fromkeys(_FIELDS, "Component, Feature, hookimpl")


def render(name: str, slot: Slot, folder: Path) -> Path:
    """Make a plugin.

    Args:
        name: of the plugin and of its component: small letters, digits, ``-`` and ``_``.
        slot: what the component is.
        folder: where the plugin's own folder is made.

    Returns:
        The plugin's folder, ``deepinfer-NAME``.

    Raises:
        ConfigError: the name cannot be used, or the folder exists already.
    """
    stem = check_name(name, slot)
    target = folder / f"deepinfer-{stem}"
    if target.exists():
        raise ConfigError(f"{target} exists already; nothing was written, choose another name")
    try:
        for path, text in _files(stem, slot).items():
            place = target / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {reason(error)}") from error
    return target


def check_name(name: str, slot: Slot) -> str:
    """Return the stem of a plugin's names.

    Raises:
        ConfigError: it is no name, or somebody's already.
    """
    stem = name.removeprefix("deepinfer-").removeprefix("deepinfer_").replace("_", "-")
    if not _NAME.fullmatch(stem) or len(stem) > _LONGEST:
        raise ConfigError(
            f"{name!r} cannot name a plugin: begin with a small letter, go on with small letters, "
            f"digits and single '-' or '_', at most {_LONGEST} in all"
        )
    taken = {component.name for component in PluginHost(discover=False).components(slot)}
    if stem in _RESERVED or keyword.iskeyword(stem):
        raise ConfigError(f"the plugin name {stem!r} is reserved; choose another")
    if stem in taken:
        raise ConfigError(f"core has a {slot} of its own called {stem!r}; choose another name")
    return stem


def _files(stem: str, slot: Slot) -> dict[str, str]:
    module = f"deepinfer_{stem.replace('-', '_')}"
    cls = "".join(part.capitalize() for part in stem.split("-"))
    values = {
        "stem": stem,
        "dist": f"deepinfer-{stem}",
        "module": module,
        "cls": cls,
        "slot": str(slot),
        "SLOT": slot.name,
        "hook": slot.hook,
        "contract": "".join(part.capitalize() for part in str(slot).split("_")) + "Contract",
        "imports": _IMPORTS.get(slot, "Component, hookimpl"),
        "pin": _pin(__version__),
    }
    values["fields"] = (
        Template(_FIELDS.get(slot, "")).substitute(values) or "# needs={...}, offers={...},"
    )
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"src/{module}/__init__.py": "init.py",
        f"src/{module}/config.py": "config.py",
        f"src/{module}/component.py": f"slots/{slot}.py",
        f"src/{module}/py.typed": "",
        "tests/test_contract.py": "test_contract.py",
    }
    return {
        path: Template(_template(name)).substitute(values) if name else ""
        for path, name in templates.items()
    }


def _template(name: str) -> str:
    root = resources.files("deepinfer_core.scaffold") / "templates"
    return (root / f"{name}.tmpl").read_text(encoding="utf-8")


def _pin(version: str) -> str:
    """Return the range of core versions that keep their word: up to the next minor one."""
    major, minor = version.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"
