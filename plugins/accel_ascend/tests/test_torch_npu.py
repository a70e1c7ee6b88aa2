"""The real torch_npu, in an environment of its own, agrees with every call that the backend makes.

Skipped, with the reason, where torch_npu cannot be installed.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deepinfer_ascend.testing.engines import (
    answers,
    has_latent,
    latent_options,
    recorded_calls,
    write_latent_model,
)
from deepinfer_ascend.testing.mistakes import MISTAKES, NOTICED, caught
from deepinfer_ascend.testing.recording import differences
from deepinfer_ascend.testing.schemas import SCHEMAS, TORCH_NPU
from deepinfer_ascend.testing.standins import (
    FLASH_MLA,
    UnavailableError,
    add_flash_mla,
    make_environment,
)
from deepinfer_core.testing.tiny import write_tiny_model

COMMUNICATION = {"npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Every call that engines make."""
    return recorded_calls(tmp_path_factory.mktemp("recorded"))


def test_every_op_is_recorded(recorded: Any) -> None:
    ops = {call["op"] for call in recorded}
    named = {schema.partition("(")[0] for schema in SCHEMAS}
    assert ops - named == ({"sparse_prefill_fwd"} if has_latent() else set())
    assert named - ops == COMMUNICATION | {"npu_clipped_swiglu", "npu_gelu_mul"}


def test_recorded_calls_can_be_replayed(recorded: Any) -> None:
    """On a device they would be compared with the emulation; here it is compared with itself."""
    text = json.dumps(recorded)
    assert all(found.error == 0 for found in differences(json.loads(text), "cpu"))


def test_seven_kinds_of_mistakes_are_caught() -> None:
    complaints = caught()
    assert [name for name, complaint in complaints.items() if not complaint] == []
    kinds = {name.partition(":")[0] for name in MISTAKES}
    assert kinds >= {"layout", "dtype", "page size", "mask kind", "scale shape", "heads", "lengths"}


@pytest.fixture(scope="module")
def report(
    recorded: Any, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Any:
    cache: Any = getattr(request.config, "cache", None)  # kept from run to run, where there is one
    folder = tmp_path_factory.mktemp("npu") if cache is None else cache.mkdir("torch_npu")
    try:
        environment = make_environment(folder / TORCH_NPU)
    except UnavailableError as error:
        pytest.skip(f"torch_npu {TORCH_NPU} cannot be installed here: {error}")
    work = tmp_path_factory.mktemp("report")
    calls, model = work / "calls.json", write_tiny_model(work / "model")
    calls.write_text(json.dumps(recorded))
    arguments, latent = [calls, model], work / "latent"
    if has_latent() and not _missing_flash_mla(folder):
        arguments.append(write_latent_model(latent))
    done = subprocess.run(
        [environment.python, "-m", "deepinfer_ascend.testing.with_torch_npu", *arguments],
        env={**os.environ, **environment.variables}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "model": model, "latent_model": latent}


def _missing_flash_mla(folder: Path) -> str:
    """Why flash_mla's Python half cannot be used, "" if it can."""
    try:
        add_flash_mla(folder / TORCH_NPU)
    except UnavailableError as error:
        return str(error)
    return ""


def test_signatures_are_those_of_the_version_named(report: Any) -> None:
    assert report["torch_npu"] == TORCH_NPU
    assert report["changed"] == []


def test_every_call_passes_the_real_shape_functions(report: Any, recorded: Any) -> None:
    problems = [
        f"{found['op']}: {found['problem']}" for found in report["calls"] if found["problem"]
    ]
    assert problems == []
    ours = [call for call in recorded if call["library"] == "npu"]
    assert len(report["calls"]) == len(ours) > 30


def test_mistakes_that_torch_npu_misses_are_caught(report: Any) -> None:
    missed = {name for name, complaint in report["noticed"].items() if not complaint}
    assert missed == set(MISTAKES) - {NOTICED}
    assert len(missed) >= 7
    assert [name for name in missed if not report["caught"][name]] == []


def test_an_engine_answers_the_same_under_the_real_signatures(report: Any) -> None:
    assert report["tokens"] == answers(report["model"])


def test_sparse_attention_goes_through_the_real_flash_mla(report: Any) -> None:
    """Its Python half takes the calls; the half that is compiled is the emulation."""
    if report["latent"] is None:
        pytest.skip("flash_mla's source or deepinfer-deepseek cannot be installed here")
    assert report["latent"]["version"] == FLASH_MLA
    assert report["latent"]["tokens"] == answers(report["latent_model"], **latent_options())


def test_rows_can_be_sent_to_experts_elsewhere(report: Any) -> None:
    assert report["communication"] == ["torch.int64 [8]", "torch.bfloat16 [9, 128]"]


def test_what_is_asked_of_the_device_exists(report: Any) -> None:
    assert report["missing"] == []
