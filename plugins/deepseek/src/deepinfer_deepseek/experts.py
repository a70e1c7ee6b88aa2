"""The feed-forward part: experts chosen by bias-corrected scores, and one that sees every token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from deepinfer_core.errors import CheckpointError
from deepinfer_core.interfaces.kernels import GatedActivation
from deepinfer_deepseek.checkpoint.loading import joined, matrix, stacked
from deepinfer_deepseek.numerics import Loader, added, apply_rows, sigmoid, wide
from deepinfer_deepseek.stack import ExpertConfig

_NAMES = ("w1", "w3", "w2")
"""Gate, up, down."""

_Handles: TypeAlias = tuple[Any, Any]

_SMALLEST = 1e-20
"""Keeps the weights of experts that all scored zero from being undefined."""


class Gate:
    """Chooses experts.

    A bias that balances load takes part in the choice, never in the weight ("noaux_tc", DeepSeek-V3
    2024).
    """

    def __init__(self, config: ExpertConfig, base: str, load: Loader) -> None:
        self._config = config
        self._project = load.wide_projection(f"{base}gate.weight")
        self._load_choice(base, load)

    def _load_choice(self, base: str, load: Loader) -> None:
        self._bias = load.wide(f"{base}gate.bias")

    def __call__(self, x: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """[n, hidden] -> weights [n, chosen] and expert ids [n, chosen].

        Of experts that score the same the one with the lower number is chosen.
        """
        logits = self._project(wide(x)) / self._config.temperature
        # log(1 + exp(x)) without overflow.
        scores = (logits.clamp(min=0) + (-logits.abs()).exp().log1p()).sqrt()
        ids = self._choose(scores, token_ids)
        chosen = scores.gather(1, ids)
        total = added(chosen.unbind(-1)).unsqueeze(-1)
        return chosen / (total + _SMALLEST) * self._config.scale, ids

    def _choose(self, scores: Tensor, token_ids: Tensor | None) -> Tensor:
        order = torch.sort(scores + self._bias, dim=-1, descending=True, stable=True).indices
        return order[:, : self._config.per_token]


class HashGate(Gate):
    """Looks experts up by token (V4's first layers); scores are their weights only.

    Raises:
        CheckpointError: the table names experts that are not there.
    """

    def _load_choice(self, base: str, load: Loader) -> None:
        name = f"{base}gate.tid2eid"
        table = load.request.read(name).long()
        if bool(((table < 0) | (table >= self._config.num_experts)).any()):
            raise CheckpointError(f"{name}: names experts beyond {self._config.num_experts}")
        self._table = table.to(load.request.device)

    def _choose(self, scores: Tensor, token_ids: Tensor | None) -> Tensor:
        assert token_ids is not None, "experts are chosen by token"
        return self._table.index_select(0, token_ids)


class Experts:
    """Gate, routed experts and the shared one of a layer.

    Args:
        config: of the layer.
        base: what names of its parameters begin with, as in ``layers.0.ffn.``.
        load: for its parameters.
        hashed: the gate looks experts up by token.
    """

    def __init__(
        self, config: ExpertConfig, base: str, load: Loader, *, hashed: bool = False
    ) -> None:
        self._limit, self._linear = config.limit, load.ops.linear
        self._gate = (HashGate if hashed else Gate)(config, base, load)
        self._inputs = load.inputs_of(f"{base}experts.0.w1.weight")
        self._op = load.ops.moe_experts
        places = [f"{base}experts.{number}" for number in range(config.num_experts)]
        self._grouped = self._as_stored(places, load)
        self._experts = []
        if self._grouped is None:
            self._experts = [self._held(place, load) for place in places]
        gate, up, down = (load.tensor(f"{base}shared_experts.{name}.weight") for name in _NAMES)
        self._shared = self._prepared(torch.cat([gate, up]), down)

    def _as_stored(self, places: list[str], load: Loader) -> Any:
        """Handle of op "moe_experts" where it multiplies these matrices as stored, else None."""
        gate_up, down = [], []
        for place in places:
            parts = [load.stored(self._op, f"{place}.{name}.weight") for name in _NAMES]
            found = [part for part in parts if part is not None]
            both = joined(found[:2]) if len(found) == len(parts) else None
            if both is None:
                return None
            gate_up.append(both)
            down.append(found[2])
        activation = GatedActivation(limit=self._limit)
        return self._op.prepare(gate_up, down, activation=activation)

    def _held(self, place: str, load: Loader) -> Callable[[], _Handles]:
        """An expert as it is stored: packed matrices are expanded for each step that uses them."""
        gate, up, down = (matrix(load.request, f"{place}.{name}.weight") for name in _NAMES)

        def expanded() -> _Handles:
            return self._prepared(stacked([gate, up]), down.dense())

        if any(held.packed for held in (gate, up, down)):
            return expanded
        handles = expanded()
        return lambda: handles

    def _prepared(self, gate_up: Tensor, down: Tensor) -> _Handles:
        """Handles of gate and up in one, and of down."""
        prepare = self._linear.prepare
        return prepare(gate_up, None), prepare(down, None)

    def __call__(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """[n, hidden] -> [n, hidden]; contributions are added in ascending expert id.

        Args:
            x: the rows.
            token_ids: [n], int64, for a gate that goes by them.
        """
        weights, ids = self._gate(x, token_ids)
        if self._grouped is not None:
            routed = wide(self._op.run(x, weights, ids, self._grouped))
            return (routed + wide(self._run(self._shared, x, None))).to(x.dtype)
        out = torch.zeros_like(x, dtype=weights.dtype)
        for expert in torch.unique(ids).tolist():
            rows, places = torch.nonzero(ids == expert, as_tuple=True)
            out[rows] += wide(self._run(self._experts[expert](), x[rows], weights[rows, places]))
        return (out + wide(self._run(self._shared, x, None))).to(x.dtype)

    def _run(self, matrices: _Handles, x: Tensor, weights: Tensor | None) -> Tensor:
        gate_up, down = matrices
        gate, up = wide(apply_rows(self._linear, gate_up, self._inputs(x))).chunk(2, -1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        hidden = sigmoid(gate) * gate * up
        if weights is not None:
            hidden = hidden * weights.unsqueeze(-1)
        return apply_rows(self._linear, down, self._inputs(hidden.to(x.dtype)))
