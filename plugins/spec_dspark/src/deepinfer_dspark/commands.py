"""``deepinfer dspark``: answers, train, eval, calibrate, convert. Made without heavy imports."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from deepinfer_core.cli.options import FiniteRange

PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False)
LAYERS = "8,19,28"
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
    from deepinfer_core.cli.session import locate

    return locate(model)


def _layers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r}: expected numbers such as {LAYERS}", param_hint="--target-layers"
        ) from None


def _show(figures: Mapping[str, Any]) -> None:
    click.echo(json.dumps(dict(figures)))


@dspark.command()
@_model_option
@click.option("--prompts", multiple=True, type=PATH, required=True, help="Prompts, JSON lines.")
@click.option("--out", type=PATH, required=True, help="File of answers; a run goes on in it.")
@click.option("--rounds", type=POSITIVE, default=2, show_default=True, help="Answers a prompt.")
@click.option(
    "--temperature",
    type=FiniteRange(min=0),
    default=0.7,
    show_default=True,
    help="Of answers after the first.",
)
@click.option("--max-tokens", type=POSITIVE, default=200, show_default=True, help="Of an answer.")
@click.option(
    "--max-sequences", type=POSITIVE, default=64, show_default=True, help="Answered at a time."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of order and draws.")
@click.option("--features", type=FOLDER, help="Keep layer outputs here, for `train` and `eval`.")
@click.option("--target-layers", default=LAYERS, show_default=True, help="Layers that are kept.")
def answers(
    model: str,
    prompts: tuple[Path, ...],
    out: Path,
    features: Path | None,
    target_layers: str,
    **options: Any,
) -> None:
    """Let the target answer prompts, many at a time: what `train` learns from.

    A line of a prompt file is an object with "turns" (a list of user messages) or "prompt", and
    perhaps "domain". The first answer of each prompt is greedy, further ones are drawn.
    """
    from deepinfer_dspark.config import RecorderConfig
    from deepinfer_dspark.training.answers import AnswerOptions, answer_prompts

    layers = _layers(target_layers)
    record = None if features is None else RecorderConfig(folder=str(features), layers=layers)
    answer_prompts(_locate(model), prompts, out, AnswerOptions(**options), _show, record)


@dspark.command()
@_model_option
@click.option("--answers", "answers_path", type=PATH, required=True, help="From `answers`.")
@click.option("--out", type=FOLDER, required=True, help="Folder; a run goes on in it.")
@click.option("--features", type=FOLDER, help="Folder of features, to be shared by runs.")
@click.option("--start", type=FOLDER, help="Draft model to begin with, in either form.")
@click.option("--steps", type=POSITIVE, default=4000, show_default=True, help="Steps in all.")
@click.option("--layers", type=POSITIVE, default=1, show_default=True, help="Draft layers.")
@click.option("--block-size", type=POSITIVE, default=5, show_default=True, help="1 makes an MTP-1.")
@click.option("--target-layers", default=LAYERS, show_default=True, help="Layers that are read.")
@click.option(
    "--draft-vocab",
    type=POSITIVE,
    default=4096,
    show_default=True,
    help="Tokens that can be drafted.",
)
@click.option(
    "--markov-rank", type=POSITIVE, default=64, show_default=True, help="Of the sequential head."
)
@click.option(
    "--markov-head", type=click.Choice(["vanilla", "gated", "rnn"]), default="gated",
    show_default=True, help="Kind of the sequential head.",
)  # fmt: skip
@click.option(
    "--window",
    type=click.IntRange(min=0),
    default=512,
    show_default=True,
    help="Context seen; 0 = all.",
)
@click.option(
    "--texts-per-step", type=POSITIVE, default=4, show_default=True, help="Texts of a step."
)
@click.option("--anchors", type=POSITIVE, default=48, show_default=True, help="Blocks a text.")
@click.option(
    "--single-share",
    type=FiniteRange(0, 1),
    default=0.5,
    show_default=True,
    help="Steps that train first drafts only.",
)
@click.option(
    "--learning-rate",
    type=FiniteRange(min=0),
    default=6e-4,
    show_default=True,
    help="At its peak.",
)
@click.option(
    "--decay-share",
    type=FiniteRange(0, 1),
    default=0.3,
    show_default=True,
    help="Last steps, as a share of all, in which the learning rate falls to 0.",
)
@click.option(
    "--cross-entropy-steps",
    type=click.IntRange(min=0),
    default=1500,
    show_default=True,
    help="Steps until the distance of distributions is what mostly counts.",
)
@click.option(
    "--check-every", type=POSITIVE, default=100, show_default=True, help="Steps between checks."
)
@click.option("--threads", type=POSITIVE, default=1, show_default=True, help="Computing threads.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of order and draws.")
def train(
    model: str,
    answers_path: Path,
    out: Path,
    features: Path | None,
    start: Path | None,
    threads: int,
    **options: Any,
) -> None:
    """Train a draft model on a target's answers; stop it at any time, and run it again to go on.

    Every check prints one line: loss, acceptance by position on answers held back, the tau to
    expect of them, and writes the model in its compact form to OUT/compact, and to OUT/public.
    """
    import torch

    from deepinfer_dspark.checkpoint import load
    from deepinfer_dspark.training.target import open_target
    from deepinfer_dspark.training.trainer import Trainer, TrainOptions

    torch.set_num_threads(threads)
    trainer = Trainer(
        open_target(_locate(model)),
        TrainOptions(
            target_layer_ids=_layers(options.pop("target_layers")),
            draft_vocab_size=options.pop("draft_vocab"),
            markov_head_type=options.pop("markov_head"),
            anchors_per_text=options.pop("anchors"),
            **options,
        ),
        answers=answers_path,
        folder=out,
        features=features,
        start=None if start is None else load(start),
        report=_show,
    )
    trainer.run()
    trainer.save_public()


@dspark.command("eval")
@_model_option
@click.option("--draft", type=FOLDER, required=True, help="Draft model, in either form.")
@click.option("--answers", "answers_path", type=PATH, required=True, help="From `answers`.")
@click.option("--features", type=FOLDER, required=True, help="Folder of computed features.")
@click.option("--limit", type=POSITIVE, help="Answers used, at most.")
@click.option("--threads", type=POSITIVE, default=1, show_default=True, help="Computing threads.")
def evaluate(
    model: str, draft: Path, answers_path: Path, features: Path, limit: int | None, threads: int
) -> None:
    """Measure a draft model on answers: tau by domain, acceptance by position, speed of a pass.

    Prints one JSON object. "tau" decodes the greedy answers with the drafts; "acceptance" and
    "expected_tau" are exact expectations at temperature 1.
    """
    import itertools

    import torch

    from deepinfer_dspark.checkpoint import load
    from deepinfer_dspark.training.data import read_answers
    from deepinfer_dspark.training.evaluate import Evaluator, pass_ms
    from deepinfer_dspark.training.target import open_target

    torch.set_num_threads(threads)
    evaluator = Evaluator(load(draft), open_target(_locate(model)), features)
    found = evaluator.evaluate(itertools.islice(read_answers(answers_path), limit))
    passed = pass_ms(evaluator.network, evaluator.shared, context=256)
    _show(
        {
            "draft": str(draft),
            "domains": {name: figures.as_dict() for name, figures in found.items()},
            "draft_pass_ms": round(passed, 2),
        }
    )


@dspark.command()
@_model_option
@click.option("--draft", type=FOLDER, required=True, help="Draft model, in either form.")
@click.option("--answers", "answers_path", type=PATH, required=True, help="From `answers`.")
@click.option("--features", type=FOLDER, required=True, help="Folder of computed features.")
@click.option("--picture", type=PATH, help="Reliability diagram to write, *.svg.")
@click.option("--limit", type=POSITIVE, help="Answers used, at most.")
@click.option("--dry-run", is_flag=True, help="Do not write the temperatures into the model.")
def calibrate(
    model: str,
    draft: Path,
    answers_path: Path,
    features: Path,
    picture: Path | None,
    limit: int | None,
    dry_run: bool,
) -> None:
    """Fit the confidence head's temperatures, one position after another, and write them into it.

    Half of the answers fit, the other half measures: calibration error and area under the curve
    before and after, and the reliability diagram.
    """
    from deepinfer_dspark.training.calibrate import calibrate_model

    report = calibrate_model(
        _locate(model),
        draft,
        answers_path,
        features,
        picture=picture,
        limit=limit,
        write=not dry_run,
    )
    _show(report)


@dspark.command()
@_model_option
@click.option("--to", type=click.Choice(["public", "compact"]), required=True, help="The form.")
@click.argument("source", type=FOLDER)
@click.argument("folder", type=FOLDER)
def convert(model: str, to: str, source: Path, folder: Path) -> None:
    """Write the draft model in SOURCE to FOLDER in another form.

    "public" has copies of the target's embedding and head and is what other programs read;
    "compact" leaves them out, in 16 bits.
    """
    import torch

    from deepinfer_dspark.checkpoint import compacted, completed, load, save
    from deepinfer_dspark.training.target import open_target

    checkpoint = load(source)
    if to == "compact":
        save(compacted(checkpoint, torch.float16), folder)
        return
    target = open_target(_locate(model))
    save(completed(checkpoint, target.embedding(), target.head_weight()), folder)
