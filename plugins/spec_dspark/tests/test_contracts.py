"""Core's contracts, for every component of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attrs import evolve

from deepinfer_core.interfaces.drafter import Drafter, DrafterContext
from deepinfer_core.testing.contracts import BudgetContract, CommandContract, DrafterContract
from deepinfer_dspark.config import (
    DsparkConfig,
    LaggedConfig,
    Mtp1Config,
    NgramConfig,
    RecorderConfig,
)
from deepinfer_dspark.loading import build_dspark, build_mtp1
from deepinfer_dspark.recorder import Recorder


class _Network(DrafterContract):
    @pytest.fixture(autouse=True)
    def _folder(self, public_folder: Path) -> None:
        self.folder = str(public_folder)


class TestDspark(_Network):
    def make(self, context: DrafterContext) -> Drafter:
        return build_dspark(DsparkConfig(checkpoint=self.folder), context)


class TestMtp1(_Network):
    def make(self, context: DrafterContext) -> Drafter:
        return build_mtp1(Mtp1Config(checkpoint=self.folder), context)


class TestNgram(DrafterContract):
    component = "ngram"
    config = NgramConfig(longest=3, shortest=1)


class FakeTarget:
    """What the recorder asks of a target."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ torch.eye(hidden.shape[-1], 64)


def with_checkpoint(context: DrafterContext) -> DrafterContext:
    """The contract's target, with a final norm and a head."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
    }
    norm = {"model.norm.weight": torch.ones(16)}
    return evolve(context, config=config, read=norm.__getitem__, model=FakeTarget())


class TestRecorder(DrafterContract):
    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path: Path) -> None:
        self.folder = tmp_path

    def make(self, context: DrafterContext) -> Drafter:
        config = RecorderConfig(folder=str(self.folder), layers=(0, 1))
        return Recorder(config, with_checkpoint(context))


class TestThreshold(BudgetContract):
    component = "threshold"


class TestStepwise(BudgetContract):
    component = "stepwise"


class TestLagged(BudgetContract):
    component = "lagged"


class TestCautiousLagged(BudgetContract):
    component = "lagged"
    config = LaggedConfig(margin=0.1)


class TestCommand(CommandContract):
    component = "dspark"
    failing_args = (
        "train",
        "--answers",
        "missing.jsonl",
        "--out",
        "nowhere",
        "--model",
        "/missing",
    )
