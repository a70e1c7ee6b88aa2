"""Requests: what is refused, how the refusal reads, and what values are normalised to."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.errors import RequestError
from deepinfer_core.requests import (
    Delta,
    FinishReason,
    Output,
    Request,
    RequestOutput,
    SamplingParams,
)

REFUSED: list[tuple[str, Any, str]] = [
    ("max_tokens", -1, "an integer >= 0"),
    ("max_tokens", 1.5, "an integer >= 0"),
    ("max_tokens", True, "an integer >= 0"),
    ("max_tokens", "16", "an integer >= 0"),
    ("min_tokens", -1, "an integer >= 0"),
    ("min_tokens", None, "an integer >= 0"),
    ("temperature", -0.1, "a number >= 0 (0 is greedy)"),
    ("temperature", math.nan, "a number >= 0 (0 is greedy)"),
    ("temperature", math.inf, "a number >= 0 (0 is greedy)"),
    ("temperature", False, "a number >= 0 (0 is greedy)"),
    ("temperature", "1", "a number >= 0 (0 is greedy)"),
    ("temperature", 10**400, "a number >= 0 (0 is greedy)"),
    ("top_k", -1, "an integer >= 0"),
    ("top_k", 2.0, "an integer >= 0"),
    ("top_p", 0, "a number > 0 and <= 1"),
    ("top_p", 1.01, "a number > 0 and <= 1"),
    ("top_p", math.nan, "a number > 0 and <= 1"),
    ("min_p", -0.5, "a number from 0 to 1"),
    ("min_p", 1.5, "a number from 0 to 1"),
    ("repetition_penalty", 0, "a number > 0"),
    ("repetition_penalty", -1.0, "a number > 0"),
    ("repetition_penalty", math.inf, "a number > 0"),
    ("presence_penalty", 2.5, "a number from -2 to 2"),
    ("frequency_penalty", math.nan, "a number from -2 to 2"),
    ("logit_bias", {1: math.nan}, "a number from -100 to 100"),
    ("logit_bias", {1: 101}, "a number from -100 to 100"),
    ("logit_bias", {-1: 1.0}, "an integer >= 0"),
    ("logit_bias", {"1": 1.0}, "an integer >= 0"),
    ("logit_bias", 5, "a mapping from token id to a number"),
    ("logit_bias", [1, 2], "a mapping from token id to a number"),
    ("stop", "", "none of them empty"),
    ("stop", ["a", ""], "none of them empty"),
    ("stop", ["a", 1], "a string or a sequence of strings"),
    ("stop", 5, "a string or a sequence of strings"),
    ("stop_token_ids", [-1], "an integer >= 0"),
    ("stop_token_ids", [True], "an integer >= 0"),
    ("stop_token_ids", 5, "a sequence of token ids"),
    ("stop_token_ids", "ab", "a sequence of token ids"),
    ("ignore_eos", 1, "true or false"),
    ("include_stop", None, "true or false"),
    ("skip_special_tokens", "no", "true or false"),
    ("seed", 2**64, "an integer from"),
    ("seed", -(2**63) - 1, "an integer from"),
    ("seed", 1.0, "an integer from"),
    ("n", 0, "an integer from 1 to 128"),
    ("n", 129, "an integer from 1 to 128"),
    ("logprobs", 21, "an integer from 0 to 20"),
    ("logprobs", -1, "an integer from 0 to 20"),
    ("prompt_logprobs", True, "an integer from 0 to 20"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED)
def test_impossible_values_are_refused_by_name(field: str, value: Any, allowed: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    message = str(caught.value)
    assert message.startswith(field)
    assert allowed in message


def test_the_value_is_shown_but_not_a_page_of_it() -> None:
    with pytest.raises(RequestError, match=r"top_k must be an integer >= 0, not -3$"):
        SamplingParams(top_k=-3)
    with pytest.raises(RequestError) as caught:
        SamplingParams(stop=["x" * 10_000, ""])
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("field", [field.name for field in attrs.fields(SamplingParams)])
@given(value=st.one_of(st.text(), st.floats(), st.booleans(), st.integers(), st.none()))
def test_odd_values_are_taken_or_refused_never_a_crash(field: str, value: Any) -> None:
    params, message = None, field
    try:
        params = SamplingParams(**{field: value})
    except RequestError as error:
        message = str(error)
    assert field in message
    if params is not None:
        assert attrs.evolve(params) == params  # normalised values are accepted again


def test_combinations_that_cannot_be_met_are_refused() -> None:
    with pytest.raises(RequestError, match=r"min_tokens must be at most max_tokens \(4\), not 5"):
        SamplingParams(max_tokens=4, min_tokens=5)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(max_tokens=0)
    with pytest.raises(RequestError, match="stop needs the text"):
        SamplingParams(stop="x", detokenize=False)
    assert SamplingParams(max_tokens=0, prompt_logprobs=0).max_tokens == 0
    assert SamplingParams(min_tokens=5).min_tokens == 5


def test_values_are_normalised() -> None:
    params = SamplingParams(
        temperature=1,
        top_k=np.int64(5),  # type: ignore[arg-type]
        top_p=np.float32(0.5),  # type: ignore[arg-type]
        logit_bias={7: 1, 3: -2.5},
        stop="end",
        stop_token_ids=np.array([4, 2, 4]),
    )
    assert (params.temperature, type(params.temperature)) == (1.0, float)
    assert (params.top_k, type(params.top_k)) == (5, int)
    assert (params.top_p, type(params.top_p)) == (0.5, float)
    assert params.logit_bias == ((3, -2.5), (7, 1.0))
    assert params.stop == ("end",)
    assert params.stop_token_ids == (4, 2)
    assert hash(params) == hash(attrs.evolve(params))


def test_a_bias_for_one_token_twice_is_refused() -> None:
    with pytest.raises(RequestError, match="token 3 twice"):
        SamplingParams(logit_bias=[(3, 1.0), (3, 2.0)])


def test_the_seed_is_the_request_s_or_the_engine_s() -> None:
    assert SamplingParams(seed=5).effective_seed(9) == 5
    assert SamplingParams(seed=0).effective_seed(9) == 0
    assert SamplingParams().effective_seed(9) == 9
    assert SamplingParams(seed=-1).effective_seed(9) == 2**64 - 1


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=1e-9).greedy


@pytest.mark.parametrize("ids", [[1, 2], (1, 2), np.array([1, 2]), range(1, 3)])
def test_prompts_may_be_any_sequence_of_ids(ids: Any) -> None:
    request = Request(request_id="a", prompt_token_ids=ids)
    assert request.prompt_token_ids == (1, 2)
    assert all(type(token) is int for token in request.prompt_token_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_token_ids": []}, "request 'a': prompt_token_ids is empty"),
        ({"prompt_token_ids": [1, -2]}, r"prompt_token_ids\[1\] must be an integer >= 0, not -2"),
        ({"prompt_token_ids": [1, 2.5]}, r"prompt_token_ids\[1\] must be"),
        ({"prompt_token_ids": [True]}, r"prompt_token_ids\[0\] must be"),
        ({"prompt_token_ids": "ab"}, "prompt_token_ids must be a sequence of token ids"),
        ({"prompt_token_ids": np.int64(3)}, "prompt_token_ids must be a sequence of token ids"),
        ({"request_id": ""}, "request_id must be a string that is not empty"),
        ({"request_id": 7}, "request_id must be a string"),
        ({"params": {"top_k": 1}}, "params must be SamplingParams"),
        ({"priority": 1.5}, "priority must be an integer"),
        ({"arrival_s": math.nan}, "arrival_s must be a finite number"),
        ({"deadline_s": math.inf}, "deadline_s must be a finite number of seconds or None"),
        ({"cache_salt": None}, "cache_salt must be a string"),
    ],
)
def test_impossible_requests_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Request(**{"request_id": "a", "prompt_token_ids": [1], **changes})


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request(request_id="a", prompt_token_ids=[1, 10]), r"prompt_token_ids has token 10 \(en"),
        (
            Request(
                request_id="a", prompt_token_ids=[1], params=SamplingParams(stop_token_ids=[12])
            ),
            "stop_token_ids has token 12",
        ),
        (
            Request(
                request_id="a", prompt_token_ids=[1], params=SamplingParams(logit_bias={11: 1})
            ),
            "logit_bias has token 11",
        ),
    ],
)
def test_ids_that_the_model_lacks_are_refused(request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        request_.check_vocabulary(10)
    request_.check_vocabulary(13)


def test_values_are_frozen_and_travel_between_processes() -> None:
    request = Request(request_id="a", prompt_token_ids=[1], params=SamplingParams(stop="x"))
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        request.priority = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(request)) == request


def test_results() -> None:
    last = Delta(request_id="a", text="x", finish_reason=FinishReason.STOP, stop_reason="\n")
    assert last.finished
    assert not Delta(request_id="a", token_ids=(1,)).finished
    output = Output(index=0, text="hi", token_ids=(1,), finish_reason=FinishReason.LENGTH)
    result = RequestOutput(request_id="a", prompt_token_ids=(1,), outputs=(output,), invariant=True)
    assert result.text == "hi"
    assert result.exact
    assert f"{output.finish_reason}" == "length"


def test_importing_requests_needs_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, deepinfer_core.requests; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
