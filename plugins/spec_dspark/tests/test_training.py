"""Training on a tiny target: it learns, goes on where it was, and what it saves can draft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from attrs import evolve
from click.testing import CliRunner

from deepinfer_core import LLM, EngineConfig, EngineOptions, SamplingParams
from deepinfer_core.builtin import cpu
from deepinfer_core.config import Choice
from deepinfer_core.errors import CompositionError, ConfigError
from deepinfer_core.testing.tiny import write_tiny_model
from deepinfer_dspark.checkpoint import load
from deepinfer_dspark.commands import dspark
from deepinfer_dspark.config import RecorderConfig
from deepinfer_dspark.training.answers import AnswerOptions, answer_prompts, questions
from deepinfer_dspark.training.data import UNKNOWN, FeatureFolder, Features, read_answers
from deepinfer_dspark.training.target import Target, open_target
from deepinfer_dspark.training.trainer import Trainer, TrainOptions

OPTIONS = TrainOptions(
    block_size=3,
    target_layer_ids=(0, 1),
    draft_vocab_size=200,
    markov_rank=16,
    mask_token_id=3,
    steps=30,
    texts_per_step=2,
    anchors_per_text=8,
    warmup_steps=5,
    average=0.9,
    check_every=15,
    check_share=5,
    window=16,
    learning_rate=3e-3,
)


@pytest.fixture(scope="module", autouse=True)
def in_float32() -> Iterator[None]:
    """Engines compute as the trainer does, also where the CPU multiplies bfloat16 best."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "has_native_bfloat16", lambda: False)
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def target(model: Path) -> Target:
    return open_target(model)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """Greedy answers of the tiny model itself."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = folder / "prompts.jsonl"
    lines = [{"domain": "math", "turns": [f"What is {i} and {7 * i}?"]} for i in range(24)]
    prompts.write_text("\n".join(json.dumps(line) for line in lines))
    out = folder / "answers.jsonl"
    options = AnswerOptions(rounds=1, max_tokens=40, max_sequences=8)
    answer_prompts(model, [prompts], out, options, lambda figures: None)
    return out


def test_answers_are_the_targets_own(model: Path, answers: Path) -> None:
    found = list(read_answers(answers))
    assert len(found) == 24
    with LLM(str(model), engine=EngineOptions(kv_pages=64)) as llm:
        for answer in found[:3]:
            params = SamplingParams(temperature=0.0, max_tokens=40)
            result = llm.generate([list(answer.prompt)], params)[0]
            assert result.outputs[0].token_ids == answer.answer


def test_answering_goes_on_where_it_was(model: Path, answers: Path, tmp_path: Path) -> None:
    lines = answers.read_text().splitlines(keepends=True)
    out = tmp_path / "answers.jsonl"
    out.write_text("".join(lines[:-3]) + lines[-1][:20])
    reports: list[Mapping[str, Any]] = []
    options = AnswerOptions(rounds=1, max_tokens=40, max_sequences=8)
    answer_prompts(model, [answers.parent / "prompts.jsonl"], out, options, reports.append)
    assert sorted(out.read_text().splitlines()) == sorted(map(str.strip, lines))
    assert reports[-1]["answers"] == 24


def test_later_answers_are_drawn() -> None:
    asked = list(questions([("a", "math"), ("b", "chat")], AnswerOptions(rounds=3)))
    assert [question.params.temperature for question in asked] == [0.0] * 2 + [0.7] * 4
    assert len({question.key for question in asked}) == 6
    assert len({question.params.seed for question in asked}) == 6


def test_features_are_those_of_the_engine(target: Target) -> None:
    """The trainer's dense pass gives the logits that the engine samples from."""
    ids = [Random(1).randrange(256) for _ in range(30)]
    taps, hidden = target.run(ids, ["embedding", "layer.1"])
    assert torch.equal(taps[0], target.embedding()[ids])
    assert taps[1].shape == hidden.shape == (30, 48)
    partial, _ = target.run(ids[:20], ["embedding", "layer.1"])
    torch.testing.assert_close(partial[1], taps[1][:20], atol=1e-4, rtol=1e-4)


