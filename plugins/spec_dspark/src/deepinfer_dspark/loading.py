"""From options to a drafter: find a draft model, check that it fits the target, put it together."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.drafter import BlockDrafter, DrafterContext
from deepinfer_dspark.calibration import OnlineCalibration
from deepinfer_dspark.checkpoint import EMBEDDING, HEAD, DraftCheckpoint, load, probe_ids
from deepinfer_dspark.config import DsparkConfig, Mtp1Config
from deepinfer_dspark.drafter import DsparkDrafter
from deepinfer_dspark.network import DraftNetwork
from deepinfer_dspark.runner import DraftRunner

SHIPPED = Path(__file__).parent / "models"
"""Folder of the draft models that come with the plugin, one for each target."""
SIMILAR = 0.95
"""Least cosine of two embeddings of a token that pass for the same in another precision."""


def build_dspark(config: DsparkConfig, context: DrafterContext) -> DsparkDrafter:
    """Make drafter ``dspark``.

    Raises:
        CheckpointError: its files cannot be used.
        CompositionError: the draft model does not fit the target; says in what.
    """
    inside = _inside(config.checkpoint, context)
    if inside is not None:
        return _drafting_with(inside, config, context, temperatures=temperatures(context.config))
    checkpoint = _find(config.checkpoint, context)
    return assemble(
        checkpoint,
        context,
        block_size=config.block_size,
        replay_tokens=config.replay_tokens,
        calibrate_every=config.calibrate_every,
    )


def _inside(folder: str, context: DrafterContext) -> BlockDrafter | None:
    """What the target carries itself, unless a draft model was named."""
    return None if folder or context.block_drafter is None else context.block_drafter()


def _drafting_with(
    inside: BlockDrafter,
    config: DsparkConfig,
    context: DrafterContext,
    *,
    temperatures: tuple[float, ...],
) -> DsparkDrafter:
    """Draft with what the target carries itself."""
    if config.block_size > inside.block_size:
        raise CompositionError(
            f"block size {config.block_size}: this model's own drafter was trained for "
            f"{inside.block_size}; lower drafter.block_size"
        )
    vocab_size = context.model_spec.vocab_size
    return DsparkDrafter(
        inside,
        embed=context.model.embed,
        draft_vocab_ids=torch.arange(vocab_size),
        vocab_size=vocab_size,
        calibration=OnlineCalibration(
            inside.block_size, temperatures, every=config.calibrate_every
        ),
        replay_tokens=config.replay_tokens,
        independent=context.verification == "rejection",
        block_size=config.block_size,
        draw=getattr(context.ops, "draw", None),
    )


def build_mtp1(config: Mtp1Config, context: DrafterContext) -> DsparkDrafter:
    """Make drafter ``mtp1``; raises as `build_dspark`."""
    inside = _inside(config.checkpoint, context)
    if inside is not None:
        one = DsparkConfig(block_size=1, replay_tokens=config.replay_tokens, calibrate_every=0)
        return _drafting_with(inside, one, context, temperatures=temperatures(context.config))
    checkpoint = _find(config.checkpoint, context)
    return assemble(
        checkpoint, context, block_size=1, replay_tokens=config.replay_tokens, calibrate_every=0
    )


def _find(folder: str, context: DrafterContext) -> DraftCheckpoint:
    if folder:
        checkpoint = load(Path(folder).expanduser())
        problems = objections(checkpoint, context)
        if problems:
            raise CompositionError(
                f"the draft model in {folder} does not fit this target", problems
            )
        return checkpoint
    refused = []
    for path in sorted(SHIPPED.glob("*/config.json")):
        checkpoint = load(path.parent)
        problems = objections(checkpoint, context)
        if not problems:
            return checkpoint
        refused.append(f"{path.parent.name}: {'; '.join(problems)}")
    raise CompositionError(
        "the plugin brings no draft model for this target; train one with "
        "'deepinfer dspark train' and name its folder in drafter.checkpoint",
        refused,
    )


def objections(checkpoint: DraftCheckpoint, context: DrafterContext) -> list[str]:
    """Return in what a draft model does not fit a target; one line each."""
    shape, spec = checkpoint.shape, context.model_spec
    problems = [
        f"{name}: made for {own}, the target has {other}"
        for name, own, other in (
            ("vocabulary", shape.decoder.vocab_size, spec.vocab_size),
            ("hidden size", shape.decoder.hidden_size, spec.hidden_size),
        )
        if own != other
    ]
    beyond = [layer for layer in shape.target_layer_ids if layer >= spec.num_layers]
    if beyond:
        problems.append(f"target layers: reads {beyond}, the target has 0 to {spec.num_layers - 1}")
    if not problems and context.model is not None:
        closest = _likeness(checkpoint.probe, context)
        if closest < SIMILAR:
            problems.append(
                "target: it was trained for another one (embeddings of the same tokens have a "
                f"cosine of {closest:.2f} at worst)"
            )
    return problems


def _likeness(probe: Tensor, context: DrafterContext) -> float:
    ids = probe_ids(context.model_spec.vocab_size)
    found = context.model.embed(ids.to(context.device)).float().cpu()
    # Rows of tokens that were never trained may be 0.
    used = (probe.norm(dim=-1) > 1e-6) & (found.norm(dim=-1) > 1e-6)
    if not bool(used.any()):
        return 1.0
    return float(torch.cosine_similarity(probe[used], found[used], -1).min())


@frozen(kw_only=True, eq=False)
class TargetTensors:
    """What a draft model borrows.

    Attributes:
        embed: [n] int64 -> [n, hidden_size].
        head: [draft_vocab_size, hidden_size], float32.
    """

    embed: Any
    head: Tensor


def borrow(checkpoint: DraftCheckpoint, context: DrafterContext) -> TargetTensors:
    """Take embedding and head from the target, or from the draft model's copies without one.

    Raises:
        CompositionError: neither has them.
    """
    ids = checkpoint.draft_vocab_ids
    if checkpoint.is_compact and (context.model is None or context.read is None):
        raise CompositionError(
            f"{checkpoint.where}: a draft model without copies of the target's tensors needs the "
            "target; convert it with 'deepinfer dspark convert --to public'"
        )
    if checkpoint.is_compact:
        return TargetTensors(embed=context.model.embed, head=_target_head(context)[ids].float())
    table = checkpoint.tensors[EMBEDDING].float()
    embed = context.model.embed if context.model is not None else table.__getitem__
    return TargetTensors(embed=embed, head=checkpoint.tensors[HEAD][ids].float())


def _target_head(context: DrafterContext) -> Tensor:
    tied = bool(context.config.get("tie_word_embeddings"))
    assert context.read is not None
    return context.read("model.embed_tokens.weight" if tied else "lm_head.weight")


def assemble(
    checkpoint: DraftCheckpoint,
    context: DrafterContext,
    *,
    block_size: int,
    replay_tokens: int,
    calibrate_every: int,
) -> DsparkDrafter:
    """Make a drafter of a draft model that fits.

    Args:
        checkpoint: in either form.
        context: of the target.
        block_size: rows of a pass, 0 = what the draft model was trained for.
        replay_tokens: see ``Drafter.replay_tokens``.
        calibrate_every: judged blocks after which confidences are calibrated again, 0 = never.

    Raises:
        CompositionError: the block size exceeds what the draft model was trained for.
    """
    shape = checkpoint.shape
    if block_size > shape.block_size:
        raise CompositionError(
            f"block size {block_size}: the draft model in {checkpoint.where} was trained for "
            f"{shape.block_size}; lower drafter.block_size"
        )
    borrowed = borrow(checkpoint, context)
    network = DraftNetwork(shape)
    network.load_state_dict(checkpoint.network_state())
    mask = borrowed.embed(torch.tensor([shape.mask_token_id]))[0].float()
    return DsparkDrafter(
        DraftRunner(
            network,
            borrowed.head,
            mask,
            block_size or shape.block_size,
            checkpoint.draft_vocab_ids,
            context.ops,
        ),
        embed=borrowed.embed,
        draft_vocab_ids=checkpoint.draft_vocab_ids,
        vocab_size=shape.decoder.vocab_size,
        calibration=OnlineCalibration(
            shape.block_size, temperatures(checkpoint.config), every=calibrate_every
        ),
        replay_tokens=replay_tokens,
        independent=context.verification == "rejection",
        draw=getattr(context.ops, "draw", None),
    )


def temperatures(config: Mapping[str, Any]) -> tuple[float, ...]:
    """Return the calibration of the confidence head, one number for each draft of a block."""
    return tuple(float(value) for value in config.get("confidence_temperatures", ()))
