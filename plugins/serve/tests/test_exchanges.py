"""One wire format over HTTP: whole and streamed, refused, failed, left, and crowded."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from deepinfer_core.testing.scripted import ScriptedEngine

PATH = "/v1/responses"


def ask(live: Any, **fields: Any) -> httpx.Response:
    with live.client() as client:
        answer: httpx.Response = client.post(PATH, json=fields)
        return answer


def events(response: httpx.Response) -> list[tuple[str, Any]]:
    return list(parsed(response.iter_lines()))


def parsed(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            data = line[6:]
            yield name, data if data == "[DONE]" else json.loads(data)
            name = ""


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_a_whole_answer(start: Any) -> None:
    answer = ask(start(), prompts=["hello"])
    assert answer.status_code == 200
    assert answer.json()["texts"] == ["hello"]
    assert answer.headers["content-type"] == "application/json"


def test_a_streamed_answer_says_the_same(start: Any) -> None:
    live = start()
    with (
        live.client() as client,
        client.stream("POST", PATH, json={"prompts": ["hello"], "stream": True}) as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer)
    assert [name for name, _ in found[:1]] == ["begun"]
    assert "".join(data["text"] for name, data in found if name == "text") == "hello"
    assert found[-2:] == [("done", {"prompt_tokens": [5]}), ("", "[DONE]")]


@pytest.mark.parametrize("stream", [False, True])
def test_several_generations_of_one_request(start: Any, stream: bool) -> None:
    live = start()
    prompts = ["one", "twelve", "x", "three hundred"]
    answer = ask(live, prompts=prompts, stream=stream)
    if stream:
        texts = [""] * 4
        for name, data in parsed(iter(answer.text.splitlines())):
            if name == "text":
                texts[data["at"]] += data["text"]
        assert texts == prompts
    else:
        assert answer.json()["texts"] == prompts


def test_nothing_to_generate_is_answered_at_once(start: Any) -> None:
    answer = ask(start(), prompts=[])
    assert answer.status_code == 200
    assert answer.json()["texts"] == []


def test_what_is_not_wanted_any_more_is_aborted(start: Any) -> None:
    live = start()
    answer = ask(live, prompts=["x" * 400], wanted=10)
    assert len(answer.json()["texts"][0]) >= 10
    assert len(answer.json()["texts"][0]) < 400
    assert not live.engine.has_work


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_come_with_a_status_before_any_event(start: Any, stream: bool) -> None:
    live = start()
    for grammar in ("bad", "impossible"):
        assert ask(live, prompts=["x"], grammar=grammar, stream=stream).status_code == 400
    too_long = ask(live, prompts=["x" * 100_000], stream=stream)
    assert too_long.status_code == 400
    assert "toy_error" in too_long.json()
    assert ask(live, prompts=["x"], model="other", stream=stream).status_code == 404
    assert ask(live, prompts=["x"], previous="none", stream=stream).status_code == 404
    with live.client() as client:
        assert client.post(PATH, content=b"{").status_code == 400
    assert ask(live, prompts=["x"]).status_code == 200


def test_one_refused_generation_refuses_the_request_and_ends_the_others(start: Any) -> None:
    live = start()
    assert ask(live, prompts=["fine", "x" * 100_000]).status_code == 400
    until(lambda: not live.engine.has_work)


def test_a_fault_of_the_server_keeps_its_secrets(start: Any) -> None:
    answer = ask(start(), prompts=["x"], crash=True)
    assert answer.status_code == 500
    assert "secret" not in answer.text


def test_a_failure_in_the_middle_of_a_stream_ends_it_with_an_event(start: Any) -> None:
    live = start()
    answer = ask(live, prompts=["fine\x00later"], stream=True)
    assert answer.status_code == 200
    found = list(parsed(iter(answer.text.splitlines())))
    assert found[-1][0] == "fault"
    assert found[-1][1]["status"] == 500
    assert ask(live, prompts=["x"]).status_code == 200


def test_a_failure_without_a_stream_is_a_500(start: Any) -> None:
    answer = ask(start(), prompts=["fine\x00later"])
    assert answer.status_code == 500
    assert "toy_error" in answer.json()


def test_ignored_fields_are_named(start: Any) -> None:
    answer = ask(start(), prompts=["x"], ignored=["user", "caf\u00e9\r\nx: y"])
    assert answer.headers["x-deepinfer-ignored"] == "user, caf???x: y"


# ------------------------------------------------------------------------------ bodies


def test_large_bodies_are_refused_before_they_are_read(start: Any) -> None:
    live = start(max_body_bytes=1000)
    assert ask(live, prompts=["x" * 2000]).status_code == 413
    with socket.create_connection(live.url.removeprefix("http://").split(":")) as raw:
        raw.sendall(
            b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n"
        )
        assert b" 413 " in raw.recv(200)


def test_large_bodies_in_chunks_are_refused(start: Any) -> None:
    live = start(max_body_bytes=1000)

    def parts() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 100

    with live.client() as client:
        assert client.post(PATH, content=parts()).status_code == 413


@pytest.mark.parametrize("path", [PATH, "/tokenize"])
def test_compressed_bodies_are_refused(start: Any, path: str) -> None:
    with start().client() as client:
        for coding, status in (("gzip", 415), ("br, gzip", 415), ("identity", 200)):
            answer = client.post(
                path,
                content=b'{"prompts": ["a"], "prompt": "a"}',
                headers={"content-encoding": coding},
            )
            assert answer.status_code == status
            assert (coding in answer.text) is (status == 415)


def test_bodies_that_do_not_arrive_are_given_up(start: Any) -> None:
    live = start(body_timeout_s=0.1)
    with socket.create_connection(live.url.removeprefix("http://").split(":")) as raw:
        raw.sendall(b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n{")
        assert b" 408 " in raw.recv(200)
    until(lambda: live.site.in_flight == 0)


# ------------------------------------------------------------------------------ crowds


def test_more_requests_than_allowed_get_a_429(gated: Any, gate: Any) -> None:
    live = gated(max_requests=1)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(live, prompts=["hello"])))
    waiting.start()
    until(lambda: live.site.in_flight == 1)
    refused = ask(live, prompts=["later"])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "toy_error" in refused.json()
    gate.open()
    waiting.join()
    assert answers[0].json()["texts"] == ["hello"]
    assert ask(live, prompts=["later"]).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(gated: Any, gate: Any, stream: bool) -> None:
    live = gated()
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({"prompts": ["x" * 300], "stream": stream}).encode()
    raw = socket.create_connection((host, port))
    raw.sendall(
        b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    until(lambda: live.engine.has_work)
    gate.let(5)
    raw.close()
    until(lambda: live.site.in_flight == 0)
    gate.let(2)
    until(lambda: not live.engine.has_work)
    with live.client() as client:
        gate.open()
        assert "deepinfer_requests_disconnected_total 1.0" in client.get("/metrics").text


def test_a_client_that_takes_nothing_is_given_up(start: Any) -> None:
    live = start(write_timeout_s=0.2)
    live.engine.max_model_len = 10**6
    host, port = live.url.removeprefix("http://").split(":")
    body = json.dumps({"prompts": ["x" * 6_000], "stream": True}).encode()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.connect((host, int(port)))
    raw.sendall(
        b"POST /v1/responses HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    until(lambda: live.site.in_flight == 1)
    until(lambda: live.site.in_flight == 0)
    until(lambda: not live.engine.has_work)
    raw.close()


def test_answers_keep_coming_while_others_leave(start: Any) -> None:
    live = start()
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            with (
                live.client() as client,
                client.stream(
                    "POST", PATH, json={"prompts": ["y" * 400], "stream": True}
                ) as answer,
            ):
                next(answer.iter_lines())

    guests = [threading.Thread(target=come_and_go) for _ in range(4)]
    for guest in guests:
        guest.start()
    try:
        for number in range(20):
            assert ask(live, prompts=[f"number {number}"]).json()["texts"] == [f"number {number}"]
    finally:
        stop.set()
        for guest in guests:
            guest.join()
    until(lambda: not live.engine.has_work and live.site.in_flight == 0)


# ------------------------------------------------------------------------------ endings


def test_draining_finishes_what_runs_and_refuses_the_rest(gated: Any, gate: Any) -> None:
    live = gated(drain_timeout_s=1e6)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(ask(live, prompts=["hello"])))
    with live.client() as client:
        assert client.get("/health").status_code == 200
        waiting.start()
        until(lambda: live.engine.has_work)
        live.server.handle_exit(15, None)
        for _ in range(3):  # the door stays open: who comes is told, not left before a closed port
            time.sleep(0.15)
            with live.client() as late:
                assert late.get("/health").status_code == 503
                refused = late.post(PATH, json={"prompts": ["x"]})
            assert refused.status_code == 503
            assert refused.headers["retry-after"]
            assert refused.headers["connection"] == "close"
        gate.open()
        waiting.join()
    assert answers[0].json()["texts"] == ["hello"]
    live.thread.join()


@pytest.mark.parametrize("status", [b"503", b"413"])
def test_an_answer_that_closes_is_not_lost_on_who_still_sends(
    gated: Any, gate: Any, status: bytes
) -> None:
    size = 1 << 21  # more than a server takes in unasked
    live = gated(drain_timeout_s=1e6, max_body_bytes=1000)
    waiting = threading.Thread(target=lambda: ask(live, prompts=["hello"]))
    waiting.start()
    until(lambda: live.engine.has_work)
    if status == b"503":
        live.server.handle_exit(15, None)
    with socket.create_connection(live.url.removeprefix("http://").split(":")) as raw:
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
        raw.sendall(head.encode() + b"x" * size)
        found = b"".join(iter(lambda: raw.recv(4096), b""))
    assert found.startswith(b"HTTP/1.1 " + status)
    assert found.endswith(b"}")
    gate.open()
    waiting.join()


def test_a_second_signal_ends_what_runs(gated: Any, gate: Any) -> None:
    live = gated(drain_timeout_s=1e6)
    with (
        live.client() as client,
        client.stream("POST", PATH, json={"prompts": ["hello"], "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "event: begun"
        live.server.handle_exit(15, None)
        live.server.handle_exit(15, None)
        found = list(parsed(lines))
    assert found[-1][0] == "fault"
    gate.open()
    live.thread.join()


def test_a_stream_that_outlasts_draining_ends_with_an_event(gated: Any, gate: Any) -> None:
    live = gated(drain_timeout_s=0)
    with (
        live.client() as client,
        client.stream("POST", PATH, json={"prompts": ["hello"], "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines) == "event: begun"
        live.server.handle_exit(15, None)
        found = list(parsed(lines))
    assert found[-1][0] == "fault"
    assert found[-1][1]["status"] == 503
    gate.open()


def test_a_failed_engine_is_told_everywhere(start: Any) -> None:
    from deepinfer_core.errors import EngineError

    def fail(step: int) -> None:
        raise EngineError("out of order")

    live = start(engine=ScriptedEngine(recipe=None, before_step=fail))
    with live.client() as client:
        assert client.get("/health").status_code == 200
    live.site.engine._thread.failure = "out of order"
    with live.client() as client:
        answer = client.get("/health")
        assert answer.status_code == 503
        assert "out of order" in answer.text
