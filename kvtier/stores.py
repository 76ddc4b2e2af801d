"""Stores from the GPU to DRAM: what turns leave, and what the GPU is about to evict.

A store holds blocks that the GPU has under their hashes until they are copied.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from liveserve.kvtier.contents import Contents
from liveserve.kvtier.gpu_blocks import GpuBlocks, HeldBlocks
from liveserve.kvtier.jobs import Ended, Job, job_of
from liveserve.kvtier.tier import Hash, Outcome, Ticket
from liveserve.kvtier.transfer_base import Kind

# A look ahead that found nothing to store is not repeated for so long: it walks over the pool.
_LOOK_AGAIN_S = 0.05


@dataclass(eq=False, slots=True)
class _Turn(Generic[Hash]):
    """Blocks to store, prefix first. Held from the beginning to the end, and released together, so
    that the host goes on to evict the suffix first.
    """

    session: Hashable
    keys: Sequence[Hash]
    todo: deque[tuple[Hash, int, int]]  # key, block, depth
    held: list[int]
    jobs: int = 0
    ahead: bool = False  # of its eviction, which is due soon


@dataclass(eq=False, slots=True)
class _Store(Generic[Hash]):
    number: int
    tickets: list[Ticket[Hash]]
    depths: dict[Hash, int]
    turn: _Turn[Hash]


class Stores(Generic[Hash]):
    """Stores under way, and turns that wait for theirs.

    Args:
        numbers: of jobs, shared with the loads.
        max_moving: blocks of stores under way at once.
        max_held: blocks that stores may keep from being evicted.
        look_ahead: how far to look for blocks that are evicted next, when stores are idle; 0:
            never.

    Attributes:
        on: whether new ones begin.
        blocks_moving: blocks being copied.
        missed: blocks that left the GPU, or were taken back, before they were stored.
    """

    def __init__(
        self,
        contents: Contents[Hash],
        gpu: GpuBlocks[Hash],
        held: HeldBlocks,
        numbers: Iterator[int],
        *,
        max_moving: int,
        max_held: int,
        look_ahead: int,
    ) -> None:
        self.on = True
        self.blocks_moving = 0
        self.missed = 0
        self._contents = contents
        self._gpu = gpu
        self._held = held
        self._numbers = numbers
        self._max_moving = max_moving
        self._max_held = max_held
        self._look_ahead = look_ahead
        self._look_at_s = -math.inf
        self._num_held = 0  # references of ours among ``held``
        self._turns: deque[_Turn[Hash]] = deque()
        self._stores: dict[int, _Store[Hash]] = {}
        self._begin: list[Job] = []

    @property
    def busy(self) -> bool:
        """Whether a worker has, or is about to have, something to do or to report."""
        return bool(self._stores or self._turns or self._begin)

    def add(
        self, session: Hashable, keys: Sequence[Hash], blocks: Sequence[int], *, hold: bool
    ) -> None:
        """See `KvManager.store`."""
        if not self.on:
            return
        # What is under way is not in DRAM yet, and not to be stored again: the tier passes it over.
        todo = [
            (key, block, depth)
            for depth, (key, block) in enumerate(zip(keys, blocks, strict=False))
            if self._contents.is_absent(key)
        ]
        room = max(0, self._max_held - self._num_held)
        self.missed += max(0, len(todo) - room)
        todo = todo[:room]
        if todo:
            held = [block for _, block, _ in todo] if hold else []
            self._enqueue(_Turn(session, keys, deque(todo), held))

    # ---- rounds ----------------------------------------------------------------------------

    def plan(self, now_s: float) -> list[Job]:
        """The scheduling round is over. Returns jobs to begin."""
        if not self.on:
            self.drop_turns(now_s)
        elif self._look_ahead and not self._turns and not self._stores and now_s >= self._look_at_s:
            self._look(now_s)
        while self._turns:
            turn = self._turns[0]
            room = self._max_moving - self.blocks_moving
            if turn.todo and room < 1:
                break
            batch = [turn.todo.popleft() for _ in range(min(room, len(turn.todo)))]
            if batch:
                self._begin_store(turn, batch, now_s)
            if not turn.todo:
                self._turns.popleft()
                if not turn.jobs:
                    self._end_turn(turn, now_s)
        begin, self._begin = self._begin, []
        return begin

    def ended(self, outcome: Ended, now_s: float) -> bool:
        """A job is over. Returns whether it was a store."""
        store = self._stores.pop(outcome.number, None)
        if store is None:
            return False
        self.blocks_moving -= len(store.tickets)
        contents, turn = self._contents, store.turn
        result = Outcome.DONE if outcome.ok else Outcome.FAILED
        voided = []
        for ticket in store.tickets:
            if contents.tier.finish(ticket, result, now_s):
                if contents.stored(ticket.key, store.depths[ticket.key], turn.session):
                    voided.append(ticket.key)
            else:
                contents.forget_gpu_only(ticket.key)
        turn.jobs -= 1
        if not turn.jobs and not turn.todo:
            self._end_turn(turn, now_s)
        contents.tier.void(voided)
        return True

    def drop_turns(self, now_s: float) -> None:
        """Store nothing of what has not begun."""
        turns, self._turns = self._turns, deque()
        for turn in turns:
            self.missed += len(turn.todo)
            turn.todo.clear()
            if not turn.jobs:
                self._end_turn(turn, now_s)

    def check(self, held: Counter[int]) -> int:
        """Add to ``held`` what turns hold. Returns blocks under way.

        Raises:
            AssertionError: something is miscounted.
        """
        turns = {id(turn): turn for turn in self._turns}
        turns |= {id(store.turn): store.turn for store in self._stores.values()}
        for turn in turns.values():
            held.update(turn.held)
        assert self._num_held == sum(len(turn.held) for turn in turns.values())
        moving = sum(len(store.tickets) for store in self._stores.values())
        assert moving == self.blocks_moving, "stores under way are miscounted"
        return moving

    # ---- inside ----------------------------------------------------------------------------

    def _look(self, now_s: float) -> None:
        """Begin with what is evicted next, if there is anything that DRAM lacks."""
        upcoming = self._gpu.upcoming(self._look_ahead)
        todo = [entry for entry in upcoming if self._contents.is_absent(entry[0])]
        todo = todo[: self._max_held]
        if todo:
            held = [block for _, block, _ in todo]
            self._enqueue(_Turn(None, (), deque(todo), held, ahead=True))
        else:
            self._look_at_s = now_s + _LOOK_AGAIN_S

    def _enqueue(self, turn: _Turn[Hash]) -> None:
        self._hold(turn.held)
        self._turns.append(turn)

    def _hold(self, blocks: Sequence[int]) -> None:
        self._held.hold(blocks)
        self._num_held += len(blocks)

    def _begin_store(
        self, turn: _Turn[Hash], batch: list[tuple[Hash, int, int]], now_s: float
    ) -> None:
        there = [
            (key, block)
            for key, block, _ in batch
            if self._gpu.holds(key, block) and self._contents.is_absent(key)
        ]
        self.missed += len(batch) - len(there)
        held = set(turn.held)
        late = [block for _, block in there if block not in held]
        self._hold(late)
        turn.held += late
        tickets = self._contents.store(there, now_s)
        if not tickets:
            return
        depths = {key: depth for key, _, depth in batch}
        store = _Store(next(self._numbers), tickets, depths, turn)
        self._stores[store.number] = store
        self.blocks_moving += len(tickets)
        turn.jobs += 1
        self._begin.append(job_of(store.number, Kind.STORE, tickets))

    def _end_turn(self, turn: _Turn[Hash], now_s: float) -> None:
        held, turn.held = turn.held, []
        self._num_held -= len(held)
        self._held.release(held if turn.ahead else held[::-1], soonest=turn.ahead)
        if turn.keys:
            self._contents.credit(turn.session, turn.keys, now_s)
