"""The reading of configuration files and of ``--set`` overrides.

A file is read in two phases, since options of a component are known only once its plugin is: this
module reads the core's own tables and each slot's ``use``; ``resolve`` reads the options.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from attrs import frozen

from deepinfer_core import values
from deepinfer_core.config import AUTO, EngineConfig
from deepinfer_core.errors import ConfigError, reason


@frozen(kw_only=True)
class Draft:
    """What the first phase read of a file; options are still raw.

    Attributes:
        source: the file, as messages name it.
        config: what could be read; defaults stand in for what could not.
        problems: everything wrong so far.
    """

    source: str
    config: EngineConfig
    problems: tuple[str, ...] = ()

    def fail(self, problems: Iterable[str] = ()) -> None:
        """Raise ConfigError if anything is wrong here or in ``problems``."""
        everything = (*self.problems, *problems)
        if everything:
            raise ConfigError(f"invalid configuration {self.source}", everything)


def read_config(path: str | Path | None, sets: Iterable[str] = ()) -> Draft:
    """Read a file's core tables and apply ``--set`` overrides.

    Args:
        path: a TOML file; None starts from the defaults.
        sets: overrides as ``parse_set`` reads them.

    Raises:
        ConfigError: the file cannot be read, or is not TOML (with its line), or a bad override.
    """
    if not isinstance(path, str | PathLike | None):
        raise values.refuse("path", path, "the path of a file, or None", ConfigError)
    overrides = values.items("sets", sets, "a sequence of 'key=value' texts", ConfigError)
    source = "(command line)" if path is None else str(path)
    table = {} if path is None else _read_toml(Path(path))
    parsed = [parse_set(text) for text in overrides]
    # A component named last owns the table, so names go before options.
    for keys, value in sorted(parsed, key=lambda item: item[0][-1] != "use"):
        _override(table, keys, value)
    return draft(table, source)


def draft(table: Mapping[str, Any], source: str) -> Draft:
    """Structure a parsed file as far as the core knows it; never raises for its content."""
    from deepinfer_core.structure import structure_fields

    good, problems = structure_fields(table, EngineConfig)
    return Draft(
        source=source, config=EngineConfig(**good), problems=tuple(str(item) for item in problems)
    )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read configuration {path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path} is not UTF-8 text: {error}") from error
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration {path}:{_placed(str(error), text)}") from error


def _placed(message: str, text: str) -> str:
    """Move the place from the end of tomllib's message to its front, as compilers print it."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message)
    if found is None:
        return f" {message}"
    last = text.rstrip("\n").split("\n")
    line, column = found[2] or len(last), found[3] or len(last[-1]) + 1
    return f"{line}:{column}: {found[1]}"


_KEY = re.compile(r"[A-Za-z0-9_-]+")
_WORD = re.compile(r"[A-Za-z_./~][\w./:~+@-]*")


def parse_set(text: str) -> tuple[tuple[str, ...], Any]:
    """Read ``a.b=value``: the value as TOML; a bare word or path that is no TOML is a string.

    Raises:
        ConfigError: there is no ``=``, the key is none, or the value is neither.

    >>> parse_set("cache.page_size=32")
    (('cache', 'page_size'), 32)
    >>> parse_set("cache.use=prefix")
    (('cache', 'use'), 'prefix')
    """
    values.instance("--set", text, str, "text", ConfigError)
    key, equals, value = text.partition("=")
    keys = tuple(part.strip() for part in key.split("."))
    if not equals or not all(_KEY.fullmatch(part) for part in keys):
        raise ConfigError(f"--set {text!r}: expected key=value, such as engine.page_size=32")
    value = value.strip()
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError as error:
        if _WORD.fullmatch(value):
            return keys, value
        raise ConfigError(
            f"--set {text!r}: {value!r} is no TOML value; quote strings: '{key}=\"{value}\"'"
        ) from error
    if set(parsed) != {"value"}:
        raise ConfigError(f"--set {text!r}: one key and one value at a time")
    return keys, parsed["value"]


def _override(table: dict[str, Any], keys: tuple[str, ...], value: Any) -> None:
    node = table
    for depth, key in enumerate(keys[:-1]):
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(
                f"--set {'.'.join(keys)}: {'.'.join(keys[: depth + 1])} is {node!r}, not a table"
            )
    named = node.get("use", AUTO)
    if keys[1:] == ("use",) and isinstance(value, str) and named not in (value, AUTO):
        node.clear()  # the file's options belong to the component that it named
    node[keys[-1]] = value
