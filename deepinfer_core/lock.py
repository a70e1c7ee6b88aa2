"""What was composed, as a file to keep and as a digest that the processes of one engine compare."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from deepinfer_core.components import Slot
from deepinfer_core.errors import LockMismatch, reason
from deepinfer_core.hookspecs import API
from deepinfer_core.plan import Plan
from deepinfer_core.plugins import PluginHost

FORMAT = 1


@frozen(kw_only=True)
class LockedPlugin:
    """A plugin as it was when the lock was made."""

    name: str
    distribution: str = ""
    version: str = ""


@frozen(kw_only=True)
class Lock:
    """A composition to hold on to.

    Attributes:
        format: of the file.
        api: number of the hooks.
        config_hash: digest of all options.
        composition_hash: digest of everything that processes must agree on.
        plugins: every plugin that took part, by name; modules and objects have no version.
        slots: slot -> "component (plugin)" of everything that fills it.
    """

    format: int = FORMAT
    api: int = API
    config_hash: str
    composition_hash: str
    plugins: tuple[LockedPlugin, ...] = ()
    slots: Mapping[str, tuple[str, ...]] = field(factory=dict)

    def differences(self, other: Lock) -> list[str]:
        """Return one line for everything that is not as in this lock."""
        lines = []
        if self.api != other.api:
            lines.append(f"hook API: locked {self.api}, here {other.api}")
        mine = {item.name: _label(item) for item in self.plugins}
        yours = {item.name: _label(item) for item in other.plugins}
        lines += _compare("plugin", mine, yours)
        lines += _compare("slot", _joined(self.slots), _joined(other.slots))
        if self.config_hash != other.config_hash:
            lines.append(f"options: locked {self.config_hash}, here {other.config_hash}")
        if not lines and self.composition_hash != other.composition_hash:
            lines.append("model: not the one that the lock was made with")
        return lines

    def verify(self, other: Lock) -> None:
        """Refuse another composition.

        Raises:
            LockMismatch: listing every difference.
        """
        differences = self.differences(other)
        if differences:
            raise LockMismatch(
                "the composition is not the locked one; install what the lock names, or lock anew",
                differences,
            )


def _label(plugin: LockedPlugin) -> str:
    return f"{plugin.distribution} {plugin.version}".strip() or "local"


def _joined(slots: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    return {slot: ", ".join(parts) for slot, parts in slots.items()}


def _compare(what: str, locked: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    return [
        f"{what} {name}: locked {locked.get(name, 'absent')}, here {here.get(name, 'absent')}"
        for name in sorted({*locked, *here})
        if locked.get(name) != here.get(name)
    ]


def lock_of(plan: Plan, host: PluginHost) -> Lock:
    """Return the lock of a plan.

    Commands are left out: they play no part in an engine.
    """
    slots = {
        str(slot): tuple(f"{part.name} ({part.component.plugin})" for part in plan.parts_of(slot))
        for slot in Slot
        if slot is not Slot.COMMAND
    }
    return Lock(
        config_hash=plan.config_hash(),
        composition_hash=plan.composition_hash,
        plugins=tuple(
            LockedPlugin(name=item.name, distribution=item.distribution, version=item.version)
            for item in host.plugins
        ),
        slots={slot: parts for slot, parts in slots.items() if parts},
    )


def dumps(lock: Lock) -> str:
    """Return a lock as TOML."""
    from deepinfer_core.structure import unstructure
    from deepinfer_core.toml_text import dumps as to_toml

    table = unstructure(lock)
    plugins = {item.pop("name"): item for item in table.pop("plugins")}
    return to_toml({**table, "plugins": plugins})


def loads(text: str, source: str) -> Lock:
    """Read what ``dumps`` wrote.

    Args:
        text: the file's content.
        source: the file, as messages name it.

    Raises:
        LockMismatch: the text is no lock, or one of another format.
    """
    from deepinfer_core.structure import Misfit, structure

    try:
        table = tomllib.loads(text)
        if table.get("format") != FORMAT:
            raise LockMismatch(
                f"{source} has lock format {table.get('format')!r}, this is {FORMAT}; lock anew"
            )
        plugins = [{"name": name, **item} for name, item in table.pop("plugins", {}).items()]
        lock: Lock = structure({**table, "plugins": plugins}, Lock)
    except (tomllib.TOMLDecodeError, TypeError, AttributeError) as error:
        raise LockMismatch(f"{source} is no lock: {error}; lock anew") from error
    except Misfit as error:
        raise LockMismatch(f"{source} is no lock; lock anew", error.problems) from error
    return lock


def read_lock(path: Path) -> Lock:
    """Read a lock from a file.

    Raises:
        LockMismatch: the file cannot be read, or is no lock.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LockMismatch(f"cannot read the lock {path}: {reason(error)}") from error
    return loads(text, str(path))


def handshake(
    lock: Lock, send: Callable[[bytes], object], receive: Callable[[], bytes], *, peer: str = "peer"
) -> None:
    """Compare compositions with another process; both sides call this with their own lock.

    Args:
        lock: of this process's plan.
        send: sends one message, such as ``Connection.send_bytes``.
        receive: waits for one message, such as ``Connection.recv_bytes``.
        peer: the other side, as messages name it.

    Raises:
        LockMismatch: the other side composed something else (every difference is listed), speaks
            another language, or hung up.
    """
    from deepinfer_core.structure import Misfit, structure, unstructure

    try:
        send(json.dumps(unstructure(lock)).encode())
        message: Any = json.loads(receive())
        theirs: Lock = structure(message, Lock)
    except (OSError, EOFError) as error:
        raise LockMismatch(f"{peer} hung up during the handshake: {reason(error)}") from error
    except (ValueError, Misfit) as error:
        raise LockMismatch(
            f"{peer} does not speak the handshake of this version: {error}"
        ) from error
    if lock.composition_hash == theirs.composition_hash and lock.api == theirs.api:
        return
    raise LockMismatch(
        f"{peer} composed another engine ({theirs.composition_hash}) than this process "
        f"({lock.composition_hash}); use the same plugins and configuration everywhere",
        lock.differences(theirs),
    )
