"""Draft models on disk, in two forms that convert into each other.

``public`` is the layout of published DSpark checkpoints: complete, with copies of the target's
embedding and head. ``compact`` leaves those out: ``draft_vocab_ids`` names the tokens that can be
drafted, ``markov_head.markov_w2`` has rows for them only, and ``target_probe`` (embedding rows of a
few tokens) with ``target_hash`` says which target it fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve, field, frozen
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepinfer_core.errors import CheckpointError, reason
from deepinfer_dspark.shape import DraftShape, parameter_sizes, read_shape

CONFIG, WEIGHTS = "config.json", "model.safetensors"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VOCAB_IDS, PROBE = "draft_vocab_ids", "target_probe"
MARKOV_OUT = "markov_head.markov_w2.weight"
PROBES = 16
"""Tokens whose embeddings tell targets apart."""


@frozen(kw_only=True, eq=False)
class DraftCheckpoint:
    """A draft model as read or made.

    Attributes:
        config: content of config.json.
        tensors: name -> tensor, in either form.
        where: the folder, for messages.
        shape: read from ``config``.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    where: str
    shape: DraftShape = field(init=False)

    @shape.default
    def _read_shape(self) -> DraftShape:
        return read_shape(self.config, self.where)

    @property
    def is_compact(self) -> bool:
        """Whether the target's embedding and head are left out."""
        return EMBEDDING not in self.tensors

    @property
    def draft_vocab_ids(self) -> Tensor:
        """[draft_vocab_size], int64, ascending: tokens that can be drafted."""
        if VOCAB_IDS in self.tensors:
            return self.tensors[VOCAB_IDS].to(torch.int64)
        return torch.arange(self.shape.decoder.vocab_size)

    @property
    def probe(self) -> Tensor:
        """[PROBES, hidden_size], float32: embeddings of ``probe_ids``."""
        if PROBE in self.tensors:
            return self.tensors[PROBE].float()
        return self.tensors[EMBEDDING][probe_ids(self.shape.decoder.vocab_size)].float()

    def network_state(self) -> dict[str, Tensor]:
        """Parameters of a ``DraftNetwork``, float32."""
        left_out = {EMBEDDING, HEAD, VOCAB_IDS, PROBE}
        state = {n: t.float() for n, t in self.tensors.items() if n not in left_out}
        if state[MARKOV_OUT].shape[0] != self.shape.draft_vocab_size:
            state[MARKOV_OUT] = state[MARKOV_OUT][self.draft_vocab_ids]
        return state


def probe_ids(vocab_size: int) -> Tensor:
    """Return [PROBES] int64: token ids spread over a vocabulary."""
    return torch.linspace(0, vocab_size - 1, PROBES).round().to(torch.int64)


def target_hash(probe: Tensor) -> str:
    """Return a digest of a target's probe rows; equal ones are the same weights."""
    data = probe.to(torch.float16).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def load(folder: Path) -> DraftCheckpoint:
    """Read a draft model in either form, and check every tensor's name and shape.

    Raises:
        CheckpointError: files are missing or broken, or names and shapes do not fit the
            configuration; every problem is listed.
    """
    try:
        config = json.loads((folder / CONFIG).read_text())
        files = sorted(folder.glob("*.safetensors"))
        tensors = {name: t for file in files for name, t in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot read a draft model from {folder}: {reason(error)}"
        ) from error
    if not isinstance(config, dict) or not tensors:
        raise CheckpointError(f"{folder} holds no draft model: no *.safetensors file in it")
    checkpoint = DraftCheckpoint(config=config, tensors=tensors, where=str(folder))
    problems = list(misfits(checkpoint))
    if problems:
        raise CheckpointError(f"{folder}: tensors do not fit {CONFIG}", problems)
    return checkpoint