def test_features_come_from_the_engine_as_it_answers(
    model: Path, target: Target, answers: Path, tmp_path: Path
) -> None:
    """They are those of the trainer's own pass, for all but the last tokens of a text."""
    out, folder = tmp_path / "answers.jsonl", tmp_path / "features"
    options = AnswerOptions(rounds=1, max_tokens=40, max_sequences=8)
    answer_prompts(
        model,
        [answers.parent / "prompts.jsonl"],
        out,
        options,
        lambda figures: None,
        RecorderConfig(folder=str(folder), layers=(0, 1)),
    )
    assert sorted(out.read_text().splitlines()) == sorted(answers.read_text().splitlines())
    recorded = FeatureFolder(folder, ("layer.0", "layer.1"))
    for answer in read_answers(out):
        found = recorded.read(answer.token_ids)
        assert found is not None
        known = len(found.log_norm)
        assert known >= len(answer.token_ids) - UNKNOWN
        taps, hidden = target.run(answer.token_ids[:known], ["layer.0", "layer.1"])
        torch.testing.assert_close(
            found.features.float(), torch.cat(taps, -1), atol=2e-2, rtol=1e-2
        )
        torch.testing.assert_close(found.hidden.float(), hidden, atol=2e-2, rtol=1e-2)
        expected = target.model.head(hidden).logsumexp(-1)
        torch.testing.assert_close(found.log_norm, expected, atol=1e-2, rtol=1e-3)
    files = set(folder.iterdir())
    run(target, out, tmp_path / "run", features=folder, steps=10)
    assert set(folder.iterdir()) == files, "features were computed again"


def test_features_of_other_layers_are_other_features(tmp_path: Path) -> None:
    found = Features(features=torch.ones(4, 2), hidden=torch.ones(4, 1), log_norm=torch.ones(4))
    FeatureFolder(tmp_path, ("layer.0", "layer.1")).write((5, 6, 7, 8), found)
    same = FeatureFolder(tmp_path, ("layer.0", "layer.1"))
    assert same.read((5, 6, 7, 8)) is not None
    assert same.read((5, 6, 7, 8, 9)) is not None
    assert same.read((5, 6, 7)) is None
    assert same.read((5, 6, 7, 9)) is None
    assert FeatureFolder(tmp_path, ("layer.0", "layer.2")).read((5, 6, 7, 8)) is None


