"""Bodies before any protocol looks at them: JSON as UTF-8, nothing that cannot be sent back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepinfer_core.errors import ProtocolError
from deepinfer_core.interfaces.wire import ReadContext

ASKED: dict[str, dict[str, Any]] = {
    "openai.chat": {"messages": [{"role": "user", "content": "é"}]},
    "openai.completions": {"prompt": "é"},
    "openai.responses": {"input": "é", "metadata": {"place": "é"}},
    "anthropic.messages": {"messages": [{"role": "user", "content": "é"}], "max_tokens": 3},
    "anthropic.count_tokens": {"messages": [{"role": "user", "content": "é"}]},
}


def raw(name: str, new: bytes) -> bytes:
    body = json.dumps({"model": "m", **ASKED[name]}, ensure_ascii=False).encode()
    return body.replace("é".encode(), new)


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (lambda name: raw(name, b"\xed\xa0\x80"), "not JSON"),  # a lone surrogate as UTF-8
        (lambda name: raw(name, b"\\ud800"), "lone surrogates"),
        (lambda name: raw(name, b"\\ud800").decode().encode("utf-16"), "not JSON"),
        (lambda name: raw(name, b"x")[:-1] + b', "a": 1e999}', "too large"),
        (lambda name: raw(name, b"x")[:-1] + b', "a": [-1e999]}', "too large"),
        (lambda name: raw(name, b"x")[:-1] + b', "a": NaN}', "NaN"),
        (lambda name: raw(name, b"x")[:-1] + b', "a": ' + b"[" * 100 + b"]" * 100 + b"}", "deep"),
        (lambda name: raw(name, b"x")[:-1] + b', "a": ' + b"[" * 10**5, "deep"),
    ],
)
def test_bodies_that_are_refused(world: Any, name: str, body: Any, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem) as refused:
        world.formats[name].read(body(name), ReadContext())
    assert refused.value.status == 400


@pytest.mark.parametrize("name", ASKED)
def test_a_byte_order_mark_does_no_harm(world: Any, name: str) -> None:
    read, plain = world.formats[name].read, raw(name, b"\xc3\xa9")
    marked = read(b"\xef\xbb\xbf" + plain, ReadContext())
    assert marked.generations == read(plain, ReadContext()).generations
