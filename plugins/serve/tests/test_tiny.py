"""The real engine and the real recipe with a tiny model, and what holds after each request."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

PATH = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"yes": {"type": "boolean"}, "more": {"anyOf": [{"$ref": "#/$defs/m"}]}},
    "required": ["yes", "more"],
    "additionalProperties": False,
    "$defs": {"m": {"type": "object", "properties": {"level": {"enum": [1, 2]}}}},
}


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "toy", "messages": messages, "max_completion_tokens": 8, **fields}


def pages_used(client: Any) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith("deepinfer_kv_pages_used")
    )


def test_chat_counts_structure_and_pages(tiny: Any) -> None:
    with tiny.client() as client:
        whole = client.post(PATH, json=chat(temperature=0)).json()
        prompt = client.post("/tokenize", json={"messages": chat()["messages"]}).json()["count"]
        assert whole["usage"]["prompt_tokens"] == prompt
        assert whole["usage"]["completion_tokens"] <= 8
        streamed = client.post(PATH, json=chat(temperature=0, stream=True)).text
        chunks = [
            json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")
        ]
        text = "".join(
            choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"]
        )
        assert text == whole["choices"][0]["message"]["content"]
        assert pages_used(client) == 0


def test_structured_output_and_bad_grammars(tiny: Any) -> None:
    pytest.importorskip("xgrammar")
    good = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
    with tiny.client() as client:
        answer = client.post(PATH, json=chat(response_format=good, max_completion_tokens=250))
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        if choice["finish_reason"] == "stop":
            assert set(json.loads(choice["message"]["content"])) >= {"yes", "more"}
        for stream in (False, True):
            refused = client.post(PATH, json=chat(response_format=bad, stream=stream))
            assert refused.status_code == 400, refused.text
        assert pages_used(client) == 0


def test_leaving_returns_pages_at_once(tiny: Any) -> None:
    body = chat(max_completion_tokens=400, ignore_eos=True, stream=True)
    with tiny.client() as client:
        with client.stream("POST", PATH, json=body) as answer:
            next(answer.iter_lines())
        while pages_used(client) or tiny.site.in_flight:
            time.sleep(0.01)
