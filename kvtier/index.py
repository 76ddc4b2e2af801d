"""Which block to evict next: heaps over groups of blocks, each group with a stack of its blocks.

A *group* is a set of blocks that the same sessions read: one session's own history, or a prefix
that several share. Groups are split as in a radix tree when a session uses only part of one, so a
shared prefix is one group however many sessions read it, and its key is the earliest next use
among them. Within a group the deepest block goes first, so no block outlives its prefix.

Groups lie in *lanes* of equal return chance (see `next_use`). Inside a lane the order is by next
use, which is an absolute time and moves only on events; lanes are compared by expected time per
use, (next use - now) ÷ chance, when a victim is wanted. Two more lanes hold shared groups, which
count as certain to be read again, and *orphans*, which nobody will read: they go first.

All heaps are heapq with stale entries that are dropped when they surface, or by compaction when
they are more than half. Everything is O(log sessions) per event and per decision, and memory is
bounded by blocks + sessions.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Iterable, Sequence

from liveserve.kvtier.next_use import LANES
from liveserve.kvtier.side_tables import BlockTable

SHARED, ORPHANS = LANES, LANES + 1
_DEEPEST = 1 << 24
_BLOCK_BITS = 32
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1


class User:
    """One session, as the index sees it: when it reads its groups next, and with what chance."""

    __slots__ = ("groups", "key_s", "lane")

    def __init__(self, key_s: float, lane: int) -> None:
        self.key_s = key_s
        self.lane = lane
        self.groups: dict[Group, None] = {}


class Group:
    """Blocks that the same sessions read.

    Attributes:
        size: blocks of the group, evictable or in use.
        live: evictable blocks of the group; each has an entry in ``stack``.
        entry: number of the valid entry in a lane's heap; 0: none is wanted.
        released: its last reader is gone, but it was shared before: recency decides again.
    """

    __slots__ = (
        "entry", "key_s", "lane", "live", "readers", "released", "shared", "size", "stack", "start",
        "users",
    )  # fmt: skip

    def __init__(self, start: int) -> None:
        self.start = start
        self.size = self.live = self.entry = 0
        self.key_s, self.lane = math.inf, ORPHANS
        self.stack: list[int] = []  # (_DEEPEST - depth) << 32 | block
        self.users: dict[User, None] = {}
        self.readers: list[tuple[float, int, User]] = []  # of a shared group, earliest first
        self.shared = self.released = False


class SessionIndex:
    """Evictable blocks of known sessions, in eviction order. Writes `BlockTable` group and depth.

    Which blocks are evictable is the caller's to say in the table; it then calls `add` or
    `discard`. Raises KeyError for a session that was not keyed.
    """

    def __init__(self, table: BlockTable) -> None:
        self._table = table
        self._users: dict[Hashable, User] = {}
        self._lanes: list[list[tuple[float, int, int, Group]]] = [[] for _ in range(LANES + 2)]
        self._queued = [0] * (LANES + 2)  # valid entries by lane
        self._count = 0

    def __contains__(self, session: Hashable) -> bool:
        return session in self._users

    # ---- sessions --------------------------------------------------------------------------

    def key(self, session: Hashable, next_use_s: float, lane: int) -> None:
        """``session`` reads its history next at ``next_use_s``; creates it if it is new."""
        user = self._users.get(session)
        if user is None:
            self._users[session] = User(next_use_s, lane)
            return
        user.key_s, user.lane = next_use_s, lane
        for group in user.groups:
            if len(group.users) > 1:
                self._count += 1
                heapq.heappush(group.readers, (next_use_s, self._count, user))
            self._rekey(group)

    def use(self, session: Hashable, blocks: Sequence[int]) -> list[int]:
        """``session``'s history is now exactly ``blocks``, first one first.

        Blocks it used before and that are not among them lose it as a reader: after a barge-in,
        what nobody heard becomes an orphan. Returns what leaves the index, as `leave` does.
        """
        table = self._table
        of, depth_of = table.group, table.depth
        user = self._users[session]
        runs: dict[Group | None, list[int]] = {}
        for depth, block in enumerate(blocks):
            group = of[block]
            run = runs.get(group)
            if run is None:
                runs[group] = [block]
            else:
                run.append(block)
            depth_of[block] = depth
        before, user.groups = user.groups, {}
        own: Group | None = None
        loose: list[list[int]] = []  # blocks that only this session reads
        for group, run in runs.items():
            if group is None:
                loose.append(run)
                continue
            known = group.shared and not group.released
            private = not known and (not group.users or user in group.users)
            if len(run) == group.size and not (private and own is not None):
                self._join(group, user)
                own = group if private else own
            elif private:
                loose.append(run)
            else:
                part = Group(depth_of[run[0]])
                part.shared = True
                for other in group.users:
                    self._join(part, other)
                self._move(run, part)
                self._join(part, user)
                self._unqueue(group)
                group.start = max(group.start, depth_of[run[-1]] + 1)
                if group.live:
                    self._queue(group)
        if loose and own is None:
            own = Group(depth_of[loose[0][0]])
            self._join(own, user)
        for run in loose:
            assert own is not None
            own.start = min(own.start, depth_of[run[0]])
            self._move(run, own)
        left: list[int] = []
        for group in before:
            if group not in user.groups:
                left += self._part(group, user)
        return left

    def leave(self, session: Hashable) -> list[int]:
        """``session`` reads nothing any more. What only it read becomes an orphan.

        Returns evictable blocks that leave the index because they were shared before: another
        session may well ask for them, and how recently they were used is all that says so.
        """
        user = self._users.pop(session, None)
        if user is None:
            return []
        left: list[int] = []
        for group in list(user.groups):
            left += self._part(group, user)
        return left

    def forget(self, session: Hashable) -> list[int]:
        """Nothing is known of ``session`` any more. Returns evictable blocks that leave the index
        because nothing is known of them either."""
        user = self._users.get(session)
        for group in user.groups if user else ():
            group.shared = True
        return self.leave(session)

    # ---- blocks ----------------------------------------------------------------------------

    def add(self, block: int) -> None:
        """``block``, which has a group, became evictable."""
        group = self._table.group[block]
        group.live += 1
        stack = group.stack
        heapq.heappush(stack, (_DEEPEST - self._table.depth[block]) << _BLOCK_BITS | block)
        if len(stack) > 2 * group.live + 64:
            self._compact(group)
        if not group.entry:
            self._queue(group)

    def discard(self, block: int) -> None:
        """``block``, which has a group, is not evictable any more; it stays in its group."""
        self._less(self._table.group[block])

    def drop(self, block: int) -> None:
        """``block`` leaves its group: its content is gone, or nothing is known of it."""
        group = self._table.group[block]
        if group is not None:
            self._table.group[block] = None
            group.size -= 1
            if self._table.evictable[block]:
                self._less(group)

    def score(self, group: Group, now_s: float, chance: Sequence[float]) -> float:
        """Expected seconds per use of ``group``; the largest is evicted first."""
        wait_s = group.key_s - now_s
        return wait_s / chance[group.lane] if wait_s > 0 and group.lane < LANES else wait_s

    def best(self, now_s: float, chance: Sequence[float]) -> tuple[float, Group | None]:
        """Score and group of the next victim; -inf and None if nothing is evictable."""
        best_score, best = -math.inf, None
        lanes, queued = self._lanes, self._queued
        for lane in range(LANES + 2):
            if not queued[lane]:
                continue
            heap = lanes[lane]
            while heap:
                entry = heap[0]
                group = entry[3]
                if group.entry == entry[2]:
                    if group.live:
                        break
                    group.entry = 0
                    queued[lane] -= 1
                heapq.heappop(heap)
            else:
                continue
            score = self.score(group, now_s, chance)
            if score > best_score:
                best_score, best = score, group
        return best_score, best

    def later(self, wait_s: float, now_s: float, chance: Sequence[float]) -> int:
        """Evictable blocks with a score above ``wait_s``. O(groups)."""
        return sum(
            entry[3].live
            for heap in self._lanes
            for entry in heap
            if entry[3].entry == entry[2] and self.score(entry[3], now_s, chance) > wait_s
        )

    def take(self, group: Group, count: int, victims: list[int]) -> int:
        """Evict at most ``count`` blocks of ``group``, deepest first, onto ``victims``.

        Returns how many. They are marked as not evictable in the table as they are appended.
        """
        of, evictable = self._table.group, self._table.evictable
        stack, pop = group.stack, heapq.heappop
        taken = 0
        while taken < count and stack:
            block = pop(stack) & _BLOCK_MASK
            if evictable[block] and of[block] is group:
                victims.append(block)
                evictable[block] = 0
                of[block] = None
                taken += 1
        group.live -= taken
        group.size -= taken
        return taken

    # ---- inside ----------------------------------------------------------------------------

    @staticmethod
    def _less(group: Group) -> None:
        group.live -= 1
        if not group.live:
            group.stack.clear()  # nothing but stale entries

    def _compact(self, group: Group) -> None:
        of, evictable = self._table.group, self._table.evictable
        valid = {
            entry
            for entry in group.stack
            if evictable[entry & _BLOCK_MASK] and of[entry & _BLOCK_MASK] is group
        }
        group.stack = list(valid)
        heapq.heapify(group.stack)

    def _release(self, group: Group) -> list[int]:
        """Evictable blocks of ``group``, which leave it; deepest first."""
        of, evictable = self._table.group, self._table.evictable
        blocks: list[int] = []
        for entry in sorted(group.stack):
            block = entry & _BLOCK_MASK
            if evictable[block] and of[block] is group:
                of[block] = None
                blocks.append(block)
        group.size -= len(blocks)
        group.live = 0
        group.stack.clear()
        return blocks

    def _move(self, blocks: Iterable[int], target: Group) -> None:
        of, evictable = self._table.group, self._table.evictable
        for block in blocks:
            group = of[block]
            if group is target:
                continue
            if group is not None:
                group.size -= 1
                if evictable[block]:
                    self._less(group)
            of[block] = target
            target.size += 1
            if evictable[block]:
                self.add(block)

    def _join(self, group: Group, user: User) -> None:
        """``user`` reads ``group`` from now on."""
        user.groups[group] = None
        if user in group.users:
            return
        group.users[user] = None
        if group.released:  # who shared it before is forgotten
            group.released = group.shared = False
        if len(group.users) == 2:
            group.shared = True
            self._list_readers(group)
        elif len(group.users) > 2:
            self._count += 1
            heapq.heappush(group.readers, (user.key_s, self._count, user))
        self._rekey(group)

    def _list_readers(self, group: Group) -> None:
        group.readers = [(user.key_s, n, user) for n, user in enumerate(group.users, self._count)]
        self._count += len(group.users)
        heapq.heapify(group.readers)

    def _part(self, group: Group, user: User) -> list[int]:
        """``user`` does not read ``group`` any more. Returns evictable blocks that left it."""
        group.users.pop(user, None)
        user.groups.pop(group, None)
        if not group.users and group.shared:
            group.released = True
            self._unqueue(group)
            return self._release(group)
        self._rekey(group)
        return []

    def _rekey(self, group: Group) -> None:
        users = group.users
        if not users:
            key_s, lane = math.inf, ORPHANS
        elif len(users) == 1:
            (user,) = users
            key_s, lane = user.key_s, user.lane
        else:
            if len(group.readers) > 4 * len(users) + 16:
                self._list_readers(group)
            readers = group.readers
            while readers[0][2].key_s != readers[0][0] or readers[0][2] not in users:
                heapq.heappop(readers)
            key_s, lane = readers[0][0], SHARED
        if key_s != group.key_s or lane != group.lane:
            self._unqueue(group)
            group.key_s, group.lane = key_s, lane
        if group.live and not group.entry:
            self._queue(group)

    def _queue(self, group: Group) -> None:
        lane = group.lane
        self._count += 1
        group.entry = self._count
        self._queued[lane] += 1
        heap = self._lanes[lane]
        heapq.heappush(heap, (-group.key_s, -group.start, group.entry, group))
        if len(heap) > 2 * self._queued[lane] + 64:
            heap = [entry for entry in heap if entry[3].entry == entry[2]]
            heapq.heapify(heap)
            self._lanes[lane] = heap

    def _unqueue(self, group: Group) -> None:
        if group.entry:
            group.entry = 0
            self._queued[group.lane] -= 1
