"""``deepinfer dspark calibrate``: temperatures for a draft model, from answers held back."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from attrs import evolve

from deepinfer_core.errors import ConfigError
from deepinfer_dspark.calibration import Quality, fit, quality, reliability_svg
from deepinfer_dspark.checkpoint import load, save
from deepinfer_dspark.training.data import read_answers
from deepinfer_dspark.training.evaluate import Evaluator
from deepinfer_dspark.training.target import open_target

LEAST = 200
"""Blocks without which temperatures would be noise."""


def calibrate_model(
    model: Path,
    draft: Path,
    answers: Path,
    features: Path,
    *,
    picture: Path | None,
    limit: int | None,
    write: bool,
) -> dict[str, Any]:
    """Fit on every other answer, measure on the rest.

    Args:
        model: the target.
        draft: folder of the draft model; its config.json gets the temperatures.
        answers: file of answers the draft model was not trained on.
        features: folder of computed features.
        picture: where the reliability diagram goes, an SVG.
        limit: answers used, at most.
        write: whether to change the draft model.

    Raises:
        ConfigError: too few answers, or a draft model without confidence head.
    """
    checkpoint = load(draft)
    if not checkpoint.shape.confidence_head:
        raise ConfigError(f"{draft}: this draft model has no confidence head to calibrate")
    evaluator = Evaluator(checkpoint, open_target(model), features)
    used = list(itertools.islice(read_answers(answers), limit))
    logits, happened = evaluator.confidences(used[0::2])
    if len(logits) < LEAST:
        raise ConfigError(
            f"{answers}: {len(logits)} blocks are too few to calibrate by; "
            f"give answers with at least {2 * LEAST} tokens"
        )
    temperatures = fit(logits, happened)
    held_logits, held_happened = evaluator.confidences(used[1::2])
    plain = (1.0,) * len(temperatures)
    before = quality(held_logits, held_happened, plain)
    after = quality(held_logits, held_happened, temperatures)
    if picture is not None:
        picture.write_text(reliability_svg(before, after, f"Confidence of {draft.name}"))
    if write:
        config = {**checkpoint.config, "confidence_temperatures": list(temperatures)}
        save(evolve(checkpoint, config=config), draft)
    return {
        "draft": str(draft),
        "temperatures": list(temperatures),
        "blocks": {"fit": len(logits), "measured": len(held_logits)},
        "before": _figures(before),
        "after": _figures(after),
    }


def _figures(found: Quality) -> dict[str, Any]:
    return {
        "ece": round(found.ece, 4),
        "auc": round(found.auc, 4),
        "ece_by_position": [round(value, 4) for value in found.by_position],
    }
