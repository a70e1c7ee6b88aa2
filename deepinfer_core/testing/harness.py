"""A checkpoint in an executor with paged storage: logits for any chunking, mix and order.

This is the path a step takes in an engine (safetensors reader, model family, bound ops, attention,
cache, executor) without scheduling and sampling: a test says itself which rows share a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_core.batch import NO_SLOT, Batch, GroupBatch, Int32
from deepinfer_core.builtin import cpu, paged_attention, pages, torch_kernels
from deepinfer_core.builtin.configs import CpuConfig
from deepinfer_core.checkpoint.coverage import KNOWN_BUFFERS, check_coverage
from deepinfer_core.checkpoint.safetensors import SafetensorsCheckpoint
from deepinfer_core.components import NoConfig
from deepinfer_core.interfaces.accelerator import AcceleratorContext
from deepinfer_core.interfaces.attention import AttentionContext
from deepinfer_core.interfaces.checkpoint import Checkpoint
from deepinfer_core.interfaces.kernels import KernelsContext, KernelSet, OpFacts
from deepinfer_core.interfaces.model import BuildRequest, Model, ModelFamily
from deepinfer_core.kv.layout import CacheGroupSpec
from deepinfer_core.ops.table import OpTable, choose
from deepinfer_core.runner import LocalExecutor
from deepinfer_core.testing.families import core_family


class ModelHarness:
    """A model with pages, driven step by step.

    Args:
        source: directory of a safetensors checkpoint, or an open checkpoint.
        dtype: computation dtype name; also that of the pages.
        page_size: tokens per page.
        num_pages: pages of each group.
        batch_invariant: whether ops and attention must promise it.
        family: builds the model; None = one of the core's own.
        poison: fill all pages with NaN first, so that a read of what nobody wrote shows.
        kernels: kernel sets by name, tried before the core's.
        attention: name and builder of the attention backend; None = the core's.
    """

    def __init__(
        self,
        source: Path | Checkpoint,
        *,
        dtype: str = "float32",
        page_size: int = 16,
        num_pages: int = 256,
        batch_invariant: bool = True,
        family: ModelFamily | None = None,
        poison: bool = True,
        kernels: Mapping[str, KernelSet] | None = None,
        attention: tuple[str, Callable[[Any, AttentionContext], Any]] | None = None,
    ) -> None:
        checkpoint = SafetensorsCheckpoint(source) if isinstance(source, Path) else source
        family = family or core_family(checkpoint.config)
        spec = family.describe(checkpoint.config, page_size=page_size, kv_dtype=dtype)
        check_coverage(checkpoint, spec.weights, (*KNOWN_BUFFERS, *spec.ignored_weights))
        accelerator = cpu.build(
            CpuConfig(), AcceleratorContext(num_threads=torch.get_num_threads(), overlap=False)
        )
        name, build_attention = attention or ("paged", paged_attention.build)
        facts = OpFacts(
            device_type="cpu", dtype=dtype, batch_invariant=batch_invariant, attention=name
        )
        plain = torch_kernels.build(NoConfig(), KernelsContext(device_type="cpu"))
        sets = {"torch": plain, **(kernels or {})}
        self.ops = choose([(name, made.providers()) for name, made in sets.items()], facts)
        backend: Any = build_attention(
            NoConfig(),
            AttentionContext(
                groups=spec.groups,
                device_type="cpu",
                dtype=dtype,
                num_query_heads=spec.num_query_heads,
                batch_invariant=batch_invariant,
            ),
        )
        with torch.inference_mode():
            self.model: Model = family.build(
                BuildRequest(
                    config=checkpoint.config,
                    spec=spec,
                    read=checkpoint.read,
                    read_packed=checkpoint.read_packed,
                    ops=OpTable(self.ops, facts),
                    dtype=dtype,
                    device=accelerator.device,
                    tokenizer=checkpoint.tokenizer,
                )
            )
        self.spec = spec
        storages = [backend.allocate(group, num_pages, accelerator.device) for group in spec.groups]
        if poison:
            for storage, group in zip(storages, spec.groups, strict=True):
                for page in range(num_pages):
                    storage.import_page(page, b"\xff" * group.bytes_per_page)
        self.executor = LocalExecutor(accelerator, self.model, backend, storages)
        self.cache = pages.PagesCache(spec.groups, [num_pages] * len(spec.groups))
        self._tokens: dict[int, list[int]] = {}
        self._keep_from: dict[int, int] = {}
        self._steps = 0
        self.last_batch: Batch | None = None

    # ------------------------------------------------------------------------------- sequences

    def open(self, sequence_id: int, num_prompt_tokens: int | None = None) -> None:
        """Begin a sequence.

        Args:
            sequence_id: not open yet.
            num_prompt_tokens: of a prompt whose early rows a truncating decoder drops; None = it
                computes all rows.
        """
        self.cache.open(sequence_id, ())
        self._tokens[sequence_id] = []
        keep = 0 if num_prompt_tokens is None else num_prompt_tokens - self.spec.decoder_keep
        self._keep_from[sequence_id] = max(0, keep) if self.spec.decoder_keep else 0

    def release(self, sequence_id: int) -> None:
        """End a sequence; its pages go on holding what is in them."""
        self.cache.release(sequence_id)
        del self._tokens[sequence_id], self._keep_from[sequence_id]

    def length(self, sequence_id: int) -> int:
        """Tokens of a sequence so far."""
        return len(self._tokens[sequence_id])

    # ----------------------------------------------------------------------------------- steps

    def step(
        self,
        parts: Mapping[int, Sequence[int]],
        *,
        rows: Mapping[int, Sequence[int]] | None = None,
        taps: Sequence[str] = (),
    ) -> dict[int, Tensor]:
        """Run one forward pass.

        Args:
            parts: sequence id -> the tokens that follow, at least one, in batch order.
            rows: sequence id -> which of its rows are wanted, default all.
            taps: layer outputs to keep; see ``self.taps`` afterwards.

        Returns:
            sequence id -> logits [rows wanted, vocab_size].
        """
        batch = self.last_batch = self.batch(parts, rows=rows, taps=taps)
        output = self.executor.launch(batch).wait()
        with torch.inference_mode():
            logits = output.logits(0, output.num_rows)
        self.taps = dict(output.taps)
        for sequence_id, tokens in parts.items():
            known = self._tokens[sequence_id]
            known += tokens
            self.cache.commit(sequence_id, len(known), known)
        owners = torch.from_numpy(batch.logit_sequences)
        return {sequence_id: logits[owners == index] for index, sequence_id in enumerate(parts)}

    def batch(
        self,
        parts: Mapping[int, Sequence[int]],
        *,
        rows: Mapping[int, Sequence[int]] | None = None,
        taps: Sequence[str] = (),
    ) -> Batch:
        """The batch of a step, with pages reserved."""
        self._steps += 1
        counts = [len(tokens) for tokens in parts.values()]
        begins = [self.length(sequence_id) for sequence_id in parts]
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.concatenate(
            [np.arange(at, at + count) for at, count in zip(begins, counts, strict=True)]
        ).astype(np.int32)
        for sequence_id, begin, count in zip(parts, begins, counts, strict=True):
            assert self.cache.reserve(sequence_id, begin + count), "the harness has too few pages"
        wanted = [
            sorted(rows[sequence_id]) if rows is not None else range(count)
            for sequence_id, count in zip(parts, counts, strict=True)
        ]
        keep_from = np.array([self._keep_from[sequence_id] for sequence_id in parts], np.int32)
        return Batch(
            step=self._steps,
            sequence_ids=tuple(parts),
            token_ids=np.array([token for part in parts.values() for token in part], np.int32),
            token_sources=np.full(len(positions), -1, np.int32),
            positions=positions,
            query_starts=starts,
            context_lengths=np.array(begins, np.int32) + np.array(counts, np.int32),
            num_drafts=np.zeros(len(counts), np.int32),
            logit_rows=np.array(
                [starts[index] + row for index, found in enumerate(wanted) for row in found],
                np.int32,
            ),
            logit_sequences=np.repeat(np.arange(len(counts)), [len(found) for found in wanted]),
            keep_from=keep_from,
            groups=tuple(
                self._group(index, group, list(parts), starts, positions, keep_from)
                for index, group in enumerate(self.spec.groups)
            ),
            taps=tuple(taps),
            previous_ids=self._previous_ids(parts),
        )

    def _previous_ids(self, sequence_ids: Iterable[int]) -> Int32:
        lookback = self.spec.lookback
        rows = [[-1] * lookback + self._tokens[sequence_id] for sequence_id in sequence_ids]
        return np.array([row[len(row) - lookback :] for row in rows], np.int32)

    def _group(
        self,
        index: int,
        spec: CacheGroupSpec,
        sequence_ids: Sequence[int],
        starts: Int32,
        positions: Int32,
        keep_from: Int32,
    ) -> GroupBatch:
        tables = [self.cache.block_table(sequence_id, index) for sequence_id in sequence_ids]
        padded = np.full((len(tables), max(map(len, tables))), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        owners = np.repeat(np.arange(len(tables)), np.diff(starts))
        found, offsets = np.divmod(positions, spec.page_size)
        slots = padded[owners, found].astype(np.int64) * spec.page_size + offsets
        visible_from = np.zeros(len(tables), np.int32)
        if spec.truncated:
            slots[positions < keep_from[owners]] = NO_SLOT
            visible_from = keep_from
        return GroupBatch(block_tables=padded, write_slots=slots, visible_from=visible_from)

    # --------------------------------------------------------------------------------- answers

    def logits(self, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """[len(tokens), vocab_size]: of one sequence alone, computed in chunks of these sizes.

        Args:
            tokens: the sequence.
            chunks: sizes that sum up to its length; None = one step.
        """
        return self.mixed({-1: tokens}, {-1: chunks or [len(tokens)]})[-1]

    def mixed(
        self,
        sequences: Mapping[int, Sequence[int]],
        chunks: Mapping[int, Sequence[int]],
        order: Sequence[Sequence[int]] | None = None,
    ) -> dict[int, Tensor]:
        """Logits of every position of several sequences that share steps; they are released after.

        Args:
            sequences: id -> tokens.
            chunks: id -> sizes of its chunks; 0 = takes no part in that step.
            order: batch order of each step; default by id. Steps beyond the list take the default.

        Returns:
            id -> [len(tokens), vocab_size].
        """
        for sequence_id in sequences:
            self.open(sequence_id)
        found: dict[int, list[Tensor]] = {sequence_id: [] for sequence_id in sequences}
        done = dict.fromkeys(sequences, 0)
        for number in range(max(map(len, chunks.values()))):
            ids = order[number] if order is not None and number < len(order) else sorted(sequences)
            parts: dict[int, Any] = {}
            for sequence_id in ids:
                sizes = chunks[sequence_id]
                size = sizes[number] if number < len(sizes) else 0
                if size:
                    begin = done[sequence_id]
                    parts[sequence_id] = list(sequences[sequence_id][begin : begin + size])
                    done[sequence_id] += size
            if parts:
                for sequence_id, logits in self.step(parts).items():
                    found[sequence_id].append(logits)
        for sequence_id, tokens in sequences.items():
            assert done[sequence_id] == len(tokens), (
                f"chunks of {sequence_id} do not fit its length"
            )
            self.release(sequence_id)
        return {sequence_id: torch.cat(parts) for sequence_id, parts in found.items()}
