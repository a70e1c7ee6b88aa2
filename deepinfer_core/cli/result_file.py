"""The JSONL file that results of many prompts go to, written so that a stopped run can go on."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from deepinfer_core.errors import DeepInferError, RequestError, reason

_DISK_FULL = {errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)}


class OutputError(DeepInferError):
    """Results cannot be written."""


class ResultFile:
    """Appends results, one line each, every line complete or absent.

    What an earlier run wrote stays: its ids are ``done``. Its failures are dropped, so that they
    are tried again, and so is a last line that was cut off.

    Args:
        path: the file; None writes to standard output.
        overwrite: forget what is there.
        model: whose results these are.

    Raises:
        RequestError: the file holds something else, or results of another model.
        OutputError: the file cannot be written, or another process is writing it.
    """

    def __init__(self, path: Path | None, *, overwrite: bool = False, model: str) -> None:
        self.done: frozenset[str | int] = frozenset()
        self._path = path
        if path is None:
            self._stream: BinaryIO = sys.stdout.buffer
            return
        with _explained(path):
            if path.exists() and not path.is_file():  # a pipe or a device: nothing to resume
                self._stream = path.open("wb")
                return
            self._stream = path.open("r+b" if path.exists() else "w+b")
            try:
                self._lock()
                if overwrite:
                    self._stream.truncate(0)
                else:
                    self.done = frozenset(self._take_over(path, model))
                self._stream.seek(0, os.SEEK_END)
            except BaseException:
                self._stream.close()
                raise

    def write(self, record: dict[str, Any]) -> None:
        """Append one result and hand it to the operating system."""
        line = json.dumps(record, ensure_ascii=False, allow_nan=False).encode(
            "utf-8", "backslashreplace"
        )
        with _explained(self._path):
            self._stream.write(line + b"\n")
            self._stream.flush()

    def close(self) -> None:
        """Close the file."""
        if self._path is not None:
            # What could not be written has been reported by `write`.
            with contextlib.suppress(OSError):
                self._stream.close()

    def __enter__(self) -> Self:
        """Close at the end of the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def _lock(self) -> None:
        try:
            import fcntl
        except ImportError:  # not on this platform
            return
        try:
            fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{self._path} is being written by another process") from error

    def _take_over(self, path: Path, model: str) -> set[str | int]:
        """Return the ids of an earlier run; leave only its complete successes in the file."""
        done: set[str | int] = set()
        kept: list[tuple[int, int]] = []
        start = 0
        for number, line in enumerate(self._stream, start=1):
            end = start + len(line)
            if line.endswith(b"\n") and line.strip():
                record = self._parse(number, line, model)
                if not record.get("error"):
                    done.add(record["id"])
                    kept.append((start, end))
            start = end
        if sum(end - begin for begin, end in kept) != start:
            self._keep_only(path, kept)
        return done

    def _parse(self, number: int, line: bytes, model: str) -> dict[str, Any]:
        try:
            record = json.loads(line)
            identity = record["id"]
            error = record["error"]
        except (ValueError, TypeError, KeyError):
            identity, error = [], None
        if not isinstance(identity, str | int) and not error:
            raise RequestError(
                f"{self._path}, line {number}, is not a result of this command; give --overwrite "
                "to replace the file, or another --output"
            )
        if not error and record.get("model") != model:
            raise RequestError(
                f"{self._path} holds results of model {record.get('model')!r}, not of {model!r}; "
                "give --overwrite to replace the file, or another --output"
            )
        return dict(record)

    def _keep_only(self, path: Path, kept: list[tuple[int, int]]) -> None:
        length = sum(end - begin for begin, end in kept)
        if not kept or kept[-1][1] == length:  # what goes is at the end
            self._stream.truncate(length)
            return
        # Elsewhere: by a copy and one rename, so that being killed here loses nothing.
        copy = path.with_name(f"{path.name}.new")
        try:
            with copy.open("wb") as target:
                for begin, end in kept:
                    self._stream.seek(begin)
                    target.write(self._stream.read(end - begin))
            copy.replace(path)
        except BaseException:
            copy.unlink(missing_ok=True)
            raise
        self._stream.close()
        self._stream = path.open("r+b")
        self._lock()


@contextmanager
def _explained(path: Path | None) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        where = path or "standard output"
        if error.errno in _DISK_FULL:
            raise OutputError(
                f"the disk is full: {where} keeps the results so far; free some space and run the "
                "same command again"
            ) from error
        raise OutputError(f"cannot write {where}: {reason(error)}") from error
