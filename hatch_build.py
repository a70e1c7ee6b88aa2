"""Extras that name this checkout's own plugins or, in a release, the plugins on an index."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class Extras(MetadataHookInterface):
    """Fill ``optional-dependencies`` from ``[tool.hatch.metadata.hooks.custom]``.

    The table ``plugins`` maps an extra to its folder under ``plugins/``. From a checkout an extra
    is a direct reference to that folder; from an sdist, or with ``DEEPINFER_RELEASE`` set, it is
    the plugin's name and ``pin``, since direct references are not publishable.
    """

    def update(self, metadata: dict[str, Any]) -> None:
        """Add one extra per plugin, ``all`` of them, and the extras given as plain lists."""
        plugins = Path(self.root, "plugins")
        release = "DEEPINFER_RELEASE" in os.environ or not plugins.is_dir()

        def requirement(name: str, folder: str) -> str:
            where = self.config["pin"] if release else f" @ {(plugins / folder).as_uri()}"
            return f"deepinfer-{name}{where}"

        extras = {n: [requirement(n, f)] for n, f in self.config.get("plugins", {}).items()}
        extras["all"] = [r for rs in extras.values() for r in rs]
        metadata["optional-dependencies"] = extras | self.config.get("extras", {})
