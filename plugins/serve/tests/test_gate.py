"""Who may come in: keys, origins, host names; traces; where a server may listen."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

import pytest

from deepinfer_core.errors import ConfigError
from deepinfer_serve.gate import key_of, trace_of
from deepinfer_serve.lifecycle import listen
from deepinfer_serve.options import ServeOptions, is_loopback

PATH = "/v1/responses"


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.2", False),
        ("example.org", False),
        ("127.0.0.1.example.org", False),
        ("localhost.example.org", False),
    ],
)
def test_what_is_local(host: str, local: bool) -> None:
    assert is_loopback(host) is local


def test_other_machines_need_a_key_unless_told() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.2"):
        with pytest.raises(ConfigError, match="no API key"):
            ServeOptions(host=host).check()
        ServeOptions(host=host, api_keys=("k",)).check()
        ServeOptions(host=host, allow_without_key=True).check()
    with pytest.raises(ConfigError, match="empty"):
        ServeOptions(api_keys=(" ",)).check()


def test_a_taken_port_is_told() -> None:
    first = listen(ServeOptions(port=0))
    first.listen()
    port = first.getsockname()[1]
    with pytest.raises(ConfigError, match=f"port {port}"):
        listen(ServeOptions(port=port))
    first.close()


def test_keys_never_show() -> None:
    assert "secret" not in repr(ServeOptions(api_keys=("secret",)))


@pytest.mark.parametrize(
    "headers",
    [{"authorization": "Bearer one"}, {"authorization": "bearer two"}, {"x-api-key": "one"}],
)
def test_a_key_opens(start: Any, headers: dict[str, str]) -> None:
    live = start(api_keys=("one", "two"))
    with live.client(headers=headers) as client:
        assert client.post(PATH, json={"prompts": ["x"]}).status_code == 200
        assert client.get("/metrics").status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer three"}, {"authorization": "one"}, {"x-api-key": ""}]
)
def test_no_key_no_answer(start: Any, headers: dict[str, str]) -> None:
    live = start(api_keys=("one", "two"))
    with live.client(headers=headers) as client:
        for path in (PATH, "/v1/models", "/metrics", "/tokenize", "/nowhere"):
            answer = client.request("POST" if path == PATH else "GET", path, json={})
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
        assert "toy_error" in client.post(PATH, json={}).json()
        for path in ("/", "/health", "/page/chat.js"):
            assert client.get(path).status_code == 200, path
    assert not live.engine.submitted


def test_owners_do_not_see_each_other(start: Any) -> None:
    live = start(api_keys=("one", "two"))
    with live.client(headers={"x-api-key": "one"}) as one:
        identity = one.post(PATH, json={"prompts": ["x"], "store": True}).json()["id"]
        assert one.get(f"{PATH}/{identity}").status_code == 200
    with live.client(headers={"x-api-key": "two"}) as two:
        assert two.get(f"{PATH}/{identity}").status_code == 404
        assert two.delete(f"{PATH}/{identity}").status_code == 404
        assert two.get(PATH).json()["data"] == []
        assert two.post(PATH, json={"prompts": ["x"], "previous": identity}).status_code == 404
        two.post(PATH, json={"prompts": ["x"]})
    salts = {request.cache_salt for request in live.engine.submitted}
    assert len(salts) == 2
    assert "" not in salts


def test_how_long_stores_keep_it_reaches_the_engine(start: Any) -> None:
    live = start()
    with live.client() as client:
        client.post(PATH, json={"prompts": ["x"], "retain_s": 300})
    assert [request.cache_retain_s for request in live.engine.submitted] == [300]


def test_pages_of_other_origins_may_not_ask(start: Any) -> None:
    live = start(origins=("http://friend.example",))
    with live.client() as client:
        evil = client.post(PATH, json={"prompts": ["x"]}, headers={"origin": "http://evil.example"})
        assert evil.status_code == 403
        own = client.post(PATH, json={"prompts": ["x"]}, headers={"origin": live.url})
        assert own.status_code == 200
        friend = {"origin": "http://friend.example"}
        answer = client.post(PATH, json={"prompts": ["x"]}, headers=friend)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "http://friend.example"
        preflight = client.options(PATH, headers=friend)
        assert preflight.status_code == 204
        assert "POST" in preflight.headers["access-control-allow-methods"]


def test_foreign_host_names_may_not_reach_a_local_server(start: Any) -> None:
    with start().client() as client:
        rebound = client.get("/health", headers={"host": "evil.example"})
        assert rebound.status_code == 403
        for host in ("localhost:8000", "127.0.0.1", "[::1]:9"):
            assert client.get("/health", headers={"host": host}).status_code == 200


# ------------------------------------------------------------------------------ traces


def test_traces_come_from_the_client_or_are_new() -> None:
    assert trace_of({"x-request-id": "abc-1.2:3"}) == "abc-1.2:3"
    parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    assert trace_of({"traceparent": parent}) == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert trace_of({"x-request-id": "a\nb"}) != "a\nb"
    assert trace_of({"x-request-id": "a" * 65}) != "a" * 65
    assert trace_of({}) != trace_of({})


def test_keys_are_read_as_clients_send_them() -> None:
    assert key_of({"authorization": "Bearer  k "}) == "k"
    assert key_of({"authorization": "Basic k", "x-api-key": "z"}) == "z"
    assert key_of({}) == ""


def test_one_trace_runs_through_answer_engine_and_log(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def told() -> list[str]:
        messages: list[Any] = [record.msg for record in caplog.records]
        return [message["event"] for message in messages if "trace-7" in json.dumps(message)]

    live = start()
    with caplog.at_level(logging.DEBUG, "deepinfer"), live.client() as client:
        answer = client.post(PATH, json={"prompts": ["x"]}, headers={"x-request-id": "trace-7"})
        while len(told()) < 2:  # the server's line may follow the answer
            time.sleep(0.005)
    assert answer.headers["x-request-id"] == "trace-7"
    assert live.engine.submitted[0].request_id.endswith(":trace-7")
    assert told() == ["request.started", "http.request"]
