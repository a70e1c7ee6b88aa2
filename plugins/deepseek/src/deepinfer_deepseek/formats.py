"""How vectors are rounded before they go into a cache, or meet what comes out of one.

Production kernels store caches in eight and four bits and multiply rounded numbers. Here the same
numbers come from exact arithmetic on wider ones, so that what a request sees does not depend on
whether a vector was read from the cache or has just been computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
from attrs import frozen
from torch import Tensor

from deepinfer_core.errors import CheckpointError
from deepinfer_deepseek.config import V41Config
from deepinfer_deepseek.quant.blocks import FP4, FP4_16, FP8, BlockFormat, Record

Round = Callable[[Tensor], Tensor]
"""[..., dim] -> the same shape and dtype."""


def unchanged(x: Tensor) -> Tensor:
    """Round nothing."""
    return x


@frozen(kw_only=True)
class CacheFormats:
    """Rounding of each kind of vector.

    Attributes:
        window: keys of windows.
        entry: compressed entries.
        index: queries and keys of the indexer.
    """

    window: Round = unchanged
    entry: Round = unchanged
    index: Round = unchanged


def published_formats(config: V41Config) -> CacheFormats:
    """What V4.1's published kernels round cached vectors to, bit for bit.

    Raises:
        CheckpointError: blocks do not divide the vectors.
    """
    _check_widths({"head_dim": config.head_dim, "index_head_dim": config.index.head_dim}, FP8)
    window = Record(format=FP8, dim=config.head_dim)
    entry = Record(format=FP4_16, dim=config.head_dim) if config.fp4_entries else window
    index = Record(format=FP4, dim=config.index.head_dim)
    return CacheFormats(window=window.round, entry=entry.round, index=index.round)


def published_inputs(config: V41Config) -> Round:
    """How rows are rounded before they meet a matrix that is published in FP8 or FP4.

    Raises:
        CheckpointError: the checkpoint has no such matrix, or blocks do not divide the rows.
    """
    if config.quantization is None:
        raise CheckpointError(
            "this checkpoint has no quantization_config, so there are no formats to emulate; leave "
            "model_component.quant off"
        )
    blocks = attrs.evolve(FP8, block=config.quantization.block[1])
    widths = {
        "hidden_size": config.hidden_size,
        "q_lora_rank": config.q_rank,
        "o_groups x o_lora_rank": config.o_groups * config.o_rank,
        "moe_intermediate_size": config.experts.size,
    }
    if config.engram is not None:
        widths["n-grams x engram_head_dim"] = config.engram.num_rows * config.engram.head_dim
    _check_widths(widths, blocks)
    return blocks.round


def _check_widths(widths: Mapping[str, int], blocks: BlockFormat) -> None:
    problems = [
        f"{name} {width} is not a multiple of {blocks.block}"
        for name, width in widths.items()
        if width % blocks.block
    ]
    if problems:
        raise CheckpointError("vectors of this model do not fill blocks of numbers", problems)
