"""A copy of profiled step costs on disk, so that an engine starts with what the last one measured.

One small JSON file for each fingerprint (model, device, kernels, versions). Files are written
whole and renamed; none is ever deleted, and those of other fingerprints are never touched.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path

from deepinfer_core.log import get_logger

VERSION = 1
"""Of the file's content."""


class StoredProfile:
    """Step costs that are looked up on disk before they are measured.

    Args:
        folder: of the files; made when first needed.
        fingerprint: what measured times belong to.
        measure: ``rows -> ms`` where the file has nothing.
    """

    def __init__(self, folder: Path, fingerprint: str, measure: Callable[[int], float]) -> None:
        digest = hashlib.blake2b(fingerprint.encode(), digest_size=16).hexdigest()
        self.path = folder / f"step-costs-{digest}.json"
        self._fingerprint, self._measure = fingerprint, measure
        self._known = self._read()

    def __call__(self, num_rows: int) -> float:
        """Milliseconds of a step."""
        found = self._known.get(num_rows)
        if found is None:
            found = self._known[num_rows] = self._measure(num_rows)
            self._write()
        return found

    def _read(self) -> dict[int, float]:
        """What the file says; nothing if it is missing, broken, or of something else."""
        try:
            content = json.loads(self.path.read_text())
            if content["version"] != VERSION or content["fingerprint"] != self._fingerprint:
                return {}
            found = {int(rows): float(ms) for rows, ms in content["ms"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}
        return {rows: ms for rows, ms in found.items() if rows > 0 and math.isfinite(ms) and ms > 0}

    def _write(self) -> None:
        content = {"version": VERSION, "fingerprint": self._fingerprint, "ms": self._known}
        partial = self.path.with_name(f"{self.path.name}.{os.getpid()}.partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(content, indent=1))
            partial.replace(self.path)
        except OSError as error:
            get_logger("dspark").debug("costs.not_stored", path=str(self.path), error=str(error))
