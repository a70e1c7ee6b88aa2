"""What every accelerator must do. Skipped with the component's own reason where it cannot run."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator

import torch

from deepinfer_core.components import Slot
from deepinfer_core.interfaces.accelerator import Accelerator, AcceleratorContext
from deepinfer_core.testing.contracts.base import Contract
from deepinfer_core.testing.numerics import Family, assert_close


class WorkError(Exception):
    """What failing work raises."""


class AcceleratorContract(Contract):
    """Laws of the slot ``accelerator``; each runs with and without overlap."""

    slot = Slot.ACCELERATOR

    @contextlib.contextmanager
    def accelerator(self, overlap: bool = True) -> Iterator[Accelerator]:
        """A new accelerator, closed at the end."""
        built: Accelerator = self.make(AcceleratorContext(overlap=overlap))
        try:
            yield built
        finally:
            built.close()

    def both(self) -> Iterator[Accelerator]:
        """An accelerator with overlap, then one without."""
        for overlap in (True, False):
            with self.accelerator(overlap) as accelerator:
                yield accelerator

    # --------------------------------------------------------------------------- queue of work

    def test_wait_returns_the_result(self) -> None:
        """``wait`` gives what the work returned, as often as it is called."""
        for accelerator in self.both():
            pending = accelerator.launch(lambda: [1, 2, 3])
            assert pending.wait() == [1, 2, 3]
            assert pending.wait() == [1, 2, 3]

    def test_work_runs_in_the_order_of_launching(self) -> None:
        """Pieces of work run one after another, slow ones too."""
        for accelerator in self.both():
            order: list[int] = []
            running: list[int] = []

            def work(index: int, order: list[int] = order, running: list[int] = running) -> None:
                running.append(index)
                if index % 5 == 0:
                    threading.Event().wait(0.002)
                order.append(index)
                assert running.pop() == index, "two pieces of work ran at once"

            pieces = [accelerator.launch(functools.partial(work, index)) for index in range(30)]
            pieces[-1].wait()
            assert order == list(range(30))
            for piece in pieces:
                piece.wait()

    def test_wait_blocks_until_the_work_is_done(self) -> None:
        """After ``wait``, whatever the work did is visible."""
        for accelerator in self.both():
            seen: list[str] = []

            def work(seen: list[str] = seen) -> str:
                threading.Event().wait(0.02)
                seen.append("done")
                return "result"

            pending = accelerator.launch(work)
            assert pending.wait() == "result"
            assert seen == ["done"]

    def test_done_is_true_once_it_was_waited_for(self) -> None:
        """After ``wait``, ``done`` is True, also for work that failed."""
        for accelerator in self.both():

            def work() -> None:
                raise WorkError

            fine, failing = accelerator.launch(lambda: 1), accelerator.launch(work)
            fine.wait()
            with contextlib.suppress(WorkError):
                failing.wait()
            assert fine.done() is True
            assert failing.done() is True

    def test_overlap_lets_the_host_go_on(self) -> None:
        """With ``overlap``, ``launch`` returns before the work is done."""
        with self.accelerator(overlap=True) as accelerator:
            go = threading.Event()
            pending = accelerator.launch(lambda: go.wait(1.0))
            assert pending.done() is False, "launch did the work before it returned"
            go.set()
            assert pending.wait() is True

    def test_wait_raises_what_the_work_raised(self) -> None:
        """An exception comes out of ``wait``, as often as it is called, not out of ``launch``."""
        for accelerator in self.both():

            def work() -> None:
                raise WorkError("row 3 is not finite")

            pending = accelerator.launch(work)
            for _ in range(2):
                raised = ""
                try:
                    pending.wait()
                except WorkError as error:
                    raised = str(error)
                assert raised == "row 3 is not finite", "the exception of the work was swallowed"

    def test_failed_work_does_not_disturb_later_work(self) -> None:
        """The queue goes on after an exception, whether somebody waited for it or not."""
        for accelerator in self.both():

            def work() -> None:
                raise WorkError

            accelerator.launch(work)
            assert accelerator.launch(lambda: "fine").wait() == "fine"

    def test_close_finishes_what_was_launched(self) -> None:
        """``close`` waits for queued work, and may be called twice."""
        for overlap in (True, False):
            accelerator: Accelerator = self.make(AcceleratorContext(overlap=overlap))
            seen: list[int] = []

            def work(index: int, seen: list[int] = seen) -> None:
                threading.Event().wait(0.002)
                seen.append(index)

            for index in range(5):
                accelerator.launch(functools.partial(work, index))
            accelerator.close()
            accelerator.close()
            assert seen == list(range(5))

    # ----------------------------------------------------------------------------- computation

    def test_work_computes_on_the_device(self) -> None:
        """In every supported dtype a product on the device agrees with float64."""
        generator = torch.Generator().manual_seed(0)
        left = torch.randn(17, 33, generator=generator, dtype=torch.float64)
        right = torch.randn(33, 9, generator=generator, dtype=torch.float64)
        for accelerator in self.both():
            for name in accelerator.supported_dtypes():
                dtype, device = getattr(torch, name), accelerator.device

                def work(dtype: torch.dtype = dtype, device: torch.device = device) -> torch.Tensor:
                    return left.to(device, dtype) @ right.to(device, dtype)

                found = accelerator.launch(work).wait()
                assert found.device.type == accelerator.device.type
                expected = left.to(dtype).double() @ right.to(dtype).double()
                assert_close(found.cpu(), expected, dtype=name, family=Family.PRODUCT)

    def test_supported_dtypes_are_torch_names(self) -> None:
        """``supported_dtypes`` is not empty and names floating-point dtypes, none twice."""
        for accelerator in self.both():
            names = accelerator.supported_dtypes()
            assert names
            assert len(set(names)) == len(names)
            for name in names:
                dtype = getattr(torch, name, None)
                assert isinstance(dtype, torch.dtype), f"torch has no dtype {name!r}"
                assert dtype.is_floating_point

    # ----------------------------------------------------------------------------------- facts

    def test_padding_never_shrinks(self) -> None:
        """``pad_tokens`` is at least its argument, grows with it, and pads nothing twice."""
        for accelerator in self.both():
            before = 0
            for count in [*range(1, 300), 511, 512, 513, 2048, 8191, 8192]:
                padded = accelerator.pad_tokens(count)
                assert padded >= count, f"{count} rows were padded to {padded}"
                assert padded >= before, f"{count} rows are padded to less than fewer rows"
                assert accelerator.pad_tokens(padded) == padded, f"{padded} rows are padded again"
                before = padded

    def test_memory_is_plausible(self) -> None:
        """0 <= free <= total, in bytes, and there is some."""
        for accelerator in self.both():
            memory = accelerator.memory()
            assert 0 <= memory.free_bytes <= memory.total_bytes
            assert memory.total_bytes >= 1 << 20, "less than a MiB is no amount of bytes"

    def test_ordinary_errors_do_not_lose_the_device(self) -> None:
        """``is_lost`` is False for what a bad request may cause, and never raises."""
        errors = (
            ValueError("bad shape"),
            RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
            IndexError(),
            MemoryError(),
            WorkError("x"),
            KeyboardInterrupt(),
        )
        for accelerator in self.both():
            for error in errors:
                assert accelerator.is_lost(error) is False, f"{error!r} does not lose a device"

    def test_it_describes_itself(self) -> None:
        """``name`` and ``describe`` are strings that ``plan`` can print."""
        for accelerator in self.both():
            assert accelerator.name
            for key, value in accelerator.describe().items():
                assert isinstance(key, str)
                assert isinstance(value, str)
