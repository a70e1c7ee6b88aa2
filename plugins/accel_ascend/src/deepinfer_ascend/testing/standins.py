"""An environment with the real torch_npu on a machine without CANN.

torch_npu links against libraries of CANN. Small ones with the same names and entry points let it be
imported; each entry point fails when it is called, but for those that the import itself needs.
Nothing can run there: it serves signatures and shape functions, and CPU tensors.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from attrs import frozen

from deepinfer_ascend.probe import AUTOLOAD
from deepinfer_ascend.testing.schemas import TORCH_NPU

_FAILURE = 507899
"""What an entry point answers: an error inside of the driver."""

_ANSWERS = {
    "aclInit": "int aclInit(const char *path) { return 0; }",
    "aclFinalize": "int aclFinalize(void) { return 0; }",
    "aclrtGetDeviceCount": (
        "int aclrtGetDeviceCount(unsigned *count) { if (count) *count = 0; return 0; }"
    ),
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend950PR_9589"; }',
    "aclAppLog": "void aclAppLog(int level, ...) {}",
}
"""Entry points that must succeed for an import."""

_MAIN = "libascendcl"

FLASH_MLA = "1.0.0"
"""Version of flash_mla that ``sparse`` was written for."""


class UnavailableError(Exception):
    """The environment cannot be made here; says why."""


@frozen(kw_only=True)
class Environment:
    """An interpreter that can import torch_npu.

    Attributes:
        python: the interpreter.
        variables: what it needs in its environment.
    """

    python: Path
    variables: dict[str, str]


def make_environment(folder: Path) -> Environment:
    """Make it, or take what is there already.

    Raises:
        UnavailableError: no tools, no wheel for this Python and torch, or no network.
    """
    for tool in ("gcc", "nm", "readelf"):
        if shutil.which(tool) is None:
            raise UnavailableError(f"{tool} is not installed")
    python = folder / "bin" / "python"
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    done = folder / "complete"
    libraries = folder / "cann"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
        _run(
            [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
             str(packages), f"torch-npu=={TORCH_NPU}"]
        )  # fmt: skip
        # Everything else comes from the interpreter that made it.
        here = sysconfig.get_paths()["purelib"]
        (packages / "base.pth").write_text(f"import site; site.addsitedir({here!r})\n")
        _build(packages / "torch_npu", Path(here) / "torch" / "lib", libraries)
        done.touch()
    return Environment(python=python, variables={"LD_LIBRARY_PATH": str(libraries), AUTOLOAD: "0"})


def add_flash_mla(folder: Path) -> None:
    """Install the Python half of flash_mla, whose kernels only CANN or nvcc can build.

    Args:
        folder: as given to ``make_environment``, which made it.

    Raises:
        UnavailableError: no network, or no setuptools here.
    """
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    if (packages / "flash_mla").exists():
        return
    _run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
         "--target", str(packages), f"deepinfer-flashmla=={FLASH_MLA}"],
        FLASH_MLA_SKIP_CUDA_BUILD="1",
    )  # fmt: skip


def _run(command: list[str], **variables: str) -> str:
    environ = {**os.environ, **variables}  # noqa: TID251 - of another program
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or ["no message"]
        raise UnavailableError(f"{Path(command[0]).name} failed: {lines[-1]}")
    return done.stdout


def _symbols(files: Iterable[Path], flag: str) -> set[str]:
    found: set[str] = set()
    for file in files:
        lines = _run(["nm", "-D", flag, str(file)]).splitlines()
        found |= {line.split()[-1].partition("@")[0] for line in lines if line.strip()}
    return found


def _build(torch_npu: Path, torch_lib: Path, target: Path) -> None:
    """Compile stand-ins for what torch_npu's libraries ask for and nobody has."""
    own = [*torch_npu.glob("lib/*.so"), *torch_npu.glob("_C*.so")]
    torch_libraries = sorted(torch_lib.glob("lib*.so*"))
    missing = _symbols(own, "--undefined-only") - _symbols(
        [*own, *torch_libraries], "--defined-only"
    )
    # What C, C++ and Python libraries have is not CANN's, which has plain names in C.
    ours = re.compile(r"(acl|rt|Msprof|Hccl|hccl|ge|adx|Adx|dlog|Dlog|mm|halGrp|prof)[A-Z_]?\w*")
    entries = sorted(name for name in missing if ours.fullmatch(name))
    bodies = [_ANSWERS.get(name, f"int {name}(void) {{ return {_FAILURE}; }}") for name in entries]
    target.mkdir()
    source = target / "entries.c"
    source.write_text("\n".join(bodies) + "\n")
    known = {path.name.partition(".so")[0] for path in (*own, *torch_libraries)}
    needed: set[str] = set()
    for file in own:
        needed |= set(re.findall(r"\[(lib\w[^\]]*?)\.so", _run(["readelf", "-d", str(file)])))
    system = {"libc", "libm", "libdl", "librt", "libpthread", "libstdc++", "libgcc_s"}
    empty = target / "empty.c"
    empty.write_text("int stand_in(void) { return 1; }\n")
    for name in sorted((needed | {_MAIN}) - known - system):
        code = source if name == _MAIN else empty
        _run(
            ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}.so", "-o",
             str(target / f"{name}.so"), str(code)]
        )  # fmt: skip
