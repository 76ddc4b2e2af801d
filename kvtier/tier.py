"""Where every block of KV is: on the GPU, in DRAM, or on its way between them.

`Tier` keeps one entry per block hash that is anywhere, moves it through the states below, and owns
the DRAM slots: each is free, holds a block, or belongs to a copy under way. It copies nothing. The
caller runs the copies, and says when each began and how it ended.

    ABSENT ─computed▶ GPU ─store▶ STORING ─stored▶ BOTH ─lost▶ DRAM ─load▶ LOADING ─loaded▶ BOTH

"lost" is the last GPU copy's end (evicted, or its hash was reset). A copy under way is never cut
off: what it reads or writes stays reserved until `finish`, and a result that is unwanted by then
is dropped there.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from liveserve.kvtier.policies import EvictionPolicy
from liveserve.kvtier.slots import SlotAllocator

Hash = TypeVar("Hash", bound=Hashable)


class State(Enum):
    ABSENT = "absent"
    GPU = "gpu"
    STORING = "storing"  # on the GPU, being copied to DRAM
    SAVING = "saving"  # as STORING, but the GPU copy cannot be found by its hash any more
    DRAM = "dram"
    LOADING = "loading"  # in DRAM, being copied to the GPU
    BOTH = "both"


class Outcome(Enum):
    """How a copy ended. CORRUPT: what was read is not what was stored; only for loads."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"


_S = State
# (state, event) → state. The first two events come from the GPU's block pool, where a hash may
# have several copies: "computed" is any copy, "lost" is the end of the last one.
TRANSITIONS: dict[tuple[State, str], State] = {
    (_S.ABSENT, "computed"): _S.GPU,
    (_S.GPU, "computed"): _S.GPU,
    (_S.STORING, "computed"): _S.STORING,
    (_S.SAVING, "computed"): _S.STORING,
    (_S.DRAM, "computed"): _S.BOTH,
    (_S.LOADING, "computed"): _S.LOADING,
    (_S.BOTH, "computed"): _S.BOTH,
    (_S.GPU, "lost"): _S.ABSENT,
    (_S.STORING, "lost"): _S.SAVING,
    (_S.LOADING, "lost"): _S.LOADING,
    (_S.BOTH, "lost"): _S.DRAM,
    (_S.GPU, "store"): _S.STORING,
    (_S.STORING, "stored"): _S.BOTH,
    (_S.SAVING, "stored"): _S.DRAM,
    (_S.STORING, "store failed"): _S.GPU,
    (_S.SAVING, "store failed"): _S.ABSENT,
    (_S.DRAM, "load"): _S.LOADING,
    (_S.LOADING, "loaded"): _S.BOTH,
    (_S.LOADING, "load failed"): _S.DRAM,
    (_S.LOADING, "load failed, computed meanwhile"): _S.BOTH,
    (_S.LOADING, "corrupt"): _S.ABSENT,
    (_S.LOADING, "corrupt, computed meanwhile"): _S.GPU,
    (_S.DRAM, "evict"): _S.ABSENT,
    (_S.BOTH, "evict"): _S.GPU,
}


class IllegalTransition(RuntimeError):
    """An event that cannot happen in the block's state: the caller has lost track of it."""


@dataclass(slots=True, eq=False)
class _Entry(Generic[Hash]):
    key: Hash
    state: State = State.ABSENT
    slot: int = -1  # in DRAM and LOADING and BOTH
    gpu_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Ticket(Generic[Hash]):
    """One copy under way, between ``slot`` and the GPU block ``gpu_block``.

    Neither may be used for anything else until `Tier.finish`.
    """

    key: Hash
    is_load: bool
    slot: int
    gpu_block: int
    _entry: _Entry[Hash] = field(repr=False)


@dataclass(slots=True, eq=False)
class Lease:
    """Slots that a request is going to load from, and that stay as they are until `Tier.unpin`."""

    slots: tuple[int, ...]


@dataclass(slots=True)
class Totals:
    """What the tier has done since it started, in blocks."""

    stored: int = 0
    loaded: int = 0
    evicted: int = 0
    store_failed: int = 0
    load_failed: int = 0
    corrupt: int = 0
    refused: int = 0  # stores for which no slot could be had


