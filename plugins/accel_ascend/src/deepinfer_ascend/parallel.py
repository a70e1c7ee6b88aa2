"""Experts spread over devices: the calls that send rows to them and bring results back.

A contract only: they need one process a device, which the executor of this version does not have.
Calls and checks are ready, and the real torch_npu's shape functions accept them.
"""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_ascend.errors import require


@frozen(kw_only=True)
class ExpertGroup:
    """Processes that share experts.

    Attributes:
        name: of HCCL's communicator.
        size: processes.
        rank: of this one.
        num_experts: of all of them, a multiple of ``size``.
        max_rows: most rows that a process sends in a step.
    """

    name: str
    size: int
    rank: int
    num_experts: int
    max_rows: int


@frozen(kw_only=True, eq=False)
class Sent:
    """Rows that arrived here, and what is needed to answer.

    Attributes:
        rows: [room, hidden], sorted by expert.
        counts: rows of each local expert, int64.
        assist: where they came from.
        sent: rows to each process.
    """

    rows: Tensor
    counts: Tensor
    assist: Tensor
    sent: Tensor


def dispatch(x: Tensor, ids: Tensor, weights: Tensor, group: ExpertGroup) -> Sent:
    """Send each row to the processes of its experts.

    Args:
        x: [n, hidden], bfloat16.
        ids: [n, top_k], int32.
        weights: [n, top_k], float32.
        group: who takes part.
    """
    op = "npu_moe_distribute_dispatch_v2"
    _check(op, x, ids, weights, group)
    found: Any = torch.ops.npu.npu_moe_distribute_dispatch_v2(
        x, ids, group.name, group.size, group.rank, group.num_experts, expert_scales=weights,
        shared_expert_num=0, quant_mode=0, global_bs=group.max_rows * group.size,
        expert_token_nums_type=1,
    )  # fmt: skip
    return Sent(rows=found[0], counts=found[3], assist=found[2], sent=found[4])


def combine(y: Tensor, sent: Sent, ids: Tensor, weights: Tensor, group: ExpertGroup) -> Tensor:
    """Bring results back and add them up, each times its weight; [n, hidden].

    Args:
        y: [room, hidden], what experts made of ``sent.rows``.
        sent: what ``dispatch`` returned.
        ids: as given to it.
        weights: likewise.
        group: likewise.
    """
    op = "npu_moe_distribute_combine_v2"
    require(y.shape == sent.rows.shape, op, f"expand_x is {list(y.shape)}")
    out: Tensor = torch.ops.npu.npu_moe_distribute_combine_v2(
        y, ids, sent.assist, sent.sent, weights, group.name, group.size, group.rank,
        group.num_experts, shared_expert_num=0, global_bs=group.max_rows * group.size,
    )  # fmt: skip
    return out


def _check(op: str, x: Tensor, ids: Tensor, weights: Tensor, group: ExpertGroup) -> None:
    require(x.dim() == 2 and x.dtype == torch.bfloat16, op, f"x is {x.dtype} {list(x.shape)}")
    rows = x.shape[0]
    require(0 < rows <= group.max_rows, op, f"{rows} rows, at most {group.max_rows}")
    fits = ids.dim() == 2 and ids.shape[0] == rows and ids.dtype == torch.int32
    require(fits, op, f"expert_ids is {ids.dtype} {list(ids.shape)}: int32, one row a row")
    same = weights.shape == ids.shape and weights.dtype == torch.float32
    require(same, op, f"expert_scales is {weights.dtype} {list(weights.shape)}")
    even = group.size > 1 and group.num_experts % group.size == 0
    require(even, op, f"{group.num_experts} experts on {group.size} processes")
    require(0 <= group.rank < group.size, op, f"rank {group.rank} of {group.size}")
