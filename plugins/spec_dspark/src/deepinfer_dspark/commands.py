"""``deepinfer dspark``: answers, train, eval, calibrate, convert. Made without heavy imports."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
POSITIVE = click.IntRange(min=1)


def build(config: Any, context: Any) -> click.Command:
    """Make the command group."""
    return dspark


@click.group()
def dspark() -> None:
    """Train, evaluate, calibrate and convert draft models for speculative decoding."""


def _model_option(function: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--model",
        metavar="MODEL",
        default="smollm2-135m-instruct",
        show_default=True,
        help="The target: a path, a registered name or a hub id.",
    )(function)


def _locate(model: str) -> Path:
    from deepinfer_core.hub import (
        TerminalProgress,
        default_cache_dir,
        find_model,
        hugging_face_home,
    )

    return find_model(
        model,
        default_cache_dir(os.environ),
        False,
        hf_home=hugging_face_home(os.environ),
        progress=TerminalProgress(sys.stderr),
    )


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(json.dumps(dict(figures)))


@dspark.command()
@_model_option
@click.option("--prompts", multiple=True, type=PATH, required=True, help="Prompts, JSON lines.")
@click.option("--out", type=PATH, required=True, help="File of answers; a run goes on in it.")
@click.option("--rounds", type=POSITIVE, default=2, show_default=True, help="Answers a prompt.")
@click.option("--temperature", type=click.FloatRange(min=0), default=0.7, show_default=True)
@click.option("--max-tokens", type=POSITIVE, default=200, show_default=True)
@click.option("--max-sequences", type=POSITIVE, default=64, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def answers(model: str, prompts: tuple[Path, ...], out: Path, **options: Any) -> None:
    """Let the target answer prompts, many at a time: what `train` learns from.

    A line of a prompt file is an object with "turns" (a list of user messages) or "prompt", and
    perhaps "domain". The first answer of each prompt is greedy, further ones are drawn.
    """
    from deepinfer_dspark.training.answers import AnswerOptions, answer_prompts

    answer_prompts(_locate(model), prompts, out, AnswerOptions(**options), _show)


@dspark.command()
@_model_option
@click.option("--answers", "answers_path", type=PATH, required=True, help="From `answers`.")
@click.option("--out", type=FOLDER, required=True, help="Folder; a run goes on in it.")
@click.option("--features", type=FOLDER, help="Folder of computed features, to be shared by runs.")
@click.option("--steps", type=POSITIVE, default=4000, show_default=True)
@click.option("--layers", type=POSITIVE, default=1, show_default=True, help="Draft layers.")
@click.option("--block-size", type=POSITIVE, default=5, show_default=True, help="1 makes an MTP-1.")
@click.option("--target-layers", default="8,19,28", show_default=True, help="Layers that are read.")
@click.option("--draft-vocab", type=POSITIVE, default=4096, show_default=True)
@click.option("--markov-rank", type=POSITIVE, default=64, show_default=True)
@click.option(
    "--markov-head", type=click.Choice(["vanilla", "gated", "rnn"]), default="gated",
    show_default=True,
)  # fmt: skip
@click.option("--window", type=click.IntRange(min=0), default=512, show_default=True)
@click.option("--texts-per-step", type=POSITIVE, default=4, show_default=True)
@click.option("--anchors", type=POSITIVE, default=48, show_default=True, help="Blocks a text.")
@click.option("--learning-rate", type=float, default=6e-4, show_default=True)
@click.option("--check-every", type=POSITIVE, default=100, show_default=True)
@click.option("--threads", type=POSITIVE, default=1, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def train(
    model: str, answers_path: Path, out: Path, features: Path | None, threads: int, **options: Any
) -> None:
    """Train a draft model on a target's answers; stop it at any time, and run it again to go on.

    Every check prints one line: loss, acceptance by position on answers held back, the tau to
    expect of them, and writes the model in its compact form to OUT/compact, and to OUT/public.
    """
    import torch

    from deepinfer_core.errors import ConfigError
    from deepinfer_dspark.training.target import open_target
    from deepinfer_dspark.training.trainer import Trainer, TrainOptions

    torch.set_num_threads(threads)
    try:
        layers = tuple(int(part) for part in options.pop("target_layers").split(","))
    except ValueError:
        raise ConfigError("--target-layers: expected numbers such as 8,19,28") from None
    trainer = Trainer(
        open_target(_locate(model)),
        TrainOptions(
            target_layer_ids=layers,
            draft_vocab_size=options.pop("draft_vocab"),
            markov_head_type=options.pop("markov_head"),
            anchors_per_text=options.pop("anchors"),
            **options,
        ),
        answers=answers_path,
        folder=out,
        features=features,
        report=_show,
    )
    trainer.run()
    trainer.save_public()