def misfits(checkpoint: DraftCheckpoint) -> list[str]:
    """Compare tensors with what the configuration asks for; one line per problem."""
    shape, tensors = checkpoint.shape, checkpoint.tensors
    vocab, hidden = shape.decoder.vocab_size, shape.decoder.hidden_size
    expected = parameter_sizes(shape)
    if checkpoint.is_compact:
        expected[PROBE] = (PROBES, hidden)
    else:
        expected[EMBEDDING] = expected[HEAD] = (vocab, hidden)
        expected[MARKOV_OUT] = (vocab, shape.markov_rank)
    if checkpoint.is_compact or shape.draft_vocab_size != vocab:
        expected[VOCAB_IDS] = (shape.draft_vocab_size,)
    problems = [f"missing {name}" for name in sorted(expected.keys() - tensors.keys())]
    problems += [f"unknown {name}" for name in sorted(tensors.keys() - expected.keys())]
    problems += [
        f"{name}: {list(tensors[name].shape)} instead of {list(size)}"
        for name, size in sorted(expected.items())
        if name in tensors and tuple(tensors[name].shape) != size
    ]
    if VOCAB_IDS in tensors and not problems:
        ids = tensors[VOCAB_IDS].to(torch.int64)
        if bool((ids.diff() <= 0).any()) or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            problems.append(f"{VOCAB_IDS}: expected ascending token ids below {vocab}")
    return problems


def save(checkpoint: DraftCheckpoint, folder: Path) -> None:
    """Write a draft model; the folder is made if missing, files appear whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}
    if not checkpoint.is_compact and tensors[HEAD].data_ptr() == tensors[EMBEDDING].data_ptr():
        tensors[HEAD] = tensors[HEAD].clone()  # tied in the target; the layout has both
    partial = folder / (WEIGHTS + ".partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)
    text = json.dumps(dict(checkpoint.config), indent=2, sort_keys=True) + "\n"
    (folder / CONFIG).write_text(text)


def compacted(checkpoint: DraftCheckpoint, dtype: torch.dtype | None = None) -> DraftCheckpoint:
    """Return the compact form: no copies of the target's tensors.

    Args:
        checkpoint: in either form.
        dtype: of the floating-point tensors; None keeps them.
    """
    tensors = dict(checkpoint.tensors)
    tensors[VOCAB_IDS] = checkpoint.draft_vocab_ids.to(torch.int32)
    if not checkpoint.is_compact:
        tensors[PROBE] = checkpoint.probe
        tensors[MARKOV_OUT] = tensors[MARKOV_OUT][checkpoint.draft_vocab_ids]
        del tensors[EMBEDDING], tensors[HEAD]
    probe = tensors[PROBE].float()
    if dtype is not None:
        tensors = {n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}
    config = {
        **checkpoint.config,
        "draft_vocab_size": checkpoint.shape.draft_vocab_size,
        "target_hash": target_hash(probe),
    }
    return evolve(checkpoint, config=config, tensors=tensors)


def completed(checkpoint: DraftCheckpoint, embedding: Tensor, head: Tensor) -> DraftCheckpoint:
    """Return the public form.

    Rows of the Markov head for tokens that are never drafted are 0. Where not all tokens can be
    drafted, ``draft_vocab_ids`` stays in as an extra that says so.

    Args:
        checkpoint: in either form.
        embedding: the target's, [vocab_size, hidden_size].
        head: likewise.
    """
    if not checkpoint.is_compact:
        return checkpoint
    shape, tensors = checkpoint.shape, dict(checkpoint.tensors)
    ids = checkpoint.draft_vocab_ids
    out = tensors[MARKOV_OUT]
    whole = out.new_zeros(shape.decoder.vocab_size, shape.markov_rank)
    whole[ids] = out
    tensors[MARKOV_OUT] = whole
    tensors[EMBEDDING], tensors[HEAD] = embedding.to(out.dtype), head.to(out.dtype)
    del tensors[PROBE]
    if len(ids) == shape.decoder.vocab_size:
        del tensors[VOCAB_IDS]
    return evolve(checkpoint, tensors=tensors)
