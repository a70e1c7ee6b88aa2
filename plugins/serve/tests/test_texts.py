"""The endpoints that generate nothing, and the metrics."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

PATH = "/v1/responses"


def test_models_in_both_shapes(start: Any) -> None:
    with start(served_names=("alias", "org/name")).client() as client:
        listed = client.get("/v1/models").json()
        assert [item["id"] for item in listed["data"]] == ["toy", "alias", "org/name"]
        assert listed["object"] == "list"
        assert listed["has_more"] is False
        first = listed["data"][0]
        assert (first["object"], first["type"], first["max_model_len"]) == ("model", "model", 512)
        assert client.get("/v1/models/org/name").json()["id"] == "org/name"
        assert client.get("/v1/models/other").status_code == 404
        assert client.post(PATH, json={"prompts": ["x"], "model": "alias"}).status_code == 200


def test_tokens_of_texts_and_back(start: Any) -> None:
    with start().client() as client:
        found = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
        assert found["tokens"] == [97, 98, 99]
        assert (found["count"], found["max_model_len"]) == (3, 512)
        assert found["token_strs"] == ["a", "b", "c"]
        assert client.post("/detokenize", json={"tokens": [97, 98]}).json() == {"prompt": "ab"}
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/tokenize", json=chat).json()["tokens"] == [104, 105]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", "{"),
        ("/tokenize", "[]"),
        ("/tokenize", "{}"),
        ("/tokenize", '{"prompt": 5}'),
        ("/tokenize", '{"prompt": "\\u2026"}'),
        ("/tokenize", '{"messages": [5]}'),
        ("/detokenize", "{}"),
        ("/detokenize", '{"tokens": [-1]}'),
        ("/detokenize", '{"tokens": [true]}'),
        ("/detokenize", '{"tokens": [97, 257]}'),
        ("/detokenize", '{"tokens": "ab"}'),
        ("/tokenize", "[" * 100_000),
    ],
)
def test_bad_bodies_are_refused(start: Any, path: str, body: str) -> None:
    with start().client() as client:
        answer = client.post(path, content=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods_are_told_as_json(start: Any) -> None:
    with start().client() as client:
        assert client.get("/v1/nothing").status_code == 404
        assert "error" in client.get("/v1/nothing").json()
        assert client.delete("/tokenize").status_code == 405
        assert "error" in client.delete("/tokenize").json()
        assert client.put(PATH).status_code == 405
        assert "toy_error" in client.put(PATH).json()


def test_load_and_version(start: Any) -> None:
    with start().client() as client:
        load = client.get("/load").json()
        assert (load["server_load"], load["running"], load["waiting"]) == (0, 0, 0)
        assert client.get("/version").json()["version"]


def test_metrics_count_what_happened(start: Any) -> None:
    live = start()
    with live.client() as client:
        for _ in range(3):
            client.post(PATH, json={"prompts": ["hello"], "stream": True})
        client.post(PATH, json={"prompts": ["x" * 10**5]})
        client.get("/secret/path")
        answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    model = (("model", "toy"),)
    assert samples["deepinfer_prompt_tokens_total", model] == 15
    assert samples["deepinfer_generation_tokens_total", model] >= 15
    assert samples["deepinfer_time_to_first_token_seconds_count", model] == 3
    assert ("deepinfer_inter_token_latency_seconds_count", model) in samples
    labels = (("finish_reason", "stop"), ("format", "toy"), ("model", "toy"))
    assert samples["deepinfer_requests_total", labels] == 3
    assert samples["deepinfer_requests_running", ()] == 0
    assert samples["deepinfer_requests_refused_total", (("status", "400"),)] == 1
    paths = {
        dict(labels).get("path") for name, labels in samples if name.startswith("deepinfer_http")
    }
    assert "/secret/path" not in paths
    assert {PATH, "other"} <= paths
    assert all(name.startswith(("deepinfer_", "process_")) for name, _ in samples)
    if sys.platform == "linux":
        threads = {dict(labels).get("thread") for _, labels in samples}
        assert {"server", "deepinfer-engine"} <= threads
        engine = (("thread", "deepinfer-engine"),)
        assert samples["deepinfer_thread_cpu_seconds_total", engine] > 0


def test_drafts_are_counted_by_place() -> None:
    from deepinfer_core.engine.stats import Counters, EngineStats
    from deepinfer_core.interfaces.cache import CacheUsage
    from deepinfer_serve.metrics import Metrics

    counters = Counters()
    counters.count_drafts(3, 1)
    counters.count_drafts(2, 2)
    pages = (CacheUsage(total=10, used=4, reusable=1, free=5),)
    counted = attrs.asdict(counters)
    known = {field.name for field in attrs.fields(EngineStats)}
    stats = EngineStats(
        running=1, waiting=0, pages=pages, **{k: v for k, v in counted.items() if k in known}
    )
    text = Metrics("toy").text(stats, stored=0, stored_bytes=0).decode()
    assert 'deepinfer_draft_tokens_total{position="2"} 1.0' in text
    assert 'deepinfer_accepted_draft_tokens_total{position="0"} 2.0' in text
    assert 'deepinfer_kv_cache_usage_ratio{group="0"} 0.4' in text
