"""TransferEngine: moves blocks between the cache and a pool's slots, urgent ones first.

One queue of our own per direction, because a GPU's copy engine ignores stream priorities: transfers
are cut into pieces, and no more bytes are handed to the link at a time than it moves in
``max_wait_s``, so that an on-path load waits no longer than that behind others.

Order. Transfers that touch the same block or slot, one of them writing it, run in the order of
their submission, each after the other has ended; all others run by kind, then age. So a block is
never read before its load completes nor overwritten before its store has read it, whatever the
caller frees early. What an urgent transfer waits for is as urgent as it is. A transfer whose source
was to be written by one that failed or was cancelled fails too (`SourceLost`): what is there is not
what it was meant to read.

Against compute, a transfer waits on the host until the ``after`` it was given has happened before
anything is enqueued, so no copy can read ahead of it, whatever order the driver grants. Compute
waits for a transfer through `order_compute`, or starts after `poll` reported it.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from liveserve.kernels.base import Direction, Ids, as_ids, check_pool
from liveserve.kernels.layout import PagedCache
from liveserve.kvtier.transfer_base import (
    EngineStats,
    Event,
    Kind,
    LaneStats,
    Link,
    Piece,
    Ready,
    SourceLost,
    State,
    Transfer,
    TransferError,
)
from liveserve.kvtier.transfer_pieces import SlotChecksums, bytes_of, cut

if TYPE_CHECKING:
    import torch

# How often a lane with nothing else to do looks whether an `after` has happened.
_AFTER_CHECK_S = 0.0005


@dataclass(eq=False, slots=True)
class _Work:
    """What the engine keeps of a transfer until it has ended."""

    pieces: Iterator[Piece]
    after: Callable[[], bool] | None
    rank: Kind
    next: Piece | None = None
    in_flight: int = 0
    left_bytes: int = 0
    cancelled: bool = False
    rush: bool = False
    ready: bool = False
    blockers: set[Transfer] = field(default_factory=set)
    # Those that come after it; True: they read what it writes, and are lost with it.
    dependents: dict[Transfer, bool] = field(default_factory=dict)
    fences: list[tuple[int, Any]] = field(default_factory=list)


class _Lane:
    """The queue of one direction."""

    def __init__(self, stats: LaneStats) -> None:
        self.heap: list[tuple[Kind, int, Transfer]] = []
        self.waiting: list[Transfer] = []  # for their `after`
        self.stats = stats
        self.busy_since_s = 0.0
        self.idle_since_s = 0.0


class TransferEngine:
    """Moves blocks of ``cache`` from and to slots of ``pool`` over ``link``.

    Used by one thread, its owner. The link's threads do the moving, so nothing depends on how
    often the owner polls.

    Args:
        cache: the paged cache.
        pool: uint8 ``[num_slots, >= cache.slot_bytes]`` in host memory.
        link: a `CpuLink` or `CudaLink` over the same two.
        max_wait_s: how long an on-path load may wait behind bytes that the link already has, at
            ``link.gbps``; half of it is the largest piece. One layer of one block is never cut.
        checksums: keep the CRC-32 of every slot that is stored and check it before it is loaded.
            Costs about a millisecond per MiB on the link's threads.

    Raises:
        ValueError: the pool does not fit the cache, or ``max_wait_s`` is not positive.
    """

    def __init__(
        self,
        cache: PagedCache,
        pool: torch.Tensor,
        link: Link,
        *,
        max_wait_s: float = 0.001,
        checksums: bool = False,
    ) -> None:
        check_pool(cache, pool)
        if not max_wait_s > 0:
            raise ValueError(f"max_wait_s must be positive, got {max_wait_s}")
        self.cache = cache
        self.pool = pool
        self.link = link
        self.num_slots = int(pool.shape[0])
        self.piece_bytes = max(1, int(link.gbps * 1e9 * max_wait_s / 2))
        self.max_in_flight_bytes = 2 * self.piece_bytes
        self.stats = EngineStats()
        self._sums = SlotChecksums(pool) if checksums else None
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)  # lanes wait for pieces
        self._progress = threading.Condition(self._lock)  # the owner waits for transfers
        self._lanes = {d: _Lane(self.stats.lanes[d]) for d in Direction}
        self._queued = dict.fromkeys(Kind, 0)
        # Unfinished transfers by what they touch: id → {transfer: whether it writes}.
        self._blocks: dict[int, dict[Transfer, bool]] = {}
        self._slots: dict[int, dict[Transfer, bool]] = {}
        # What a transfer should have written and did not, with the last such transfer's number,
        # until a later one of all layers succeeds; blocks only until the owner has been told.
        self._lost_slots: dict[int, int] = {}
        self._lost_blocks: dict[int, int] = {}
        self._unfinished: set[Transfer] = set()
        self._ended: list[Transfer] = []
        self._numbers = 0
        self._closing = False
        self._stopped = False
        self._broken: BaseException | None = None
        link.start(self)

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The owner's side.

    def submit(
        self,
        kind: Kind,
        block_ids: Ids,
        slot_ids: Ids,
        *,
        layers: range | None = None,
        layerwise: bool = False,
        after: Ready | None = None,
        tag: Any = None,
    ) -> Transfer:
        """Queue a transfer between blocks ``block_ids`` and slots ``slot_ids``, int64 ``[n]``.

        Args:
            kind: direction and priority.
            layers: only these layers; all where None.
            layerwise: move layer by layer, so that ``layers_done`` and `order_compute` can tell
                the first layers' arrival. Otherwise block by block, which copies faster.
            after: nothing moves before this has happened: for a store the event of the compute
                that writes the blocks; for a load that of the last compute that used the blocks
                for somebody else.
            tag: anything; comes back with the transfer.

        Raises:
            ValueError: ids out of range, of different lengths, or repeated on the written side;
                layers that the cache does not have.
            TransferError: the engine is closed, or its link broke.
        """
        blocks = as_ids("block_ids", block_ids, self.cache.num_blocks)
        slots = as_ids("slot_ids", slot_ids, self.num_slots)
        if len(blocks) != len(slots):
            raise ValueError(
                f"block_ids and slot_ids must pair up, got {len(blocks)} and {len(slots)}"
            )
        # Runs that are contiguous on both sides lie together, and are cut as seldom as can be.
        pairs = sorted(
            zip(blocks.tolist(), slots.tolist(), strict=True), key=lambda p: (p[0] - p[1], p[0])
        )
        name, side = ("slot_ids", 1) if kind is Kind.STORE else ("block_ids", 0)
        if len({pair[side] for pair in pairs}) != len(pairs):
            raise ValueError(f"{name} must not repeat in a {kind.direction.value}")
        chosen = self.cache.check_layers(layers)
        num_bytes = len(pairs) * bytes_of(self.cache, chosen)
        with self._lock:
            if self._broken is not None:
                raise TransferError(f"the link broke: {self._broken}") from self._broken
            if self._closing:
                raise TransferError("the transfer engine is closed")
            transfer = Transfer(
                number=self._numbers,
                kind=kind,
                block_ids=tuple(p[0] for p in pairs),
                slot_ids=tuple(p[1] for p in pairs),
                layers=chosen,
                num_bytes=num_bytes,
                tag=tag,
                submitted_s=time.monotonic(),
            )
            self._numbers += 1
            pieces = cut(self.cache, transfer, self.piece_bytes, layerwise=layerwise)
            transfer.work = work = _Work(pieces, _query_of(after), kind)
            work.next = next(work.pieces, None)
            work.left_bytes = num_bytes
            self._unfinished.add(transfer)
            self.stats.kinds[kind].submitted += 1
            self._queued[kind] += num_bytes
            self._lanes[kind.direction].stats.queued_bytes += num_bytes
            self._find_blockers(transfer)
            if transfer.error is not None:
                self._end(transfer)
            elif work.blockers:
                self._raise_rank(transfer, kind)
            else:
                self._admit(transfer)
        return transfer

    def poll(self) -> list[Transfer]:
        """Transfers that ended since the last call, each reported once, in the order they ended."""
        with self._lock:
            ended, self._ended = self._ended, []
            for transfer in ended if self._lost_blocks else ():
                if transfer.kind is not Kind.STORE:
                    for block in transfer.block_ids:
                        if self._lost_blocks.get(block) == transfer.number:
                            del self._lost_blocks[block]
        return ended

    def cancel(self, transfer: Transfer) -> bool:
        """Move no further piece of ``transfer``. `poll` reports it once none is under way.

        Returns:
            whether it will end as cancelled; False: it has ended, or its last piece is under way.
        """
        with self._lock:
            return self._cancel(transfer)

    def promote(self, transfer: Transfer) -> None:
        """Make a preload an on-path load. Nothing happens to an on-path load or an ended one.

        Raises:
            ValueError: it is a store.
        """
        if transfer.kind is Kind.STORE:
            raise ValueError(f"transfer {transfer.number} is a store, not a preload")
        with self._lock:
            self._promote(transfer)

    def wait(self, transfer: Transfer, timeout_s: float | None = None) -> bool:
        """Block until ``transfer`` has ended. `poll` still reports it.

        Returns:
            whether it has ended; False: the time is over.
        """
        with self._lock:
            return self._progress.wait_for(lambda: transfer.ended, timeout_s)

    def order_compute(
        self, transfer: Transfer, layers: int | None = None, stream: Any = None
    ) -> None:
        """Let compute go after ``transfer``: after a load it reads the blocks, after a store it
        overwrites them.

        Makes the transfer as urgent as can be and hands it to the link at once. On a GPU it
        returns as soon as it is enqueued, and ``stream`` waits; on a CPU it returns when the bytes
        are there.

        Args:
            layers: only the first so many layers of the transfer matter; all where None.
            stream: the compute stream; None: the current one.

        Raises:
            ValueError: the transfer has fewer layers.
            TransferError: it failed or was cancelled; its own error is the cause. An error that
                a GPU finds while copying shows in `poll` only.
        """
        needed = len(transfer.layers) if layers is None else layers
        if not 0 <= needed <= len(transfer.layers):
            raise ValueError(f"layers must lie in 0..{len(transfer.layers)}, got {needed}")
        fence = None
        with self._lock:
            if not transfer.ended:
                transfer.work.rush = True
                if transfer.kind is Kind.STORE:
                    self._raise_rank(transfer, Kind.ON_PATH)
                else:
                    self._promote(transfer)
                self._work.notify_all()
            while not transfer.ok and transfer.layers_done < needed:
                if transfer.ended or transfer.error is not None or transfer.work.cancelled:
                    raise TransferError(
                        f"transfer {transfer.number} {_how(transfer)}"
                    ) from transfer.error
                covering = (f for after, f in transfer.work.fences if after >= needed)
                fence = next(covering, None)
                if fence is not None:
                    break
                self._progress.wait()
        if fence is not None:
            self.link.order(fence, stream)

    def estimate_s(self, kind: Kind, num_bytes: int) -> float:
        """Seconds until a transfer submitted now would be done, at the link's rate."""
        lane = self._lanes[kind.direction].stats
        with self._lock:
            ahead = sum(
                self._queued[k] for k in Kind if k.direction is kind.direction and k <= kind
            )
            return (ahead + lane.in_flight_bytes + num_bytes) / (self.link.gbps * 1e9)

    @property
    def num_unfinished(self) -> int:
        return len(self._unfinished)

    def close(self, *, drain: bool = True, timeout_s: float | None = 60.0) -> None:
        """Stop. `poll` reports what ended meanwhile; closing again does nothing.

        Args:
            drain: finish what is queued; False: cancel it, as `cancel` does.
            timeout_s: after so long cancel the rest (an ``after`` may never happen).
        """
        with self._lock:
            if self._stopped:
                return
            self._closing = True
            if drain:
                self._progress.wait_for(lambda: not self._unfinished, timeout_s)
            for transfer in list(self._unfinished):
                self._cancel(transfer)
            self._progress.wait_for(lambda: not self._unfinished)
            self._stopped = True
            self._work.notify_all()
        self.link.join()

    # The lanes' side: see `transfer_base.Source`.

    def take(self, direction: Direction, *, block: bool) -> Piece | None:
        while True:
            piece = self._take(direction, block)
            if piece is None or self._sums is None or direction is Direction.STORE:
                return piece
            error = self._sums.check(piece.slot_ids) if piece.opens else None
            if error is None:
                return piece
            self.finish(piece, error)

    def issued(self, piece: Piece, fence: Any) -> None:
        with self._lock:
            if not piece.transfer.ended:
                piece.transfer.work.fences.append((piece.layers_after, fence))
                self._progress.notify_all()

    def finish(self, piece: Piece, error: BaseException | None = None) -> None:
        transfer = piece.transfer
        stored = transfer.kind is Kind.STORE and error is None and piece.closes
        if stored and self._sums is not None:
            self._sums.record(piece.slot_ids)
        with self._lock:
            now_s = time.monotonic()
            lane = self._lanes[transfer.kind.direction]
            lane.stats.in_flight_bytes -= piece.num_bytes
            if not lane.stats.in_flight_bytes:
                lane.stats.busy_s += now_s - lane.busy_since_s
                lane.idle_since_s = now_s
            if transfer.ended:  # its lane broke
                return
            work = transfer.work
            work.in_flight -= 1
            if error is not None:
                transfer.error = transfer.error or error
            else:
                lane.stats.pieces += 1
                lane.stats.bytes += piece.num_bytes
                self.stats.kinds[transfer.kind].bytes += piece.num_bytes
                transfer.bytes_done += piece.num_bytes
                if transfer.error is None:
                    transfer.layers_done = max(transfer.layers_done, piece.layers_after)
            stops = work.next is None or work.cancelled or transfer.error is not None
            if stops and not work.in_flight:
                self._end(transfer)
            self._work.notify_all()
            self._progress.notify_all()

    def broken(self, direction: Direction, error: BaseException) -> None:
        with self._lock:
            self._broken = self._broken or error
            for transfer in list(self._unfinished):
                if transfer.ended:
                    continue
                transfer.error = transfer.error or error
                # What the other lane has under way ends when that lane says so.
                if not transfer.work.in_flight or transfer.kind.direction is direction:
                    self._end(transfer)
            self._work.notify_all()

    # Under the lock.

    def _take(self, direction: Direction, block: bool) -> Piece | None:
        lane = self._lanes[direction]
        with self._lock:
            while True:
                piece = self._pick(lane)
                if piece is not None or not block:
                    return piece
                if self._stopped or self._broken is not None:
                    return None
                self._work.wait(_AFTER_CHECK_S if lane.waiting else None)

    def _pick(self, lane: _Lane) -> Piece | None:
        self._check_waiting(lane)
        while lane.heap:
            rank, _, transfer = lane.heap[0]
            work = transfer.work
            stale = transfer.ended or work.cancelled or transfer.error is not None
            if stale or work.next is None or rank != work.rank:
                heapq.heappop(lane.heap)
                continue
            piece: Piece = work.next
            under_way = lane.stats.in_flight_bytes
            full = under_way + piece.num_bytes > self.max_in_flight_bytes
            if under_way and full and not work.rush:
                return None
            work.next = next(work.pieces, None)
            self._issue(lane, piece)
            return piece
        return None

    def _issue(self, lane: _Lane, piece: Piece) -> None:
        transfer, now_s = piece.transfer, time.monotonic()
        if transfer.started_s is None:
            transfer.started_s = now_s
            transfer.state = State.MOVING
            self.stats.kinds[transfer.kind].started += 1
            self.stats.kinds[transfer.kind].queue_s += now_s - transfer.submitted_s
        transfer.work.in_flight += 1
        self._forget_queued(transfer, piece.num_bytes)
        if not lane.stats.in_flight_bytes:
            # The moments between pieces that could follow one another count.
            lane.busy_since_s = max(lane.idle_since_s, transfer.eligible_s or now_s)
        lane.stats.in_flight_bytes += piece.num_bytes

    def _forget_queued(self, transfer: Transfer, num_bytes: int) -> None:
        transfer.work.left_bytes -= num_bytes
        self._queued[transfer.kind] -= num_bytes
        self._lanes[transfer.kind.direction].stats.queued_bytes -= num_bytes

    def _check_waiting(self, lane: _Lane) -> None:
        if not lane.waiting:
            return
        waiting, lane.waiting = lane.waiting, []
        for transfer in waiting:
            if transfer.ended:
                continue
            try:
                happened = transfer.work.after()
            except Exception as exc:
                transfer.error = exc
                self._end(transfer)
                continue
            if happened:
                self._make_ready(transfer)
            else:
                lane.waiting.append(transfer)

    def _find_blockers(self, transfer: Transfer) -> None:
        """Whom it comes after, and that it now touches its blocks and slots. Sets its error if what
        it reads is lost already."""
        stores = transfer.kind is Kind.STORE
        for users, ids, writes, lost in (
            (self._blocks, transfer.block_ids, not stores, self._lost_blocks),
            (self._slots, transfer.slot_ids, stores, self._lost_slots),
        ):
            alone = {transfer: writes}  # shared by all that nobody else uses, which is most
            for number in ids:
                using = users.get(number)
                written_by: list[Transfer] = []
                if using is None or using is alone:
                    users[number] = alone
                else:
                    written_by = self._come_after(transfer, using, writes)
                    users[number] = {**using, transfer: writes}
                if lost and not writes:
                    self._check_lost(transfer, number, written_by)

    def _come_after(
        self, transfer: Transfer, using: dict[Transfer, bool], writes: bool
    ) -> list[Transfer]:
        """Order it after those ``using`` what it uses. Returns who is still to write that, from the
        last that writes it wholly on."""
        written_by: list[Transfer] = []
        for other, other_writes in using.items():  # in the order of submission
            if other is not transfer and (writes or other_writes):
                transfer.work.blockers.add(other)
                other.work.dependents.setdefault(transfer, False)
            if other_writes:
                written_by = [*([] if self._is_whole(other) else written_by), other]
        if not writes:
            for other in written_by:
                other.work.dependents[transfer] = True
        return written_by

    def _check_lost(self, reader: Transfer, number: int, written_by: list[Transfer]) -> None:
        """Whether ``reader`` reads what is lost already; ``written_by`` as of `_come_after`."""
        stores = reader.kind is Kind.STORE
        lost = (self._lost_blocks if stores else self._lost_slots).get(number)
        if lost is None:
            return
        if written_by and written_by[0].number > lost and self._is_whole(written_by[0]):
            return
        what = f"load into block {number}" if stores else f"store into slot {number}"
        reader.error = SourceLost(f"the last {what}, transfer {lost}, did not complete")

    def _is_whole(self, transfer: Transfer) -> bool:
        return len(transfer.layers) == self.cache.num_layers

    def _admit(self, transfer: Transfer) -> None:
        """All that it comes after has ended."""
        if not transfer.work.left_bytes:
            self._end(transfer)
        elif transfer.work.after is None:
            self._make_ready(transfer)
        else:
            self._lanes[transfer.kind.direction].waiting.append(transfer)
            self._work.notify_all()

    def _make_ready(self, transfer: Transfer) -> None:
        work = transfer.work
        work.ready = True
        transfer.eligible_s = time.monotonic()
        lane = self._lanes[transfer.kind.direction]
        heapq.heappush(lane.heap, (work.rank, transfer.number, transfer))
        self._work.notify_all()

    def _cancel(self, transfer: Transfer) -> bool:
        if transfer.ended or transfer.work.next is None:
            return False
        transfer.work.cancelled = True
        if not transfer.work.in_flight:
            self._end(transfer)
        return True

    def _promote(self, transfer: Transfer) -> None:
        if transfer.ended:
            return
        if transfer.kind is Kind.PRELOAD:
            self._queued[Kind.PRELOAD] -= transfer.work.left_bytes
            self._queued[Kind.ON_PATH] += transfer.work.left_bytes
            for stats, step in ((self.stats.kinds[k], d) for k, d in _PROMOTION):
                stats.submitted += step
                stats.started += step * (transfer.started_s is not None)
            transfer.kind = Kind.ON_PATH
        self._raise_rank(transfer, Kind.ON_PATH)

    def _raise_rank(self, transfer: Transfer, rank: Kind) -> None:
        """Make it, and all that it waits for, at least as urgent as ``rank``."""
        pending = [transfer]
        while pending:
            current = pending.pop()
            work = current.work
            if rank < work.rank:
                work.rank = rank
                if work.ready:
                    lane = self._lanes[current.kind.direction]
                    heapq.heappush(lane.heap, (rank, current.number, current))
            # One that is urgent enough has made its own blockers so.
            pending += (b for b in work.blockers if rank < b.work.rank)
        self._work.notify_all()

    def _end(self, transfer: Transfer) -> None:
        """It will move no more; neither will those that needed what it was to write."""
        pending = [transfer]
        while pending:
            current = pending.pop()
            if current.ended:
                continue
            self._settle(current)
            for dependent, reads in current.work.dependents.items():
                if dependent.ended:
                    continue
                if reads and not current.ok:
                    dependent.error = dependent.error or SourceLost(
                        f"transfer {current.number}, which was to write what transfer "
                        f"{dependent.number} reads, {_how(current)}"
                    )
                dependent.work.blockers.discard(current)
                if dependent.work.blockers:
                    continue
                if dependent.error is not None:
                    pending.append(dependent)
                else:
                    self._admit(dependent)
            current.work.dependents.clear()
        self._work.notify_all()
        self._progress.notify_all()

    def _settle(self, transfer: Transfer) -> None:
        work, stats = transfer.work, self.stats.kinds[transfer.kind]
        transfer.finished_s = time.monotonic()
        if transfer.error is not None:
            transfer.state = State.FAILED
            stats.failed += 1
        elif work.left_bytes:
            transfer.state = State.CANCELLED
            stats.cancelled += 1
        else:
            transfer.state = State.DONE
            transfer.layers_done = len(transfer.layers)
            stats.done += 1
        if transfer.started_s is not None:
            stats.move_s += transfer.finished_s - transfer.started_s
        self._forget_queued(transfer, work.left_bytes)
        for users, ids in ((self._blocks, transfer.block_ids), (self._slots, transfer.slot_ids)):
            for number in ids:
                using = users.get(number, {})
                if transfer not in using:
                    continue  # named twice
                if len(using) == 1:
                    del users[number]
                else:
                    del using[transfer]
        stores = transfer.kind is Kind.STORE
        lost = self._lost_slots if stores else self._lost_blocks
        written = transfer.slot_ids if stores else transfer.block_ids
        for number in written if lost or not transfer.ok else ():
            # One cancelled while it waited ends before those it came after.
            last = lost.get(number, -1)
            if not transfer.ok:
                lost[number] = max(last, transfer.number)
            elif last < transfer.number and self._is_whole(transfer):
                lost.pop(number, None)
        work.fences.clear()
        self._unfinished.discard(transfer)
        self._ended.append(transfer)


_PROMOTION = ((Kind.PRELOAD, -1), (Kind.ON_PATH, 1))


def _query_of(after: Ready | None) -> Callable[[], bool] | None:
    return after.query if isinstance(after, Event) else after


def _how(transfer: Transfer) -> str:
    return f"failed: {transfer.error}" if transfer.error is not None else "was cancelled"
