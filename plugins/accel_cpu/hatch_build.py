"""Compile the native library while the package is built, installed or installed editable.

Without a compiler the installation succeeds all the same: the package then says at run time why
its kernels are missing, and core's own go on.
"""

from __future__ import annotations

import importlib.util
import os
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeLibrary(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles for wheels, editable ones too; an sdist carries the sources alone."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and mark the wheel as made for this platform if that worked."""
        if self.target_name != "wheel":
            return
        built = _builder(Path(self.root)).build(
            compiler=os.environ.get("CXX", "g++"), jobs=os.cpu_count() or 1
        )
        for level, reason in built.reasons.items():
            self.app.display_warning(f"deepinfer-cpu: no {level} kernels: {reason}")
        build_data["artifacts"].append("src/deepinfer_cpu/_lib/*")
        if built.libraries:
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform}"


def _builder(root: Path) -> ModuleType:
    """The package's own build module, loaded by path: the package is not installed yet."""
    path = root / "src" / "deepinfer_cpu" / "build.py"
    spec = importlib.util.spec_from_file_location("deepinfer_cpu_build", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
