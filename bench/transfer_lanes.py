"""What `bench transfer` runs: copies back to back in one or both directions, beside a decode loop.

Everything here is the same on a GPU and on a CPU; marks take the time (CUDA events, or the clock).
"""

from __future__ import annotations

import ctypes
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from liveserve.bench.compute_load import DecodeLoop
from liveserve.kernels.base import CopyMethod, CopyRequest, Direction
from liveserve.kernels.calibrate import Table
from liveserve.kernels.gpu import on_gpu, on_stream
from liveserve.kernels.layout import SLOT_ALIGN_BYTES, Int64Array, PagedCache
from liveserve.kvtier.links import open_link
from liveserve.kvtier.pool import HostPool
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import Kind, Transfer

MAX_LAYERS = 48
_UNTOUCHED = 0xA5


class Arena:
    """Memory that the cases of one direction share: pinning it anew for each would take longer than
    the copies. Holds two copies of ``max_bytes`` on either side."""

    def __init__(self, device: str, max_bytes: int) -> None:
        self.device = device
        self._stored = torch.empty(2 * max_bytes, dtype=torch.uint8, device=device)
        self._host = HostPool(1, 2 * max_bytes, device=device)

    def case(self, fragment_bytes: int, count: int) -> Case:
        """See ``Case``; as many of ``count`` fragments as are whole blocks of up to 48 layers."""
        layers = min(MAX_LAYERS, count)
        blocks = count // layers
        total = 2 * layers * blocks * fragment_bytes
        shapes = (layers, 2 * blocks, fragment_bytes), (2 * blocks, layers * fragment_bytes)

        def views(sides: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
            stored, pool = (
                side[:total].view(shape) for side, shape in zip(sides, shapes, strict=True)
            )
            return stored, pool

        stored, pool = views((self._stored, self._host.data.view(-1)))
        return Case(stored, pool, lambda: views(self._random))

    @cached_property
    def _random(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Random bytes for both sides, made once."""
        torch.manual_seed(1)
        words = [
            torch.empty_like(side).view(torch.int64)
            for side in (self._stored, self._host.data.view(-1))
        ]
        stored, pool = (word.random_().view(torch.uint8) for word in words)
        return stored, pool

    def close(self) -> None:
        """Unpins; no case may be used any more."""
        if self.device.startswith("cuda"):
            torch.cuda.synchronize(self.device)
        self._host.close()


class Case:
    """Fragments of one size in blocks of a paged cache, and slots for them.

    ``stored`` is uint8 ``[layers, 2 * blocks, fragment_bytes]``, ``pool`` uint8
    ``[2 * blocks, layers * fragment_bytes]``. A copy moves one of two disjoint ``sets`` of blocks
    and slots, in random order, so two copies can be under way. ``random_bytes`` gives contents to
    check with, shaped like both.

    Raises:
        ValueError: fragments that are no multiple of 16 bytes.
    """

    def __init__(
        self,
        stored: torch.Tensor,
        pool: torch.Tensor,
        random_bytes: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        layers, twice, fragment_bytes = stored.shape
        if fragment_bytes % SLOT_ALIGN_BYTES:
            raise ValueError(
                f"fragments must be multiples of {SLOT_ALIGN_BYTES} bytes, got {fragment_bytes}"
            )
        self.stored = stored
        self.pool = pool
        self._random_bytes = random_bytes
        self.cache = PagedCache.from_allocation(stored)
        self.fragment_bytes = fragment_bytes
        self.count = layers * twice // 2
        self.nbytes = self.count * fragment_bytes
        draw = np.random.default_rng(twice)
        order = [draw.permutation(twice).astype(np.int64) for _ in range(2)]
        half = twice // 2
        self.sets = [(order[0][:half], order[1][:half]), (order[0][half:], order[1][half:])]

    def check(self, name: str, direction: Direction, copy: Callable[[int], None]) -> None:
        """Whether ``copy(0)`` writes set 0 of the side it writes, whole, and nothing else.

        The expected bytes come from plain indexing, not from a copy method.

        Raises:
            RuntimeError: it does not.
        """
        blocks, slots = (torch.from_numpy(ids) for ids in self.sets[0])
        load = direction is Direction.LOAD
        stored, pool = self._random_bytes()
        source, target = (self.pool, self.stored) if load else (self.stored, self.pool)
        source.copy_(pool if load else stored)
        target.fill_(_UNTOUCHED)
        if self.stored.is_cuda:
            torch.cuda.synchronize(self.stored.device)
        copy(0)
        expected = torch.full_like(target, _UNTOUCHED)
        # [slots, layers, fragment_bytes]
        fragments = (len(self.pool), self.stored.shape[0], self.fragment_bytes)
        if load:
            moved = pool.view(fragments)[slots].transpose(0, 1)
            expected[:, blocks.to(target.device)] = moved.to(target.device)
        else:
            moved = stored[:, blocks.to(stored.device)].transpose(0, 1)
            expected.view(fragments)[slots] = moved.to(target.device)
        for what, found, wanted in (
            ("wrote wrong bytes", target, expected),
            ("changed what it read", source, pool if load else stored),
        ):
            if not torch.equal(found, wanted):
                raise RuntimeError(f"{name} {what} ({direction.value}, {self.fragment_bytes} B)")


class ContiguousCopy(CopyMethod):
    """The raw limit of the link: whole fragments by torch's own copy, meant for few big ones."""

    name = "limit"
    needs = "the limit is measured on a cache of one layer"

    def available(self) -> bool:
        return True

    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        return cache.num_layers == 1

    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        view = cache.layers[0][0].view
        assert view is not None
        with on_stream(torch.device(cache.device), stream):
            for block, slot in zip(request.block_ids, request.slot_ids, strict=True):
                source, target = pool[slot], view[block]
                if request.direction is Direction.STORE:
                    source, target = target, source
                target.copy_(source, non_blocking=True)


class FragmentCopy(CopyMethod):
    """The naive baseline: a ``cuMemcpyAsync`` for each fragment of each block."""

    name = "cudaMemcpyAsync"
    needs = "cuMemcpyAsync needs the cache on a GPU, the pool pinned or there"

    def __init__(self, call: Callable[[int, int, int, int], int] | None = None) -> None:
        """
        Args:
            call: in place of the driver's: takes target, source, bytes and the stream's handle,
                returns a status.
        """
        self._call = call
        self._injected = call is not None

    def available(self) -> bool:
        return self._injected or torch.cuda.is_available()

    def supports(self, cache: PagedCache, pool: torch.Tensor) -> bool:
        return self._injected or on_gpu(cache, pool)

    def run(
        self,
        request: CopyRequest,
        cache: PagedCache,
        pool: torch.Tensor,
        layers: range | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        call = self._call = self._call or _driver_memcpy()
        device = torch.device(cache.device)
        with on_stream(device, stream):
            handle = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
            for source, target, nbytes in zip(*_lists(request.addresses()), strict=True):
                status = call(target, source, nbytes, handle)
                if status:
                    raise RuntimeError(f"cuMemcpyAsync of {nbytes} bytes failed: error {status}")


def _lists(columns: Sequence[Int64Array]) -> list[list[int]]:
    return [column.tolist() for column in columns]


def _driver_memcpy() -> Callable[[int, int, int, int], int]:
    call = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    call.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    call.restype = ctypes.c_int
    return call


class Mark(Protocol):
    """A moment in the course of a runner's work."""

    def wait(self) -> None:
        """Until it has come."""

    def since(self, earlier: Any) -> float:
        """Seconds from another mark of the runner; both have come."""


class HostMark:
    def __init__(self) -> None:
        self._at_s = time.perf_counter()

    def wait(self) -> None:
        return None

    def since(self, earlier: HostMark) -> float:
        return self._at_s - earlier._at_s


class EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # One that does not spin: other threads need the cores.
        self._event = torch.cuda.Event(enable_timing=True, blocking=True)
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: EventMark) -> float:
        return earlier._event.elapsed_time(self._event) * 1e-3


class TransferMark:
    def __init__(self, engine: TransferEngine, transfer: Transfer) -> None:
        self._engine, self._transfer = engine, transfer

    def wait(self) -> None:
        self._engine.wait(self._transfer)
        self._engine.poll()
        if not self._transfer.ok:
            raise RuntimeError(
                f"transfer {self._transfer.number} {self._transfer.state.value}"
            ) from self._transfer.error

    def since(self, earlier: TransferMark) -> float:
        end_s, start_s = self._transfer.finished_s, earlier._transfer.finished_s
        assert end_s is not None
        assert start_s is not None
        return end_s - start_s


class Runner(ABC):
    """Does the same thing again and again, ``ahead`` times at once at most.

    ``times_s`` holds the seconds from each end to the next.
    """

    def __init__(self, minimum: int, ahead: int) -> None:
        self.minimum = minimum
        self.times_s: list[float] = []
        self._ahead = ahead
        self._marks: deque[Mark] = deque()

    @property
    def enough(self) -> bool:
        return len(self.times_s) >= self.minimum

    @abstractmethod
    def issue(self) -> None:
        """Start one more."""

    @abstractmethod
    def mark(self) -> Mark:
        """The end of the one issued last."""

    def begin(self) -> None:
        """One that does not count, and wait for it."""
        self.issue()
        first = self.mark()
        first.wait()
        self._marks.append(first)

    def advance(self) -> None:
        self.issue()
        self._marks.append(self.mark())
        if len(self._marks) > self._ahead:
            self._settle()

    def finish(self) -> None:
        while len(self._marks) > 1:
            self._settle()

    def _settle(self) -> None:
        earlier, later = self._marks[0], self._marks[1]
        later.wait()
        self._marks.popleft()
        self.times_s.append(later.since(earlier))


class CopyLane(Runner):
    """Copies of a case by a method, on a stream of its own."""

    def __init__(self, case: Case, direction: Direction, method: CopyMethod, minimum: int) -> None:
        super().__init__(minimum, ahead=2)
        self._case, self._direction, self._method = case, direction, method
        self._stream = torch.cuda.Stream(case.cache.device) if case.stored.is_cuda else None
        self._issued = 0

    def copy(self, which: int) -> None:
        """Copies a set, and waits for it."""
        self._enqueue(which)
        self.mark().wait()

    def issue(self) -> None:
        self._enqueue(self._issued % 2)
        self._issued += 1

    def mark(self) -> Mark:
        return HostMark() if self._stream is None else EventMark(self._stream)

    def _enqueue(self, which: int) -> None:
        case = self._case
        blocks, slots = case.sets[which]
        self._method.copy(
            self._direction, case.cache, case.pool, blocks, slots, stream=self._stream
        )


class EngineLane(Runner):
    """Preloads or stores of a case by a TransferEngine of its own, as serving does them."""

    def __init__(
        self,
        case: Case,
        direction: Direction,
        minimum: int,
        *,
        table: Table,
        link_gbps: float | None = None,
    ) -> None:
        super().__init__(minimum, ahead=2)
        self._case = case
        self._kind = Kind.STORE if direction is Direction.STORE else Kind.PRELOAD
        link = open_link(case.cache, case.pool, link_gbps=link_gbps, table=table)
        self._engine = TransferEngine(case.cache, case.pool, link)
        self._last: Transfer | None = None
        self._issued = 0

    def copy(self, which: int) -> None:
        """Copies a set, and waits for it."""
        self._submit(which)
        self.mark().wait()

    def issue(self) -> None:
        self._submit(self._issued % 2)
        self._issued += 1

    def mark(self) -> Mark:
        assert self._last is not None
        return TransferMark(self._engine, self._last)

    def close(self) -> None:
        self._engine.close(drain=False)

    def _submit(self, which: int) -> None:
        blocks, slots = self._case.sets[which]
        self._last = self._engine.submit(self._kind, blocks, slots)


class DecodeRunner(Runner):
    """Steps of a decode loop."""

    def __init__(self, loop: DecodeLoop, minimum: int) -> None:
        super().__init__(minimum, ahead=8)
        self._loop = loop

    def issue(self) -> None:
        self._loop.step()

    def mark(self) -> Mark:
        stream = self._loop.stream
        return HostMark() if stream is None else EventMark(stream)


def run_together(runners: Sequence[Runner]) -> None:
    """Runs all at the same time, a thread each, until each has enough.

    Raises:
        Exception: what the first that failed raised.
    """
    failures: list[Exception] = []
    ready = threading.Barrier(len(runners))

    def work(runner: Runner) -> None:
        try:
            try:
                runner.begin()
            finally:
                ready.wait()
            while not failures and not all(other.enough for other in runners):
                runner.advance()
            runner.finish()
        except Exception as exc:
            failures.append(exc)

    if len(runners) == 1:
        work(runners[0])
    else:
        threads = [threading.Thread(target=work, args=(runner,)) for runner in runners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
