"""``deepinfer conformance``: run the contract of installed components."""

from __future__ import annotations

import datetime
import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from deepinfer_core.cli.options import open_host
from deepinfer_core.components import Component, Slot
from deepinfer_core.errors import CompositionError, ConformanceError, PluginLoadError
from deepinfer_core.plugin_check import normalized
from deepinfer_core.plugins import PluginHost
from deepinfer_core.structure import suggest

Targets = list[tuple[Slot, Component[Any]]]

_TEMPLATE = """\
import importlib

from deepinfer_core.testing.contracts import contract_of


class {class_name}(contract_of({slot!r}, {conformance!r})):
    component = {name!r}
    plugins = tuple(importlib.import_module(module) for module in {modules!r})
"""


@click.command()
@click.argument("target", required=False, metavar="[SLOT/NAME]")
@click.option("--plugin", metavar="DIST", help="Every component of a distribution or plugin.")
@click.option(
    "--config",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Configuration file whose [plugins] says what is loaded besides the installed ones.",
)
@click.option(
    "--device", is_flag=True, help="Also print a line for docs/hardware.md: date, device, verdict."
)
@click.option("--verbose", "-v", is_flag=True, help="Name every test.")
@click.pass_context
def conformance(
    context: click.Context,
    target: str | None,
    plugin: str | None,
    config: Path | None,
    device: bool,
    verbose: bool,
) -> None:
    """Check a component against the contract of its slot; a bare NAME where it is unique.

    The exit status is 0 if it keeps the contract, 1 if it breaks it or cannot run here, and 2 if
    there is no such component.
    """
    if (target is None) == (plugin is None):
        raise click.UsageError("give either SLOT/NAME or --plugin DIST")
    from deepinfer_core.config_file import read_config

    plugins = read_config(config, ()).config.plugins
    host = open_host(plugins)
    targets = by_plugin(host, plugin) if plugin else by_name(host, target or "")
    reasons = {(slot, item.name): item.available() for slot, item in targets}
    for (slot, name), reason in reasons.items():
        if reason:
            click.echo(f"not run: {slot}/{name} cannot run here: {reason}")
    runnable = [(slot, item) for slot, item in targets if not reasons[slot, item.name]]
    failed = bool(runnable and run_contracts(runnable, plugins.load, verbose=verbose))
    if device:
        verdict = (
            "failed" if failed else "passed" if len(runnable) == len(targets) else "incomplete"
        )
        for line in device_records(runnable, verdict):
            click.echo(line)
    context.exit(int(failed or len(runnable) < len(targets)))


def by_name(host: PluginHost, target: str) -> Targets:
    """Return the one component that ``SLOT/NAME`` or a unique ``NAME`` means.

    Raises:
        CompositionError: there is no such slot or component, or a bare name is not unique.
        DeepInferError: as ``PluginHost.find``.
    """
    slot_name, slash, name = target.rpartition("/")
    if slash:
        if slot_name not in list(Slot):
            raise CompositionError(f"no slot is named {slot_name!r}{suggest(slot_name, Slot)}")
        return [(Slot(slot_name), host.find(Slot(slot_name), name))]
    found = [(slot, item) for slot in Slot for item in host.components(slot) if item.name == name]
    if len(found) == 1:
        return found
    places = [f"{slot}/{item.name}" for slot, item in found]
    if places:
        raise CompositionError(f"{name!r} is in several slots; name one", places)
    known = {item.name for slot in Slot for item in host.components(slot)}
    broken = [f"perhaps {item}" for item in host.broken]
    raise CompositionError(f"no component is named {name!r}{suggest(name, known)}", broken)


def by_plugin(host: PluginHost, name: str) -> Targets:
    """Return every component of a distribution, or of a plugin by its own name.

    Raises:
        CompositionError: there is no such plugin, or it offers nothing.
        PluginLoadError: it is broken.
    """
    wanted = normalized(name)
    for broken in host.broken:
        if wanted in (normalized(broken.distribution), normalized(broken.name)):
            raise PluginLoadError(str(broken))
    plugins = [
        item
        for item in host.plugins
        if wanted in (normalized(item.distribution), normalized(item.name))
    ]
    if not plugins:
        known = {item.name for item in host.plugins}
        raise CompositionError(f"no plugin is named {name!r}{suggest(name, known)}")
    offers = [offer for item in plugins for offer in item.offers]
    if not offers:
        raise CompositionError(f"plugin {name!r} offers no component; there is nothing to check")
    return [(slot, host.find(slot, item)) for slot, item in offers]


def device_records(targets: Targets, verdict: str) -> list[str]:
    """Return a row of docs/hardware.md for each accelerator that was checked.

    Args:
        targets: what was checked.
        verdict: of all contracts together.
    """
    from deepinfer_core.interfaces.accelerator import AcceleratorContext

    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    records = []
    for slot, item in targets:
        if slot is not Slot.ACCELERATOR:
            continue
        accelerator = item.build(item.config_type(), AcceleratorContext())
        try:
            facts = ", ".join(f"{key} {value}" for key, value in accelerator.describe().items())
        finally:
            accelerator.close()
        records.append(f"| {day} | {item.name} | {facts} | torch {version('torch')} | {verdict} |")
    return records or [f"no device: no accelerator was checked on {day}"]


def run_contracts(targets: Targets, modules: Sequence[str] = (), *, verbose: bool = False) -> int:
    """Run contracts with pytest in a process of its own; return its exit status.

    Args:
        targets: slot of each component, and it.
        modules: importable plugins to load besides the installed ones.
        verbose: name every law.

    Raises:
        ConformanceError: pytest or hypothesis is missing.
    """
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConformanceError(
            f"the conformance kit needs {' and '.join(missing)}: "
            "pip install 'deepinfer-core[testing]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        for number, (slot, item) in enumerate(targets):
            class_name = "Test" + "".join(part.capitalize() for part in str(slot).split("_"))
            text = _TEMPLATE.format(
                class_name=class_name,
                slot=str(slot),
                name=item.name,
                conformance=item.conformance,
                modules=tuple(modules),
            )
            safe = "".join(char if char.isalnum() else "_" for char in item.name)
            Path(folder, f"test_{number:03}_{slot}_{safe}.py").write_text(text, encoding="utf-8")
        Path(folder, "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:asyncio",
            "--import-mode=importlib",
            "--rootdir",
            folder,
            "-c",
            str(Path(folder, "pytest.ini")),
            "-v" if verbose else "-q",
            folder,
        ]
        # Components may write where they stand; modules of the caller's folder stay importable.
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        environ = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(command, check=False, cwd=folder, env=environ).returncode
