"""Looking at a folder of pages, and clearing it, without an engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attrs import evolve

from deepinfer_core.errors import DeepInferError
from deepinfer_core.interfaces.kv_store import PageState, PageStatus
from deepinfer_prefix.tiers.directory import Directory
from deepinfer_prefix.tiers.history import explain
from deepinfer_prefix.tiers.index import IndexView, SegmentInfo


class CacheFolderError(DeepInferError):
    """There is no folder of pages, or another process writes in it."""


class CacheFolder:
    """A folder of pages, open for looking.

    Raises:
        CacheFolderError: there is none, or (to change it) another process writes in it.
    """

    def __init__(
        self, path: Path, *, change: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        self.path, self._clock = path, clock
        if not (path / "index").is_dir():
            raise CacheFolderError(
                f"{path} holds no pages; name the folder that kv_store.directory is set to"
            )
        self._directory = Directory(path, read_only=not change, now_s=clock())
        if change and not self._directory.writable:
            pid = self._directory.writer_pid()
            self._directory.close()
            raise CacheFolderError(
                f"process {pid} writes in {path}; end it before its pages are removed"
            )
        if self._directory.index is None:
            raise CacheFolderError(f"the index of {path} cannot be read; start an engine on it")

    def close(self) -> None:
        """Let go of it."""
        self._directory.close()

    @property
    def writer_pid(self) -> int | None:
        """The process that writes in it, None if none does."""
        return self._directory.writer_pid()

    @contextmanager
    def _look(self) -> Iterator[IndexView]:
        assert self._directory.index is not None
        with self._directory.index.reading() as view:
            yield view

    def segments(self) -> list[SegmentInfo]:
        """Segments that are there."""
        with self._look() as view:
            return [info for info in view.segments() if info.state is PageState.PRESENT]

    def namespaces(self) -> list[dict[str, Any]]:
        """One object per namespace: its labels, pages, bytes, and when it was used last."""
        with self._look() as view:
            labels = view.labels()
        rows = []
        infos = self.segments()
        for name in sorted({*labels, *(info.namespace_id for info in infos)}):
            mine = [info for info in infos if info.namespace_id == name]
            rows.append(
                {
                    "id": name.hex(),
                    "labels": labels.get(name, {}),
                    "pages": sum(info.live for info in mine),
                    "bytes": sum(info.live_bytes for info in mine),
                    "file_bytes": sum(info.end for info in mine),
                    "segments": len(mine),
                    "accessed_s": max((info.accessed_s for info in mine), default=0.0),
                }
            )
        return rows

    def pages(self, namespace_id: bytes) -> Iterator[dict[str, Any]]:
        """One object per live page of a namespace."""
        now_s = self._clock()
        with self._look() as view:
            for _, key, raw in view.entries(namespace_id):
                entry = view.entry(namespace_id, key)
                if entry is None or entry.state is not PageState.PRESENT:
                    continue
                if entry.times.expires_at_s > now_s:
                    yield {
                        "key": key.hex(),
                        "bytes": raw.size,
                        "exact": raw.exact,
                        "segment": raw.segment,
                        "accessed_s": raw.times.accessed_s,
                        "expires_in_s": raw.times.expires_at_s - now_s,
                    }

    def explain(self, namespace_id: bytes, key: bytes, content: bytes) -> PageStatus:
        """Why a page is not there."""
        with self._look() as view:
            return explain(view, namespace_id, key, content, self._clock())

    def purge(self, wanted: Callable[[SegmentInfo], bool]) -> tuple[int, int]:
        """Remove whole segments; how many pages and how many bytes of files went."""
        pages = num_bytes = 0
        index = self._directory.index
        assert index is not None
        for info in self.segments():
            if wanted(info):
                with index.writing() as view:
                    view.set_segment(
                        evolve(
                            info,
                            live=0,
                            live_bytes=0,
                            sealed=True,
                            state=PageState.DELETED,
                            since_s=self._clock(),
                        )
                    )
                self._directory.remove(info)
                pages, num_bytes = pages + info.live, num_bytes + info.end
        return pages, num_bytes
