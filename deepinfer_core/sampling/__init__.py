"""Logits and parameters to tokens, with random numbers that depend on the position alone.

`Sampler` draws, `filtered_distribution` says from what, `score_rows` gives prompt logprobs;
`verify` judges drafts; `rng` has the random numbers that all of it and kernels must follow.
"""

from deepinfer_core.sampling.draws import Draw, draw_coupled, draw_masses
from deepinfer_core.sampling.filters import Candidates, candidates
from deepinfer_core.sampling.processors import pack_mask, process
from deepinfer_core.sampling.rng import (
    MASK64,
    Purpose,
    gumbel,
    output_seed,
    stream_key,
    uniform,
    uniform_bits,
)
from deepinfer_core.sampling.rows import FailureKind, RowFailure, RowParams, TokenHistory
from deepinfer_core.sampling.sampler import Sampler, SampleResult, filtered_distribution
from deepinfer_core.sampling.scores import score_row, score_rows
from deepinfer_core.sampling.verify import Trial, Verdict, judge_draft, verify

__all__ = [
    "MASK64",
    "Candidates",
    "Draw",
    "FailureKind",
    "Purpose",
    "RowFailure",
    "RowParams",
    "SampleResult",
    "Sampler",
    "TokenHistory",
    "Trial",
    "Verdict",
    "candidates",
    "draw_coupled",
    "draw_masses",
    "filtered_distribution",
    "gumbel",
    "judge_draft",
    "output_seed",
    "pack_mask",
    "process",
    "score_row",
    "score_rows",
    "stream_key",
    "uniform",
    "uniform_bits",
    "verify",
]
