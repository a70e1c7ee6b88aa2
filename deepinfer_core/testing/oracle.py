"""A slow decoder that is easy to believe: one sequence, no pages, no batch, everything recomputed.

``dense_attention`` is the reference of every attention backend. ``Oracle`` runs a model through it,
one sequence at a time, and ``assert_lossless`` compares an engine with an oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from attrs import frozen

from deepinfer_core.batch import Batch, GroupBatch
from deepinfer_core.interfaces.attention import AttentionParams
from deepinfer_core.interfaces.kernels import OpFacts
from deepinfer_core.interfaces.model import BuildRequest
from deepinfer_core.ops.table import OpTable, choose
from deepinfer_core.requests import Request, SamplingParams
from deepinfer_core.testing.reference_kernels import ReferenceKernels

if TYPE_CHECKING:
    from torch import Tensor

    from deepinfer_core.interfaces.checkpoint import Checkpoint
    from deepinfer_core.interfaces.model import Model, ModelFamily, ModelSpec
    from deepinfer_core.kv.layout import CacheGroupSpec


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
        scores = torch.cat([scores, params.sinks.to(scores).unsqueeze(-1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[:, : keys.shape[0]]
    return torch.einsum("hn,nhd->hd", weights, values)


class DenseState:
    """What the layers of a model wrote for one sequence: keys and values of every position."""

    def __init__(self) -> None:
        self.length = 0
        self._written: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, start: int, k: Tensor, v: Tensor) -> None:
        """Replace everything from position ``start`` on."""
        if start:
            keys, values = self.read(layer)
            k, v = torch.cat([keys[:start], k]), torch.cat([values[:start], v])
        self._written[layer] = k, v

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        assert layer in self._written, f"layer {layer} has written nothing for this sequence"
        return self._written[layer]


@frozen(kw_only=True, eq=False)
class Part:
    """Tokens of one sequence in a step.

    Attributes:
        state: of the sequence; the tokens follow what it holds.
        token_ids: at least one.
    """

    state: DenseState
    token_ids: Sequence[int]


class DenseStep:
    """A ``StepContext`` with nothing but ``dense_attention``; checks what a model passes to it.

    Args:
        spec: of the model.
        parts: sequences taking part, in batch order; their states are extended.
        rows: token rows whose logits are wanted, ascending.
        device: torch device of the model.
        taps: layer outputs to ask for.
    """

    def __init__(
        self,
        spec: ModelSpec,
        parts: Sequence[Part],
        rows: Sequence[int],
        device: torch.device,
        *,
        taps: Sequence[str] = (),
    ) -> None:
        self.spec, self._parts = spec, tuple(parts)
        self._starts = [part.state.length for part in parts]
        for part in parts:
            part.state.length += len(part.token_ids)
        self.batch = self._batch(rows, taps)
        self.token_ids = torch.from_numpy(self.batch.token_ids).to(device, torch.int64)
        self.positions = torch.from_numpy(self.batch.positions).to(device, torch.int64)
        self.logit_rows = torch.from_numpy(self.batch.logit_rows).to(device, torch.int64)
        self.scratch: dict[str, Any] = {}
        self.taps: dict[str, Tensor] = {}
        self.attended: list[int] = []

    def attend(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, params: AttentionParams
    ) -> Tensor:
        """Attention of one layer over everything its group's writer wrote."""
        group = self._check(layer, q, k, v)
        self.attended.append(layer)
        writer = max(at for at in group.storage_layers if at <= layer)
        results = []
        for index, part in enumerate(self._parts):
            span, start = self._span(index), self._starts[index]
            if k is not None and v is not None:
                part.state.write(layer, start, k[span], v[span])
            keys, values = part.state.read(writer)
            positions = range(start, start + len(part.token_ids))
            found = dense_attention(q[span], keys, values, positions=positions, params=params)
            results.append(found.to(q.dtype))
        return torch.cat(results)

    def group(self, index: int) -> tuple[Any, Any]:
        """Not there: the oracle has no storage."""
        raise NotImplementedError("the oracle runs models that reach their state through attend")

    def tap(self, name: str, hidden: Tensor) -> None:
        """Keep every layer output."""
        self.taps[name] = hidden

    def _span(self, index: int) -> slice:
        return slice(*self.batch.query_starts[index : index + 2].tolist())

    def _check(self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None) -> CacheGroupSpec:
        groups = [group for group in self.spec.groups if layer in group.layers]
        assert len(groups) == 1, f"layer {layer} is in {len(groups)} cache groups"
        (group,) = groups
        rows, heads = len(self.positions), group.num_kv_heads
        expected = {
            "q": (q, (rows, self.spec.num_query_heads, group.key_dim)),
            "k": (k, (rows, heads, group.key_dim)),
            "v": (v, (rows, heads, group.value_dim)),
        }
        for name, (value, shape) in expected.items():
            if value is not None:
                assert tuple(value.shape) == shape, f"layer {layer}: {name} is {value.shape}"
        writes = layer in group.storage_layers
        assert (k is not None) == (v is not None) == writes, f"layer {layer}: who writes the group?"
        return group

    def _batch(self, rows: Sequence[int], taps: Sequence[str]) -> Batch:
        counts = [len(part.token_ids) for part in self._parts]
        count, many = sum(counts), len(counts)
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = [np.arange(at, at + n) for at, n in zip(self._starts, counts, strict=True)]
        group = GroupBatch(
            block_tables=np.zeros((many, 0), np.int32),
            write_slots=np.arange(count, dtype=np.int64),
            visible_from=np.zeros(many, np.int32),
        )
        return Batch(
            step=0,
            sequence_ids=tuple(range(many)),
            token_ids=np.concatenate([part.token_ids for part in self._parts]).astype(np.int32),
            token_sources=np.full(count, -1, np.int32),
            positions=np.concatenate(positions).astype(np.int32),
            query_starts=starts,
            context_lengths=np.asarray([part.state.length for part in self._parts], np.int32),
            num_drafts=np.zeros(many, np.int32),
            logit_rows=np.asarray(rows, np.int32),
            logit_sequences=(np.searchsorted(starts, rows, side="right") - 1).astype(np.int32),
            keep_from=np.zeros(many, np.int32),
            groups=(group,) * len(self.spec.groups),
            taps=tuple(taps),
        )


