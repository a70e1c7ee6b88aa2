"""What every attention backend must do: agree with dense attention in float64, whatever the batch.

Storage is filled with NaN before it is used, pages come in random order, sizes are odd.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from deepinfer_core.capabilities import Facts, Feature
from deepinfer_core.components import Slot
from deepinfer_core.errors import CompositionError
from deepinfer_core.interfaces.attention import Attention, AttentionContext, AttentionParams
from deepinfer_core.kv.layout import CacheGroupSpec, GroupKind
from deepinfer_core.testing.attention_world import AttentionWorld, KnownSequence, Rows
from deepinfer_core.testing.contracts.base import Contract, skip
from deepinfer_core.testing.numerics import Family, assert_close, assert_same_bits

NEVER = 1 << 30
"""As ``write_from``: no row is written."""


class AttentionContract(Contract):
    """Laws of the slot ``attention``. The attributes say what a backend can serve.

    Attributes:
        device_type: torch device type.
        dtypes: computation dtypes to check; the first one is used where one is enough.
        page_size: tokens per page.
        shapes: (query heads, kv heads, key_dim, value_dim), likewise.
    """

    slot = Slot.ATTENTION
    features = frozenset({Feature.WINDOW, Feature.SINKS, Feature.BATCH_INVARIANT})
    device_type: ClassVar[str] = "cpu"
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    page_size: ClassVar[int] = 16
    shapes: ClassVar[tuple[tuple[int, int, int, int], ...]] = (
        (6, 2, 16, 16),
        (3, 3, 8, 8),
        (4, 1, 24, 24),
        (9, 3, 64, 64),
    )

    def facts(self) -> Facts:
        """Return device, dtype and sizes."""
        return Facts(
            device_type=self.device_type,
            dtype=self.dtypes[0],
            head_dims=tuple(sorted({shape[2] for shape in self.shapes})),
            page_size=self.page_size,
        )

    def world(
        self,
        *,
        shape: tuple[int, int, int, int] | None = None,
        dtype: str = "",
        layers: tuple[int, ...] = (0,),
        writers: tuple[int, ...] = (),
        window: int = 0,
        seed: int = 0,
        invariant: bool = False,
        **params: Any,
    ) -> AttentionWorld:
        """Return a backend with storage, and what it must answer."""
        query_heads, kv_heads, key_dim, value_dim = shape or self.shapes[0]
        dtype = dtype or self.dtypes[0]
        group = CacheGroupSpec(
            name="test",
            kind=GroupKind.WINDOW if window else GroupKind.FULL,
            layers=layers,
            writers=writers,
            num_kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            dtype=dtype,
            page_size=self.page_size,
            window=window,
        )
        context = AttentionContext(
            groups=(group,),
            device_type=self.device_type,
            dtype=dtype,
            num_query_heads=query_heads,
            batch_invariant=Feature.BATCH_INVARIANT in self.offered(),
        )
        return AttentionWorld(
            self.backend(context, fall_back=not invariant),
            group,
            num_query_heads=query_heads,
            device=torch.device(self.device_type),
            dtype=dtype,
            params=AttentionParams(scale=key_dim**-0.5, window=window, **params),
            seed=seed,
        )

    def backend(self, context: AttentionContext, *, fall_back: bool) -> Attention:
        """Build a backend; one that cannot be invariant on this machine may say so."""
        try:
            built: Attention = self.make(context)
        except CompositionError:
            if not (context.batch_invariant and fall_back):
                raise
            built = self.make(attrs.evolve(context, batch_invariant=False))
        return built

    def compare(self, world: AttentionWorld, rows: Sequence[Rows]) -> None:
        """Run a step and compare every layer with dense attention."""
        dtype = str(world.dtype).removeprefix("torch.")
        for layer, (found, expected) in world.step(rows).items():
            assert found.dtype == world.dtype, f"{found.dtype} came back for {world.dtype}"
            what = f"layer {layer}, rows {[(part.sequence_id, part.count) for part in rows]}"
            assert_close(found, expected, dtype=dtype, family=Family.ATTENTION, what=what)

    def every_world(self, **options: Any) -> Iterator[AttentionWorld]:
        """A world for each shape and dtype."""
        for shape in self.shapes:
            for dtype in self.dtypes:
                yield self.world(shape=shape, dtype=dtype, **options)

    def mixture(self, world: AttentionWorld, steps: int = 12) -> None:
        """Steps that mix decoding with chunks of all sizes; sequences come and go."""
        choose, size, next_id = world.random, self.page_size, 0
        for _ in range(steps):
            while len(world.known) < 4:
                world.open(next_id)
                next_id += 1
            taking_part = choose.sample(sorted(world.known), choose.randint(1, 4))
            sizes = (1, 1, 1, 2, 3, size - 1, size, size + 1, 2 * size + 3)
            self.compare(
                world, [Rows(sequence_id=at, count=choose.choice(sizes)) for at in taking_part]
            )
            for at in taking_part:
                if world.params.window:
                    world.drop_dead_pages(at)
                if world.known[at].length > 6 * size:
                    world.release(at)

    # ---------------------------------------------------------------------------------- batches

    def test_prompts_agree_with_dense_attention(self) -> None:
        """Whole prompts of any length, for every shape and dtype."""
        size = self.page_size
        for world in self.every_world():
            for at, count in enumerate((1, 2, 3, size - 1, size, size + 1, 3 * size + 5)):
                world.open(at)
                self.compare(world, [Rows(sequence_id=at, count=count)])

    def test_a_long_prompt_agrees_with_dense_attention(self) -> None:
        """A prompt longer than any tile."""
        world = self.world()
        world.open(0)
        self.compare(world, [Rows(sequence_id=0, count=37 * 16 + 3)])

    def test_decoding_agrees_with_dense_attention(self) -> None:
        """Sequences of different lengths, one row each, over several pages."""
        for world in self.every_world():
            counts = (1, self.page_size, self.page_size + 3)
            for at, count in enumerate(counts):
                world.open(at)
                self.compare(world, [Rows(sequence_id=at, count=count)])
            for _ in range(self.page_size + 2):
                self.compare(world, [Rows(sequence_id=at, count=1) for at in range(3)])

    def test_mixed_batches_agree_with_dense_attention(self) -> None:
        """Decode rows and chunks of any size in one step; pages of ended sequences come back."""
        for seed in range(3):
            self.mixture(self.world(seed=seed))
        for dtype in self.dtypes[1:]:
            self.mixture(self.world(dtype=dtype))

    def test_rolled_back_positions_are_replaced(self) -> None:
        """Positions written again hold the new state."""
        world = self.world()
        known = world.open(0)
        self.compare(world, [Rows(sequence_id=0, count=2 * self.page_size)])
        for length in (2 * self.page_size - 1, self.page_size, self.page_size - 3):
            known.length = length
            self.compare(world, [Rows(sequence_id=0, count=3)])

    def test_planning_leaves_the_batch_alone(self) -> None:
        """``plan`` modifies no array of the batch: other groups and processes share it."""
        world = self.world()
        world.open(0)
        batch = world.batch([Rows(sequence_id=0, count=self.page_size + 1)])
        group = batch.groups[0]
        arrays = (batch.positions, batch.query_starts, group.block_tables, group.write_slots)
        before = [array.copy() for array in arrays]
        world.backend.plan(batch, 0, world.device)
        for array, copy in zip(arrays, before, strict=True):
            assert (array == copy).all()

    # ------------------------------------------------------------------------------- visibility

    def test_a_window_hides_older_positions(self) -> None:
        """With a window, a row sees so many positions including its own; dead pages may be gone."""
        self.needs_feature(Feature.WINDOW)
        for window in (1, 2, 5, self.page_size, self.page_size + 3):
            self.mixture(self.world(window=window, seed=window))

    def test_nothing_below_visible_from_is_seen(self) -> None:
        """State below the bound plays no part, whether it was ever written or not."""
        size = self.page_size
        for bound in (1, 5, size - 1, size, size + 3):
            world = self.world()
            world.open(0, visible_from=bound)
            world.open(1)
            self.compare(world, [Rows(sequence_id=1, count=2 * size), Rows(sequence_id=0, count=4)])
            world.known[1].visible_from = bound
            for _ in range(size):
                self.compare(world, [Rows(sequence_id=at, count=1) for at in (0, 1)])

    def test_sinks_take_their_share(self) -> None:
        """A sink is one more logit in the denominator of its head."""
        self.needs_feature(Feature.SINKS)
        for shape in self.shapes:
            sinks = torch.linspace(-2.0, 3.0, shape[0], device=self.device_type)
            self.mixture(self.world(shape=shape, sinks=sinks), steps=4)

    def test_softcap_bounds_the_scores(self) -> None:
        """Scores are ``softcap * tanh(score / softcap)``."""
        self.mixture(self.world(softcap=0.7), steps=4)

    # ---------------------------------------------------------------------------------- writing

    def test_rows_without_a_slot_are_not_written(self) -> None:
        """A replayed row is computed over what is stored, and changes nothing."""
        world = self.world()
        world.open(0)
        world.open(1)
        self.compare(world, [Rows(sequence_id=at, count=2 * self.page_size + 3) for at in (0, 1)])
        before = self.stored(world)
        replayed = Rows(sequence_id=0, start=5, count=self.page_size, write_from=NEVER)
        single = Rows(sequence_id=1, start=9, count=1, write_from=NEVER)
        self.compare(world, [replayed])
        self.compare(world, [single, replayed])
        assert self.stored(world) == before, "rows without a slot were written"

    def test_partly_written_chunks_write_the_rest(self) -> None:
        """Of a chunk that crosses the write floor, rows above are written and rows below not."""
        world = self.world()
        world.open(0)
        self.compare(world, [Rows(sequence_id=0, count=self.page_size)])
        floor = Rows(sequence_id=0, start=4, count=2 * self.page_size, write_from=self.page_size)
        self.compare(world, [floor])
        self.compare(world, [Rows(sequence_id=0, count=1)])

    def test_a_step_touches_its_own_pages_only(self) -> None:
        """Pages that no row is written to keep their bytes."""
        world = self.world()
        for at in range(3):
            world.open(at)
            self.compare(world, [Rows(sequence_id=at, count=self.page_size + 4)])
        before = self.stored(world)
        rows = [Rows(sequence_id=1, count=1), Rows(sequence_id=2, count=self.page_size)]
        self.compare(world, rows)
        own = {*world.known[1].pages[1:], *world.known[2].pages[1:]}
        after = self.stored(world)
        changed = [page for page, data in before.items() if data != after[page]]
        assert set(changed) <= own, f"pages {changed} changed, of which only {own} were written"

    def test_layers_have_state_of_their_own(self) -> None:
        """Each layer of a group reads what it wrote itself."""
        self.mixture(self.world(layers=(0, 3, 7)), steps=4)

    def test_layers_read_what_their_writer_wrote(self) -> None:
        """A layer that is given no keys reads those of the last writer before it."""
        self.mixture(self.world(layers=(1, 2, 5, 6), writers=(1, 5)), steps=4)

    # ------------------------------------------------------------------------------------ pages

    @staticmethod
    def stored(world: AttentionWorld) -> dict[int, bytes]:
        """The bytes of every page that a sequence holds."""
        pages = {page for known in world.known.values() for page in known.pages if page >= 0}
        return {page: world.storage.export_page(page) for page in pages}

    def test_copied_pages_read_the_same(self) -> None:
        """After ``copy_pages`` a sequence continues from the copies, in every layer."""
        world = self.world(layers=(0, 1))
        known = world.open(0)
        self.compare(world, [Rows(sequence_id=0, count=2 * self.page_size + 3)])
        copies = [world.free.pop() for _ in known.pages]
        world.storage.copy_pages(())
        world.storage.copy_pages(tuple(zip(known.pages, copies, strict=True)))
        world.known[1] = self.copy_of(known, copies)
        self.compare(world, [Rows(sequence_id=at, count=2) for at in (0, 1)])
        self.compare(world, [Rows(sequence_id=at, count=1) for at in (1, 0)])

    @staticmethod
    def copy_of(known: KnownSequence, pages: Sequence[int]) -> KnownSequence:
        """The same sequence in other pages."""
        return attrs.evolve(
            known,
            pages=list(pages),
            keys={layer: keys.clone() for layer, keys in known.keys.items()},
            values={layer: values.clone() for layer, values in known.values.items()},
        )

    def test_exported_pages_come_back(self) -> None:
        """Pages moved by ``export_page`` and ``import_page`` into other storage read the same."""
        source, target = self.world(layers=(0, 1)), self.world(layers=(0, 1), seed=1)
        known = source.open(0)
        self.compare(source, [Rows(sequence_id=0, count=2 * self.page_size + 3)])
        pages = [target.free.pop() for _ in known.pages]
        for page, copy in zip(known.pages, pages, strict=True):
            data = source.storage.export_page(page)
            assert len(data) == source.group.bytes_per_page, f"a page has {len(data)} bytes"
            target.storage.import_page(copy, data)
            assert target.storage.export_page(copy) == data
        target.known[0] = self.copy_of(known, pages)
        self.compare(target, [Rows(sequence_id=0, count=3)])

    def test_page_data_of_a_wrong_length_is_refused(self) -> None:
        """``import_page`` raises ValueError, and the page keeps its content."""
        world = self.world()
        world.open(0)
        self.compare(world, [Rows(sequence_id=0, count=self.page_size)])
        (page,) = world.known[0].pages
        before = world.storage.export_page(page)
        for data in (b"", before[:-1], before + b"\0"):
            refused = False
            try:
                world.storage.import_page(page, data)
            except ValueError:
                refused = True
            assert refused, f"{len(data)} bytes were taken for a page of {len(before)}"
            assert world.storage.export_page(page) == before

    # ------------------------------------------------------------------------------- invariance

    def test_rows_do_not_depend_on_the_batch(self) -> None:
        """A row has the same bits alone, in any chunk, in any batch and in any pages."""
        self.needs_feature(Feature.BATCH_INVARIANT)
        count = 2 * self.page_size + 5
        first = [(shape, self.dtypes[0]) for shape in self.shapes]
        refused = []
        for shape, dtype in first + [(self.shapes[0], dtype) for dtype in self.dtypes[1:]]:
            try:
                whole = self.chunked(shape, dtype, [count], neighbours=0)
            except CompositionError as error:
                refused.append(str(error))
                continue
            for chunks, neighbours in (
                ([1] * count, 0),
                ([7] * (count // 7) + [count % 7], 0),
                ([count - 1, 1], 2),
                ([self.page_size, 1, 1, count - self.page_size - 2], 4),
            ):
                found = self.chunked(shape, dtype, chunks, neighbours)
                what = f"{shape} {dtype} in chunks of {chunks[:3]} with {neighbours} others"
                assert_same_bits(found, whole, what)
        if len(refused) == len(first) + len(self.dtypes) - 1:
            skip(f"not invariant on this machine: {refused[0]}")

    def chunked(
        self, shape: tuple[int, int, int, int], dtype: str, chunks: Sequence[int], neighbours: int
    ) -> Tensor:
        """Outputs of one fixed sequence, computed in chunks beside random neighbours."""
        fixed = self.world(shape=shape, dtype=dtype).inputs(sum(chunks))
        seed = 1 + neighbours + len(chunks)
        world = self.world(shape=shape, dtype=dtype, seed=seed, invariant=True)
        for at in range(neighbours + 1):
            world.open(at)
        place = neighbours // 2
        begin, outputs = 0, []
        for chunk in filter(None, chunks):
            counts = [world.random.choice((1, 2, 19)) for _ in range(neighbours)]
            counts.insert(place, chunk)
            rows = [Rows(sequence_id=at, count=count) for at, count in enumerate(counts)]
            others = world.inputs(sum(counts))
            start = sum(counts[:place])
            for mine, all_rows in zip(fixed, others, strict=True):
                all_rows[start : start + chunk] = mine[begin : begin + chunk]
            found, _ = world.step(rows, {0: others}, compare=False)[0]
            outputs.append(found[start : start + chunk])
            begin += chunk
        return torch.cat(outputs)
