"""Responses that are kept: the store's laws, and the endpoints on top of it."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import StoredResponse
from deepinfer_serve.responses import page_of
from deepinfer_serve.store import ResponseStore

PATH = "/v1/responses"


def response(identity: str, text: str = "") -> StoredResponse:
    return StoredResponse(identity=identity, body={"id": identity, "text": text}, input_items=())


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store(clock: Clock | None = None, **limits: Any) -> ResponseStore:
    settings: dict[str, Any] = {"ttl_s": 10.0, "max_entries": 4, "max_bytes": 10_000, **limits}
    return ResponseStore(clock=clock or Clock(), **settings)


actions = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "delete", "wait"]),
        st.sampled_from(["anna", "ben"]),
        st.sampled_from(["r1", "r2", "r3"]),
        st.integers(0, 120),
    ),
    max_size=40,
)


@given(actions)
def test_the_store_is_a_dictionary_that_forgets(steps: list[tuple[str, str, str, int]]) -> None:
    clock = Clock()
    kept = store(clock, max_entries=3, max_bytes=400)
    model: dict[tuple[str, str], tuple[str, float]] = {}
    for action, owner, name, number in steps:
        if action == "wait":
            clock.now_s += number / 20
        elif action == "put":
            text = "x" * number
            model.pop((owner, name), None)
            model[owner, name] = text, clock.now_s + 10
            kept.put(owner, response(name, text))
        elif action == "delete":
            kept.delete(owner, name)
            model.pop((owner, name), None)
        found = kept.get(owner, name)
        if found is not None:
            text, expires_s = model[owner, name]
            assert found.body["text"] == text
            assert clock.now_s < expires_s
        assert len(kept) <= 3
        assert kept.num_bytes <= 400
    for owner in ("anna", "ben"):
        for found in kept.list(owner):
            kept.delete(owner, found.identity)
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_what_is_fresh_and_small_is_kept() -> None:
    clock = Clock()
    kept = store(clock)
    kept.put("", response("a"))
    clock.now_s = 9.9
    assert kept.get("", "a") is not None
    clock.now_s = 10.0
    assert kept.get("", "a") is None


def test_the_oldest_goes_first() -> None:
    kept = store(max_entries=2)
    for name in "abc":
        kept.put("", response(name))
    assert [item.identity for item in kept.list("")] == ["c", "b"]


def test_one_that_is_larger_than_everything_is_not_kept() -> None:
    kept = store(max_bytes=100)
    kept.put("", response("a", "x" * 200))
    assert len(kept) == 0


# ------------------------------------------------------------------------------ pages


ITEMS = [{"id": f"i{at}"} for at in range(5)]


def ids(query: dict[str, str]) -> list[str]:
    return [item["id"] for item in page_of(ITEMS, query, newest_first=True)["data"]]


def test_pages_of_a_list() -> None:
    assert ids({}) == ["i0", "i1", "i2", "i3", "i4"]
    assert ids({"order": "asc", "limit": "2"}) == ["i4", "i3"]
    assert ids({"after": "i1", "limit": "2"}) == ["i2", "i3"]
    assert ids({"before": "i1"}) == ["i0"]
    assert page_of(ITEMS, {"limit": "2"}, newest_first=True)["has_more"]
    assert not page_of(ITEMS, {"after": "i2"}, newest_first=True)["has_more"]
    assert page_of([], {}, newest_first=True)["first_id"] is None


@pytest.mark.parametrize(
    "query",
    [
        *(
            {"limit": text}
            for text in ("0", "101", "x", "²", "9" * 50, "0" * 6 + "100" + "9" * 5000)
        ),
        {"order": "up"},
        {"after": "z"},
        {"before": "z"},
    ],
)
def test_bad_pages_are_refused(query: dict[str, str]) -> None:
    with pytest.raises(ProtocolError):
        page_of(ITEMS, query, newest_first=True)


# ------------------------------------------------------------------------------ endpoints


def test_kept_responses_can_be_fetched_continued_and_deleted(start: Any) -> None:
    with start().client() as client:
        made = client.post(PATH, json={"prompts": ["hello"], "store": True}).json()
        where = f"{PATH}/{made['id']}"
        assert client.get(where).json() == made
        items = client.get(f"{where}/input_items", params={"order": "asc"}).json()
        assert [item["id"] for item in items["data"]] == ["item_0", "item_1", "item_2"]
        after = {"prompts": ["x"], "previous": made["id"]}
        assert client.post(PATH, json=after).status_code == 200
        assert [item["id"] for item in client.get(PATH).json()["data"]] == [made["id"]]
        assert client.delete(where).json()["deleted"] is True
        for gone in (client.get(where), client.delete(where), client.get(f"{where}/input_items")):
            assert gone.status_code == 404
        assert client.post(PATH, json=after).status_code == 404


def test_streamed_responses_are_kept_too(start: Any) -> None:
    with start().client() as client:
        client.post(PATH, json={"prompts": ["hello"], "store": True, "stream": True})
        (kept,) = client.get(PATH).json()["data"]
        assert kept["texts"] == ["hello"]
        assert kept["status"] == "completed"


def test_nothing_is_kept_unasked(start: Any) -> None:
    with start().client() as client:
        client.post(PATH, json={"prompts": ["hello"]})
        assert client.get(PATH).json()["data"] == []


BACKGROUND = {"store": True, "background": True}


def test_a_response_in_the_background_can_be_waited_for(start: Any) -> None:
    with start().client() as client:
        made = client.post(PATH, json={"prompts": ["hello"], **BACKGROUND}).json()
        assert made["status"] == "in_progress"
        while (found := client.get(f"{PATH}/{made['id']}").json())["status"] == "in_progress":
            time.sleep(0.01)
        assert found["texts"] == ["hello"]


def test_a_response_in_the_background_can_be_cancelled(gated: Any, gate: Any) -> None:
    live = gated()
    with live.client() as client:
        made = client.post(PATH, json={"prompts": ["hello"], **BACKGROUND}).json()
        gate.let(2)
        found = client.post(f"{PATH}/{made['id']}/cancel").json()
        assert found["status"] == "failed"
        assert "cancelled" in found["message"]
        gate.open()
        assert client.post(f"{PATH}/{made['id']}/cancel").status_code == 200
    assert not live.site.tasks


def test_what_is_kept_cannot_be_streamed_again(start: Any) -> None:
    with start().client() as client:
        made = client.post(PATH, json={"prompts": ["hello"], "store": True}).json()
        refused = client.get(f"{PATH}/{made['id']}", params={"stream": "true"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")


def test_only_what_is_in_the_background_can_be_cancelled(start: Any) -> None:
    with start().client() as client:
        made = client.post(PATH, json={"prompts": ["hello"], "store": True}).json()
        assert client.post(f"{PATH}/{made['id']}/cancel").status_code == 400
        assert client.post(f"{PATH}/none/cancel").status_code == 404


def test_a_refusal_in_the_background_is_kept(start: Any) -> None:
    with start().client() as client:
        made = client.post(PATH, json={"prompts": ["x" * 10**5], **BACKGROUND}).json()
        while (found := client.get(f"{PATH}/{made['id']}").json())["status"] == "in_progress":
            time.sleep(0.01)
        assert found["status"] == "failed"


def test_the_background_is_no_way_around_the_limit(gated: Any, gate: Any) -> None:
    live = gated(max_requests=1)
    with live.client() as client:
        assert client.post(PATH, json={"prompts": ["hello"], **BACKGROUND}).status_code == 200
        assert client.post(PATH, json={"prompts": ["hello"], **BACKGROUND}).status_code == 429
        gate.open()


def test_what_is_made_in_the_background_is_finished_at_the_end(gated: Any, gate: Any) -> None:
    live = gated()
    with live.client() as client:
        identity = client.post(PATH, json={"prompts": ["hello"], **BACKGROUND}).json()["id"]
    live.server.handle_exit(15, None)
    gate.open()
    live.thread.join()
    kept = live.site.store.get("", identity)
    assert kept is not None
    assert kept.body["texts"] == ["hello"]


def test_deleting_one_in_the_background_stops_it(gated: Any, gate: Any) -> None:
    live = gated()
    with live.client() as client:
        made = client.post(PATH, json={"prompts": ["hello"], **BACKGROUND}).json()
        assert client.delete(f"{PATH}/{made['id']}").status_code == 200
        assert client.get(f"{PATH}/{made['id']}").status_code == 404
    assert not live.site.tasks