class Tier(Generic[Hash]):
    """Residency of blocks, by hash. One thread owns it.

    A slot is held by its entry, by each copy and by each lease; it may be evicted while only its
    entry holds it, and is free when nobody does.

    Args:
        slots: the DRAM pool's free list; nobody else allocates from it.
        policy: orders the slots that may be evicted; made for at least as many blocks.
        on_dropped: told of every hash whose DRAM copy is gone.
    """

    def __init__(
        self,
        slots: SlotAllocator,
        policy: EvictionPolicy,
        on_dropped: Callable[[Hash], None] | None = None,
    ) -> None:
        if policy.table.num_blocks < slots.num_slots:
            raise ValueError(
                f"policy is made for {policy.table.num_blocks} slots, the pool has "
                f"{slots.num_slots}"
            )
        self.totals = Totals()
        self.policy = policy
        self._slots = slots
        self._on_dropped = on_dropped
        self._entries: dict[Hash, _Entry[Hash]] = {}
        self._at: dict[int, _Entry[Hash]] = {}  # by slot
        self._holds = [0] * slots.num_slots
        self._flying: set[Ticket[Hash]] = set()
        self._leases: set[Lease] = set()

    # ---- what is where ---------------------------------------------------------------------

    def __len__(self) -> int:
        """Hashes that are anywhere."""
        return len(self._entries)

    @property
    def in_dram(self) -> int:
        """Hashes that are in DRAM, being loaded or not."""
        return len(self._at)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    def state(self, key: Hash) -> State:
        entry = self._entries.get(key)
        return State.ABSENT if entry is None else entry.state

    def has(self, key: Hash) -> bool:
        """Whether ``key`` is in DRAM, being loaded or not."""
        entry = self._entries.get(key)
        return entry is not None and entry.slot >= 0

    def gpu_blocks(self, key: Hash) -> tuple[int, ...]:
        """GPU blocks on which ``key`` is, as far as was said here."""
        entry = self._entries.get(key)
        return () if entry is None else tuple(entry.gpu_blocks)

    def use(self, session: Hashable, keys: Iterable[Hash], now_s: float) -> None:
        """``session``'s history is ``keys``, first one first: tells the policy which slots."""
        entries = map(self._entries.get, keys)
        slots = [e.slot for e in entries if e is not None and e.slot >= 0]
        self.policy.use(session, slots, now_s)

    def void(self, keys: Iterable[Hash]) -> None:
        """Nobody will read ``keys`` again: what of them is in DRAM may go first."""
        entries = map(self._entries.get, keys)
        self.policy.void([e.slot for e in entries if e is not None and e.slot >= 0])

    # ---- the GPU's block pool --------------------------------------------------------------

    def computed(self, key: Hash, gpu_block: int) -> None:
        """``gpu_block`` holds ``key`` and can be found by it.

        Raises:
            IllegalTransition: it was said before.
        """
        entry = self._entries.get(key) or _Entry(key)
        if gpu_block in entry.gpu_blocks:
            raise IllegalTransition(f"{key!r} is on GPU block {gpu_block} already")
        self._step(entry, "computed")
        self._entries[key] = entry
        entry.gpu_blocks.append(gpu_block)

    def lost(self, key: Hash, gpu_block: int) -> None:
        """``gpu_block`` cannot be found by ``key`` any more.

        Raises:
            IllegalTransition: it could not be before.
        """
        entry = self._entries.get(key)
        if entry is None or gpu_block not in entry.gpu_blocks:
            raise IllegalTransition(f"{key!r} is not on GPU block {gpu_block}")
        if len(entry.gpu_blocks) == 1:
            self._step(entry, "lost")
        entry.gpu_blocks.remove(gpu_block)

    # ---- copies ----------------------------------------------------------------------------

    def store(self, blocks: Iterable[tuple[Hash, int]], now_s: float) -> list[Ticket[Hash]]:
        """Begin to copy ``(hash, GPU block)`` to DRAM, in order, evicting what must go.

        What is in DRAM already, or on its way, is passed over. The list is cut short where no slot
        can be had, so give the prefix first.

        Raises:
            IllegalTransition: a hash is not on that GPU block; nothing was begun.
        """
        wanted: dict[Hash, tuple[_Entry[Hash], int]] = {}
        for key, gpu_block in blocks:
            entry = self._entries.get(key)
            if entry is None or gpu_block not in entry.gpu_blocks:
                raise IllegalTransition(f"cannot store {key!r}: not on GPU block {gpu_block}")
            if entry.state is State.GPU:
                wanted.setdefault(key, (entry, gpu_block))
        missing = len(wanted) - self._slots.num_free
        if missing > 0:
            self.evict(missing, now_s)
        granted = min(len(wanted), self._slots.num_free)
        self.totals.refused += len(wanted) - granted
        slots = self._slots.alloc(granted) or []
        tickets = []
        for slot, (entry, gpu_block) in zip(slots, wanted.values(), strict=False):
            self._step(entry, "store")
            self._holds[slot] = 1
            tickets.append(Ticket(entry.key, False, slot, gpu_block, entry))
        self._flying.update(tickets)
        return tickets

    def load(self, key: Hash, gpu_block: int) -> Ticket[Hash]:
        """Begin to copy ``key`` to ``gpu_block``, which the caller holds until `finish`.

        Raises:
            IllegalTransition: it is not in DRAM, or not only there.
        """
        entry = self._entries.get(key) or _Entry(key)
        self._step(entry, "load")
        self._hold(entry.slot)
        ticket = Ticket(key, True, entry.slot, gpu_block, entry)
        self._flying.add(ticket)
        return ticket

    def finish(self, ticket: Ticket[Hash], outcome: Outcome, now_s: float) -> bool:
        """The copy ended. Returns whether its result counts: the block is in DRAM now, or on the
        GPU under its hash. False after a failure, and for what was reset meanwhile.

        Raises:
            IllegalTransition: the copy was finished before, or a store is called corrupt.
        """
        if ticket not in self._flying:
            raise IllegalTransition(f"the copy of {ticket.key!r} was finished before")
        if outcome is Outcome.CORRUPT and not ticket.is_load:
            raise IllegalTransition(f"a store cannot find {ticket.key!r} corrupt")
        self._flying.remove(ticket)
        entry, done = ticket._entry, outcome is Outcome.DONE
        self._count(ticket, outcome)
        valid = self._entries.get(ticket.key) is entry
        if not valid:
            self._let_go(ticket.slot, now_s)
        elif not ticket.is_load:
            self._step(entry, "stored" if done else "store failed")
            if done:
                entry.slot = ticket.slot
                self._at[entry.slot] = entry
                self.policy.free((entry.slot,), now_s)
            else:
                self._let_go(ticket.slot, now_s)
        elif done:
            self._step(entry, "loaded")
            entry.gpu_blocks.append(ticket.gpu_block)
            self._let_go(ticket.slot, now_s)
        else:
            event = "corrupt" if outcome is Outcome.CORRUPT else "load failed"
            self._step(entry, event + ", computed meanwhile" if entry.gpu_blocks else event)
            if outcome is Outcome.CORRUPT:
                self._drop(entry, now_s)
            self._let_go(ticket.slot, now_s)
        return valid and done

    # ---- DRAM space ------------------------------------------------------------------------

    def pin(self, keys: Iterable[Hash]) -> Lease:
        """Keep the DRAM copies of ``keys`` until `unpin`.

        Raises:
            IllegalTransition: one of them is not in DRAM; nothing is pinned.
        """
        slots = []
        for key in keys:
            entry = self._entries.get(key)
            if entry is None or entry.slot < 0:
                raise IllegalTransition(f"cannot pin {key!r}: {self.state(key).value}")
            slots.append(entry.slot)
        for slot in slots:
            self._hold(slot)
        lease = Lease(tuple(slots))
        self._leases.add(lease)
        return lease

    def unpin(self, lease: Lease, now_s: float) -> None:
        """Give ``lease`` back; twice is once."""
        if lease in self._leases:
            self._leases.remove(lease)
            for slot in reversed(lease.slots):
                self._let_go(slot, now_s)

    def evict(self, count: int, now_s: float) -> int:
        """Drop at most ``count`` blocks from DRAM, as the policy chooses. Returns how many."""
        victims = self.policy.evict(count, now_s)
        for slot in victims:
            entry = self._at[slot]
            self._step(entry, "evict")
            self._leave(entry)
            self._holds[slot] = 0
            self.policy.void((slot,))
        self._slots.free(victims)
        self.totals.evicted += len(victims)
        return len(victims)

    def reset(self, now_s: float) -> None:
        """Nothing computed so far is valid any more (new weights): the tier is empty after this.

        Copies under way go on, and are dropped when they finish; leased slots are freed when they
        are given back.
        """
        entries = list(self._entries.values())
        self._entries.clear()
        for entry in entries:
            if entry.slot >= 0:
                self._drop(entry, now_s)

    def check(self) -> None:
        """Compare the books with each other. For tests, and for a debug endpoint.

        Raises:
            AssertionError: a slot is leaked or owned twice, or a state contradicts what is where.
        """
        holds = [0] * self._slots.num_slots
        for slot, entry in self._at.items():
            holds[slot] += 1
            assert entry.slot == slot, f"slot {slot} is not its entry's"
            assert self._entries.get(entry.key) is entry, f"slot {slot} has a dead entry"
        for ticket in self._flying:
            holds[ticket.slot] += 1
        for lease in self._leases:
            for slot in lease.slots:
                holds[slot] += 1
        assert holds == self._holds, "the holds of a slot are miscounted"
        owned = [self._slots.is_owned(slot) for slot in range(self._slots.num_slots)]
        assert owned == [hold > 0 for hold in holds], "a slot is leaked or owned twice"
        may_go = [slot in self._at and hold == 1 for slot, hold in enumerate(holds)]
        evictable = self.policy.table.evictable
        assert may_go == [bool(evictable[slot]) for slot in range(len(may_go))], "wrong candidates"
        assert sum(may_go) == len(self.policy), "the policy has lost count"
        loading = {ticket.key for ticket in self._flying if ticket.is_load}
        for key, entry in self._entries.items():
            state = entry.state
            on_gpu = state in (State.GPU, State.STORING, State.BOTH)
            assert state is State.LOADING or bool(entry.gpu_blocks) == on_gpu, (key, state)
            in_dram = state in (State.DRAM, State.LOADING, State.BOTH)
            assert (entry.slot >= 0) == in_dram, (key, state)
            assert state is not State.LOADING or key in loading, (key, state)

    # ---- inside ----------------------------------------------------------------------------

    def _step(self, entry: _Entry[Hash], event: str) -> None:
        state = TRANSITIONS.get((entry.state, event))
        if state is None:
            raise IllegalTransition(
                f"{event!r} cannot happen to {entry.key!r}, which is {entry.state.value}"
            )
        entry.state = state
        if state is State.ABSENT:
            del self._entries[entry.key]

    def _hold(self, slot: int) -> None:
        if self._holds[slot] == 1 and slot in self._at:
            self.policy.remove((slot,))
        self._holds[slot] += 1

    def _let_go(self, slot: int, now_s: float) -> None:
        self._holds[slot] -= 1
        if self._holds[slot] == 0:
            self.policy.void((slot,))  # whose it was does not matter to the next owner
            self._slots.free((slot,))
        elif self._holds[slot] == 1 and slot in self._at:
            self.policy.free((slot,), now_s)

    def _drop(self, entry: _Entry[Hash], now_s: float) -> None:
        """The entry's DRAM copy is worth nothing."""
        slot = entry.slot
        if self._holds[slot] == 1:
            self.policy.remove((slot,))
        self._leave(entry)
        self._let_go(slot, now_s)

    def _leave(self, entry: _Entry[Hash]) -> None:
        del self._at[entry.slot]
        entry.slot = -1
        if self._on_dropped is not None:
            self._on_dropped(entry.key)

    def _count(self, ticket: Ticket[Hash], outcome: Outcome) -> None:
        totals, is_load = self.totals, ticket.is_load
        if outcome is Outcome.CORRUPT:
            totals.corrupt += 1
        elif outcome is Outcome.FAILED:
            totals.load_failed += is_load
            totals.store_failed += not is_load
        else:
            totals.loaded += is_load
            totals.stored += not is_load
