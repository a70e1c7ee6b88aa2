"""A slow decoder that is easy to believe: one sequence, no pages, no batch, everything recomputed.

``dense_attention`` is the reference of every attention backend. ``Oracle`` runs a model through it,
one sequence at a time, and ``assert_lossless`` compares an engine with an oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.requests import Request, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer_core.interfaces.model import Model


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    positions: Sequence[int],
    params: AttentionParams,
    visible_from: int = 0,
) -> Tensor:
    """Attention of one sequence's queries over its positions ``0 .. n - 1``, in float64.

    Args:
        q: [num_queries, num_query_heads, key_dim].
        k: [n, num_kv_heads, key_dim]; what lies at invisible positions plays no part.
        v: [n, num_kv_heads, value_dim].
        positions: position of each query.
        params: constants of the call.
        visible_from: no query sees a lower position.

    Returns:
        [num_queries, num_query_heads, value_dim], float64.
    """
    rows = [
        _attend_one(query, k[low : position + 1], v[low : position + 1], params)
        for query, position in zip(q.double(), positions, strict=True)
        for low in [max(visible_from, position - params.window + 1 if params.window else 0)]
    ]
    return torch.stack(rows)


def _attend_one(query: Tensor, k: Tensor, v: Tensor, params: AttentionParams) -> Tensor:
    keys, values = k.double(), v.double()
    per_kv = query.shape[0] // keys.shape[1]
    keys, values = (side.repeat_interleave(per_kv, dim=1) for side in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query, keys) * params.scale
    if params.softcap:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if params.sinks is not None:
        scores = torch.cat([scores, params.sinks.double().unsqueeze(-1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[:, : keys.shape[0]]
    return torch.einsum("hn,nhd->hd", weights, values)


class DenseStep:
    """A ``StepContext`` over a whole sequence of tokens, with nothing but ``dense_attention``."""

    def __init__(
        self, model: Model, token_ids: Sequence[int], rows: Sequence[int], device: torch.device
    ) -> None:
        self.batch = _dense_batch(len(model.spec.groups), token_ids, rows)
        self.token_ids = torch.tensor(list(token_ids), dtype=torch.int64, device=device)
        self.positions = torch.arange(len(token_ids), dtype=torch.int64, device=device)
        self.logit_rows = torch.tensor(list(rows), dtype=torch.int64, device=device)
        self.scratch: dict[str, Any] = {}
        self.taps: dict[str, Tensor] = {}
        self._written: dict[int, tuple[Tensor, Tensor]] = {}
        self._groups = model.spec.groups

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams
    ) -> Tensor:
        """Attention of one layer over everything its group's writer wrote."""
        if k is not None and v is not None:
            self._written[layer] = k, v
        keys, values = self._written[self._writer(layer)]
        positions = range(len(self.positions))
        return dense_attention(q, keys, values, positions=positions, params=params).to(q.dtype)

    def group(self, index: int) -> tuple[Any, Any]:
        """Not there: the oracle has no storage."""
        raise NotImplementedError("the oracle runs models that reach their state through attend")

    def tap(self, name: str, hidden: Tensor) -> None:
        """Keep every layer output."""
        self.taps[name] = hidden

    def _writer(self, layer: int) -> int:
        spec = next(group for group in self._groups if layer in group.layers)
        return max(writer for writer in spec.storage_layers if writer <= layer)


def _dense_batch(num_groups: int, token_ids: Sequence[int], rows: Sequence[int]) -> Batch:
    count = len(token_ids)
    group = GroupBatch(
        block_tables=np.zeros((1, 0), np.int32),
        write_slots=np.arange(count, dtype=np.int64),
        visible_from=np.zeros(1, np.int32),
    )
    return Batch(
        step=0,
        sequence_ids=(0,),
        token_ids=np.asarray(token_ids, np.int32),
        token_sources=np.full(count, -1, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_starts=np.asarray([0, count], np.int32),
        context_lengths=np.asarray([count], np.int32),
        num_drafts=np.zeros(1, np.int32),
        logit_rows=np.asarray(rows, np.int32),
        logit_sequences=np.zeros(len(rows), np.int32),
        keep_from=np.zeros(1, np.int32),
        groups=(group,) * num_groups,
    )


class Oracle:
    """A greedy decoder of one sequence at a time.

    Args:
        model: the model, built for the CPU in float32 (or float64).
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    def logits(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """[len(rows), vocab_size], float32: what follows after each of ``rows`` (default: all)."""
        rows = range(len(token_ids)) if rows is None else rows
        step = DenseStep(self.model, token_ids, rows, torch.device("cpu"))
        with torch.inference_mode():
            return self.model.head(self.model.forward(step))

    def generate(
        self, prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()
    ) -> list[int]:
        """Continue a prompt greedily; the lowest id wins ties, a stop id ends and is kept."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            last = self.logits(tokens, [len(tokens) - 1])[0]
            token = int(torch.nonzero(last == last.max())[0, 0])
            tokens.append(token)
            if token in stop_ids:
                break
        return tokens[len(prompt) :]


def run_to_end(engine: Any, requests: Sequence[Request]) -> dict[str, list[int]]:
    """Submit requests, step an engine until it is idle, and collect the tokens of each.

    Raises:
        AssertionError: a request ended with an error, or the engine ran dry before it ended.
    """
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    finished: set[str] = set()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id].extend(delta.token_ids)
            if delta.finished:
                assert delta.error is None, f"request {delta.request_id}: {delta.error}"
                finished.add(delta.request_id)
    missing = sorted(set(tokens) - finished)
    assert not missing, f"the engine has no work left, but {missing} have not ended"
    return tokens


def assert_lossless(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    *,
    oracle: Oracle,
    max_tokens: int = 16,
) -> None:
    """Raise AssertionError unless an engine continues prompts as the oracle does, greedily.

    All prompts run together, so that batching, chunking, preemption, caches and drafts take part.
    At the end no page may be in use.

    Args:
        engine: ``submit``, ``step`` and ``has_work`` of ``deepinfer_core.engine.Engine``.
        prompts: token ids, at least one each.
        oracle: of the engine's own model.
        max_tokens: new tokens of each prompt.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    requests = [
        Request(request_id=f"lossless-{at}", prompt_token_ids=tuple(prompt), params=params)
        for at, prompt in enumerate(prompts)
    ]
    found = run_to_end(engine, requests)
    for request in requests:
        expected = oracle.generate(request.prompt_token_ids, max_tokens)
        tokens = found[request.request_id]
        assert tokens == expected, (
            f"prompt {request.prompt_token_ids}: the engine gives {tokens}, the oracle {expected}"
        )
    cache = getattr(engine, "cache", None)
    if cache is not None:
        used = [usage.used for usage in cache.usage()]
        assert not any(used), f"pages are in use although every request ended: {used}"
