"""Moves the bytes of a model: resumable, verified, never half done under a final name.

A download grows in ``NAME.part`` and becomes ``NAME`` by one rename, after its checksum was found
right. A part that is left behind is continued by the next attempt.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import attrs

from deepinfer_core.errors import PullError, reason
from deepinfer_core.hub.progress import Progress, Silent

_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5
_DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}
Opener = Callable[[Path, bool], BinaryIO]


class UnreachableError(PullError):
    """The server cannot be reached at all, so another source may be tried."""


@attrs.frozen(kw_only=True)
class RemoteFile:
    """One file to fetch.

    Attributes:
        url: where it is.
        num_bytes: expected size, if known.
        sha256: expected checksum of the content, if known.
        git_sha1: expected checksum of the content as a git blob, if known.
        token: sent as bearer token to the url's own host, not to where it redirects.
    """

    url: str
    num_bytes: int | None = None
    sha256: str | None = None
    git_sha1: str | None = None
    token: str | None = attrs.field(default=None, repr=False)


def open_part(path: Path, append: bool) -> BinaryIO:
    """Open a part for writing."""
    return path.open("ab" if append else "wb")


def fetch(
    file: RemoteFile,
    target: Path,
    *,
    progress: Progress | None = None,
    timeout_s: float = 20.0,
    opener: Opener = open_part,
) -> None:
    """Fetch a file to ``target``, continuing an earlier attempt.

    Args:
        file: what to fetch.
        target: final path; its folder is made.
        progress: told about the bytes.
        timeout_s: how long to wait for the next bytes.
        opener: opens the part for writing.

    Raises:
        UnreachableError: no connection.
        PullError: refused by the server, cut off again and again, wrong checksum, disk full, or no
            permission to write.
    """
    progress = progress or Silent()
    part = target.with_name(target.name + ".part")
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = part.exists() and part.stat().st_size > 0
        _download(file, part, progress, timeout_s, opener)
        problem = _mismatch(file, part)
        if problem and resumed:
            # The earlier attempt may have been of another version of the file.
            progress.notice(f"{target.name}: {problem}; fetching it again from the start")
            part.unlink()
            _download(file, part, progress, timeout_s, opener)
            problem = _mismatch(file, part)
        if problem:
            part.unlink()
            raise PullError(f"{file.url} was fetched but is damaged: {problem}")
        part.replace(target)


@contextmanager
def writing(target: Path) -> Iterator[None]:
    """Turn what can go wrong while writing into a ``PullError`` that names the remedy."""
    try:
        yield
    except OSError as error:
        if error.errno in _DISK_FULL:
            raise PullError(
                f"the disk is full: {target.name} does not fit into {target.parent}; free some "
                "space and try again (what is there already is kept)"
            ) from error
        if isinstance(error, PermissionError) or error.errno == errno.EROFS:
            raise PullError(
                f"no permission to write {error.filename or target}; choose another cache folder"
            ) from error
        raise PullError(f"cannot write {target}: {reason(error)}") from error


def _download(
    file: RemoteFile, part: Path, progress: Progress, timeout_s: float, opener: Opener
) -> None:
    """Append to the part until it is complete; connections that break are taken up again."""
    stalled = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        if before and before == file.num_bytes:
            return
        if _transfer(file, part, before, progress=progress, timeout_s=timeout_s, opener=opener):
            return
        after = part.stat().st_size if part.exists() else 0
        stalled = 0 if after > before else stalled + 1
        if stalled >= _ATTEMPTS:
            raise PullError(
                f"{file.url} was cut off at byte {after:,} {_ATTEMPTS} times; "
                "try again later, it will be continued there"
            )


def _transfer(
    file: RemoteFile,
    part: Path,
    start: int,
    *,
    progress: Progress,
    timeout_s: float,
    opener: Opener,
) -> bool:
    """Make one request from byte ``start`` on; say whether the file is complete."""
    try:
        with open_url(file.url, token=file.token, start=start, timeout_s=timeout_s) as response:
            continued = response.status == http.client.PARTIAL_CONTENT
            done = start if continued else 0
            length = response.headers.get("Content-Length")
            total = done + int(length) if length else file.num_bytes
            _check_space(part, total, done)
            progress.start(part.name.removesuffix(".part"), total, done)
            try:
                with opener(part, continued) as stream:
                    while chunk := _read(response):
                        stream.write(chunk)
                        progress.advance(len(chunk))
            finally:
                progress.finish()
    except _RangeError:
        part.unlink()
        return False
    except _CutError:
        return False
    size = part.stat().st_size
    return total is None or size >= total


class _CutError(Exception):
    """The connection broke in the middle."""


class _RangeError(Exception):
    """The server has no bytes where we wanted to go on."""


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read(_CHUNK_BYTES)
    except (http.client.HTTPException, OSError) as error:
        raise _CutError from error


def open_url(
    url: str, *, token: str | None = None, start: int = 0, timeout_s: float = 20.0
) -> http.client.HTTPResponse:
    """Open an HTTP address.

    Args:
        url: http or https.
        token: bearer token for the url's own host.
        start: first byte wanted.
        timeout_s: how long to wait for the connection and for each answer.

    Raises:
        UnreachableError: no connection.
        PullError: the server refuses.
    """
    if not url.startswith(("http://", "https://")):
        raise PullError(f"only http and https addresses can be fetched, not {url}")
    request = urllib.request.Request(url, headers={"User-Agent": "deepinfer"})  # noqa: S310
    if start:
        request.add_header("Range", f"bytes={start}-")
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        response: http.client.HTTPResponse = urllib.request.urlopen(  # noqa: S310 checked above
            request, timeout=timeout_s
        )
    except urllib.error.HTTPError as error:
        error.close()
        raise _refusal(url, error.code) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        reason = getattr(error, "reason", error)
        raise UnreachableError(f"{url} cannot be reached: {reason}") from error
    return response


def _refusal(url: str, status: int) -> Exception:
    if status == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
        return _RangeError()
    if status in {http.client.UNAUTHORIZED, http.client.FORBIDDEN}:
        return PullError(
            f"{url} is not open to everybody (HTTP {status}); it needs an access token, or does "
            "not exist"
        )
    if status == http.client.NOT_FOUND:
        return PullError(f"{url} does not exist (HTTP 404); check the name")
    if status >= http.client.INTERNAL_SERVER_ERROR or status == http.client.TOO_MANY_REQUESTS:
        return UnreachableError(f"{url} is not available at the moment (HTTP {status})")
    return PullError(f"{url} was refused (HTTP {status})")


def _check_space(part: Path, total: int | None, done: int) -> None:
    free = shutil.disk_usage(part.parent).free
    if total is not None and total - done > free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in lower-case hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _mismatch(file: RemoteFile, path: Path) -> str | None:
    size = path.stat().st_size if path.exists() else 0
    if file.num_bytes is not None and size != file.num_bytes:
        return f"it has {size:,} bytes instead of {file.num_bytes:,}"
    if file.sha256 is not None and (found := sha256_of(path)) != file.sha256:
        return f"its SHA-256 is {found} instead of {file.sha256}"
    if file.git_sha1 is not None and (found := _git_sha1_of(path, size)) != file.git_sha1:
        return f"its git checksum is {found} instead of {file.git_sha1}"
    return None


def _git_sha1_of(path: Path, size: int) -> str:
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