@pytest.mark.parametrize("layers", [(), (5,), (-2,)])
def test_layers_that_do_not_exist_are_not_recorded(
    model: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    record = RecorderConfig(folder=str(tmp_path), layers=layers)
    with pytest.raises(CompositionError, match=r"drafter\.layers"):
        LLM(str(model), engine=EngineOptions(kv_pages=64), drafter=record, budget="fixed")


def run(
    target: Target,
    answers: Path,
    folder: Path,
    features: Path | None = None,
    start: Any = None,
    **changes: Any,
) -> list[Mapping[str, Any]]:
    reports: list[Mapping[str, Any]] = []
    options = evolve(OPTIONS, **changes)
    trainer = Trainer(
        target,
        options,
        answers=answers,
        folder=folder,
        features=features,
        start=start,
        report=reports.append,
    )
    trainer.run()
    trainer.save_public()
    return reports


def test_training_learns_and_goes_on(target: Target, answers: Path, tmp_path: Path) -> None:
    first = run(target, answers, tmp_path)
    assert [figures["step"] for figures in first] == [10, 15, 30]
    more = run(target, answers, tmp_path, steps=90)
    assert [figures["step"] for figures in more] == [45, 60, 75, 90]
    assert more[-1]["loss"] < first[0]["loss"]
    assert more[-1]["acceptance"][0] > first[0]["acceptance"][0] + 0.05
    assert more[-1]["expected_tau"] > first[0]["expected_tau"]
    logged = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [dict(figures) for figures in [*first, *more]] == logged


def test_the_learning_rate_ends_at_zero(target: Target, answers: Path, tmp_path: Path) -> None:
    run(target, answers, tmp_path, decay_share=0.5)
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    (group,) = state["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(OPTIONS.learning_rate / 15)


def test_another_draft_model_can_be_the_start(
    target: Target, answers: Path, tmp_path: Path
) -> None:
    """Its block may be shorter and its vocabulary another one; its layers must be the same."""
    run(target, answers, tmp_path / "first", steps=60)
    start = load(tmp_path / "first" / "compact")
    fresh = run(target, answers, tmp_path / "fresh", steps=10)
    found = run(
        target, answers, tmp_path / "second", start=start, steps=10, block_size=1,
        draft_vocab_size=150,
    )  # fmt: skip
    assert len(found[-1]["acceptance"]) == 1
    assert found[-1]["acceptance"][0] > fresh[-1]["acceptance"][0] + 0.03
    with pytest.raises(ConfigError, match=r"another shape.*fc\.weight"):
        run(target, answers, tmp_path / "third", start=start, target_layer_ids=(1,))


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
def test_what_was_trained_drafts(
    model: Path, target: Target, answers: Path, tmp_path: Path, kind: str
) -> None:
    """Both forms fit the engine, and outputs are those of no drafter at all."""
    run(target, answers, tmp_path, markov_head_type=kind)
    prompts = [list(answer.prompt) for answer in read_answers(answers)][:4]
    params = [SamplingParams(temperature=t, max_tokens=24, seed=5) for t in (0.0, 0.0, 0.8, 1.3)]

    def outputs(
        drafter: str, budget: str = "fixed", rules: Any = None, **options: Any
    ) -> list[tuple[int, ...]]:
        config = EngineConfig(
            model=str(model),
            accelerator=Choice(use="cpu"),
            engine=EngineOptions(kv_pages=64),
            drafter=Choice(use=drafter, options=options),
            budget=Choice(use=budget, options=rules or {}),
        )
        with LLM(config=config) as llm:
            found = llm.generate(prompts, params)
            if drafter != "none" and budget == "fixed":
                assert llm.engine.stats().num_drafted > 0
            return [result.outputs[0].token_ids for result in found]

    expected = outputs("none")
    for form in ("compact", "public"):
        assert outputs("dspark", checkpoint=str(tmp_path / form)) == expected
    unstored = {"cost_folder": ""}
    for budget, rules in (
        ("threshold", {"least": 0.01}),
        ("stepwise", unstored),
        ("lagged", unstored),
    ):
        found = outputs("dspark", budget, rules, checkpoint=str(tmp_path / "compact"))
        assert found == expected, budget
    assert outputs("mtp1", checkpoint=str(tmp_path / "compact")) == expected
    assert outputs("ngram", shortest=1) == expected


def test_another_target_layer_is_refused(target: Target, answers: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="target layers"):
        run(target, answers, tmp_path, target_layer_ids=(1, 2))


def test_eval_calibrate_and_convert(
    model: Path, target: Target, answers: Path, tmp_path: Path
) -> None:
    run(target, answers, tmp_path)
    draft, features = tmp_path / "compact", tmp_path / "features"
    common = ("--model", str(model), "--draft", str(draft), "--answers", str(answers))
    shared = (*common, "--features", str(features))
    result = CliRunner().invoke(dspark, ["eval", *shared])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.stdout)
    everything = figures["domains"]["all"]
    assert everything["answers"] == 24
    assert everything == figures["domains"]["math"]
    assert 1.0 <= everything["tau"] <= 4.0
    assert figures["draft_pass_ms"] > 0
    result = CliRunner().invoke(
        dspark, ["calibrate", *shared, "--picture", str(tmp_path / "reliability.svg")]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert load(draft).config["confidence_temperatures"] == report["temperatures"]
    assert report["blocks"]["fit"] > 200
    assert (tmp_path / "reliability.svg").read_text().startswith("<svg")
    for to in ("public", "compact"):
        result = CliRunner().invoke(
            dspark,
            ["convert", "--model", str(model), "--to", to, str(draft), str(tmp_path / f"to-{to}")],
        )
        assert result.exit_code == 0, result.output
    assert load(tmp_path / "to-compact").is_compact
    assert not load(tmp_path / "to-public").is_compact


@pytest.mark.parametrize(
    "content", ['{"prompt": [1]}\n', "nonsense\n", '{"prompt": 3, "answer": [1]}\n']
)
def test_broken_answers_are_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "answers.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="line 1"):
        list(read_answers(tmp_path / "answers.jsonl"))
