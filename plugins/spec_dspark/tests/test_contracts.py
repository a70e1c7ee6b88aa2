"""Core's contracts, for every component of the plugin."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_core.interfaces.drafter import Drafter, DrafterContext
from deepinfer_core.testing.contracts import BudgetContract, CommandContract, DrafterContract
from deepinfer_dspark.config import DsparkConfig, LaggedConfig, Mtp1Config, NgramConfig
from deepinfer_dspark.loading import build_dspark, build_mtp1


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