def reference_model(
    family: ModelFamily,
    config: Mapping[str, Any],
    read: Callable[[str], Tensor],
    *,
    dtype: str = "float32",
    device: str = "cpu",
) -> Model:
    """Build a model on the reference ops.

    Args:
        family: builds the model.
        config: Hugging Face configuration.
        read: ``name -> tensor``, as of a checkpoint.
        dtype: computation dtype name.
        device: torch device.
    """
    facts = OpFacts(device_type=device, dtype=dtype)
    choices = choose([("reference", ReferenceKernels().providers())], facts)
    request = BuildRequest(
        config=config,
        spec=family.describe(config, page_size=16, kv_dtype=dtype),
        read=read,
        read_packed=lambda name: None,
        ops=OpTable(choices, facts),
        dtype=dtype,
        device=torch.device(device),
    )
    with torch.inference_mode():
        return family.build(request)


class Oracle:
    """A greedy decoder of one sequence at a time.

    Args:
        model: the model, built for the CPU; see ``reference_model``.
    """

    def __init__(self, model: Model) -> None:
        self.model = model

    @classmethod
    def of(cls, checkpoint: Checkpoint, family: ModelFamily) -> Oracle:
        """The oracle of a checkpoint, in float32 on the reference ops."""
        return cls(reference_model(family, checkpoint.config, checkpoint.read))

    def logits(self, token_ids: Sequence[int], rows: Sequence[int] | None = None) -> Tensor:
        """[len(rows), vocab_size], float32: what follows after each of ``rows`` (default: all)."""
        rows = range(len(token_ids)) if rows is None else rows
        part = Part(state=DenseState(), token_ids=token_ids)
        step = DenseStep(self.model.spec, [part], rows, torch.device("cpu"))
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
        engine: a ``deepinfer_core.engine.engine.Engine``, or what has its methods.
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
    used = [usage.used for usage in engine.stats().pages]
    assert not any(used), f"pages are in use although every request ended: {used}"
