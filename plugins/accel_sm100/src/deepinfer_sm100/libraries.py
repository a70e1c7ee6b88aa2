"""Vendor libraries: whether each is there, in a version that its calls are written for.

None of the calls was run on hardware: their names, arguments and layouts are those of the versions
named here, and tests hold them against stand-ins that refuse anything else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import metadata
from typing import Any

from attrs import field, frozen
from packaging.version import Version


@frozen(kw_only=True)
class Library:
    """One library.

    Attributes:
        module: what is imported.
        distribution: what is installed.
        least: oldest version whose calls are known.
        below: first version whose calls are not.
        python: oldest Python it runs on.
        install: how to get it, where plain pip does not do.
        never: why it cannot be used by this version at all, "" if it can.
        names: what must be in the module.
    """

    module: str
    distribution: str
    least: str
    below: str
    python: tuple[int, int] = (3, 11)
    install: str = ""
    never: str = ""
    names: tuple[str, ...] = field(default=())


LIBRARIES: Mapping[str, Library] = {
    library.module: library
    for library in (
        Library(
            module="deep_gemm",
            distribution="deepinfer-gemm",
            least="2.8",
            below="3",
            install=(
                "DG_PACKAGE_NAME=deepinfer-gemm DG_FORCE_BUILD=1 "
                "pip install --no-build-isolation deepinfer-gemm"
            ),
            names=("fp8_fp4_gemm_nt", "bf16_gemm_nt"),
        ),
        Library(
            module="flash_mla",
            distribution="deepinfer-flashmla",
            least="1.0",
            below="2",
            install=(
                "build it from its repository with nvcc 13.1 or later; its sdist lacks a module "
                "that its setup imports"
            ),
            names=("flash_mla_with_kvcache", "flash_mla_sparse_fwd"),
        ),
        Library(
            module="flashinfer",
            distribution="flashinfer-python",
            least="0.7",
            below="0.8",
            names=("norm", "activation"),
        ),
        Library(
            module="tile_kernels",
            distribution="tile-kernels",
            least="2.1",
            below="3",
            python=(3, 12),
            names=("quant",),
        ),
        Library(
            module="deep_ep",
            distribution="deepinfer-ep",
            least="2.5",
            below="3",
            never=(
                "spreads experts over GPUs, which needs the multi-process executor; this version "
                "runs one process"
            ),
        ),
    )
}


def why_not(
    name: str,
    *,
    load: Callable[[str], Any] = importlib.import_module,
    version: Callable[[str], str] = metadata.version,
    python: tuple[int, ...] = tuple(sys.version_info[:2]),
) -> str | None:
    """Why a library cannot be used, or None; whatever goes wrong is a reason, never an error.

    Args:
        name: a key of ``LIBRARIES``.
        load: imports a module.
        version: of an installed distribution.
        python: version of the interpreter.
    """
    library = LIBRARIES[name]
    if library.never:
        return library.never
    try:
        found = version(library.distribution)
    except metadata.PackageNotFoundError:
        hint = library.install or f"pip install {library.distribution}"
        return f"{library.distribution} is not installed; {hint}"
    if python < library.python:
        wanted = ".".join(map(str, library.python))
        return f"{library.distribution} needs Python {wanted}, this is {'.'.join(map(str, python))}"
    if not Version(library.least) <= Version(found) < Version(library.below):
        return (
            f"{library.distribution} {found} is installed; calls are written for "
            f"{library.least} and later, below {library.below}"
        )
    try:
        module = load(library.module)
    except Exception as error:  # some load their extension, or assert, when imported
        return f"{library.module} {found} cannot be imported: {type(error).__name__}: {error}"
    missing = [each for each in library.names if not hasattr(module, each)]
    if missing:
        return f"{library.module} {found} lacks {', '.join(missing)}"
    return None


@cache
def installed_why_not(name: str) -> str | None:
    """``why_not`` of this installation, asked once."""
    return why_not(name)
