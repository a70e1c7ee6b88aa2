"""What an index remembers of pages that are gone, and when it forgets them."""

from __future__ import annotations

from collections.abc import Iterator

from deepinfer_core.interfaces.kv_store import PageState, PageStatus
from deepinfer_prefix.tiers.index import Entry, IndexView
from deepinfer_prefix.tiers.segment import CONTENT_BYTES

TIER = "disk"


def explain(
    view: IndexView, namespace_id: bytes, key: bytes, content: bytes, now_s: float
) -> PageStatus:
    """Say why a page is not there, or that it is."""
    entry = view.entry(namespace_id, key)
    if entry is not None:
        return _status(entry, now_s)
    if content:
        for other_id, other_key in view.by_content(
            content[:CONTENT_BYTES].ljust(CONTENT_BYTES, b"\0")
        ):
            other = view.entry(other_id, other_key)
            if other is not None and _gone_s(other, now_s) is None:
                same = other_id == namespace_id
                state = PageState.OTHER_SALT if same else PageState.OTHER_LAYOUT
                return PageStatus(state=state, tier=TIER)
    return PageStatus(tier=TIER)


def _status(entry: Entry, now_s: float) -> PageStatus:
    gone_s = _gone_s(entry, now_s)
    if gone_s is None:
        return PageStatus(state=PageState.PRESENT, tier=TIER)
    state = PageState.EXPIRED if gone_s == entry.times.expires_at_s else entry.state
    return PageStatus(state=state, since_s=gone_s, tier=TIER)


def _gone_s(entry: Entry, now_s: float) -> float | None:
    """When a page went, None while it is there. A bucket is removed after all in it expired."""
    times = []
    if entry.times.expires_at_s <= now_s:
        times.append(entry.times.expires_at_s)
    if entry.state is not PageState.PRESENT:
        times.append(entry.since_s)
    return min(times, default=None)


def sweep(view: IndexView, before_s: float) -> None:
    """Forget pages and segments that went before a time."""
    for namespace_id, key in list(_forgettable(view, before_s)):
        view.drop_entry(namespace_id, key)
    for info in list(view.segments()):
        if info.state is not PageState.PRESENT and info.since_s < before_s:
            view.drop_segment(info.number)
    for name, namespace_id, key in list(view.contents()):
        if view.entry(namespace_id, key) is None:
            view.drop_content(name)


def _forgettable(view: IndexView, before_s: float) -> Iterator[tuple[bytes, bytes]]:
    for namespace_id, key, raw in view.entries():
        entry = view.entry(namespace_id, key)
        gone_s = raw.since_s if entry is None else _gone_s(entry, before_s)
        if gone_s is not None and gone_s < before_s:
            yield namespace_id, key
