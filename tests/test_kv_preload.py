"""Preload admission against the real tier and transfer engine, with every byte under control."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from transfer_tools import ManualLink, World

from liveserve.kernels.base import Direction
from liveserve.kvtier.links import open_link
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.policies import Lru, NextUsePolicy, make_policy
from liveserve.kvtier.preload import Cause, Preloader, PreloadLimits
from liveserve.kvtier.slots import SlotAllocator
from liveserve.kvtier.tier import Outcome, State, Ticket, Tier
from liveserve.kvtier.transfer import TransferEngine
from liveserve.kvtier.transfer_base import Kind, Transfer

SPEECH, BARGE_IN, RESUME, COMMIT, PREFETCH = Cause
NUM_LAYERS = 2
BLOCK_BYTES = 16 * NUM_LAYERS
# One block takes 10 ms.
GBPS = BLOCK_BYTES / 0.01 / 1e9


class Machine:
    """A GPU pool, a DRAM tier and a link, as a manager runs them: the least that preload needs.

    Every history block holds a value of its own, so that what is on the GPU can be checked.
    ``victims`` notes how soon each block was expected to be needed that a preload evicted, and how
    soon the preload was; of a preload for speech, both count from when a user begins to speak.
    """

    def __init__(
        self, num_blocks: int, num_slots: int, *, reserve: int = 0, gbps: float = GBPS, link=None
    ) -> None:
        self.next_use = NextUse()
        self.gpu = NextUsePolicy(num_blocks, self.next_use)
        self.gpu.free(range(num_blocks), 0.0, blank=True)
        self.slots = SlotAllocator(num_slots)
        self.tier: Tier[Hashable] = Tier(self.slots, Lru(num_slots))
        self.world = World.random(1, num_layers=NUM_LAYERS, num_blocks=num_blocks,
                                  num_slots=num_slots)  # fmt: skip
        self.link = link(self.world) if link else ManualLink(self.world, gbps)
        self.engine = TransferEngine(self.world.cache, self.world.pool, self.link)
        self.reserve = reserve
        self.key_at: dict[int, Hashable] = {}  # GPU block → key that it can be found by
        self.histories: dict[Hashable, list[Hashable]] = {}
        self.values: dict[Hashable, int] = {}
        self.jobs: dict[Transfer, list[Ticket]] = {}
        self.asked: list[float] = []
        self.victims: list[tuple[float, float]] = []
        self.refuses = False
        self.now_s = 0.0
        self.preloader: Preloader | None = None

    # ---- the manager's face ------------------------------------------------------------------

    block_bytes = BLOCK_BYTES

    def offloaded(self, session: Hashable, keys: Sequence[Hashable] | None) -> list[Hashable]:
        wanted = []
        for key in self.histories.get(session, ()) if keys is None else keys:
            state = self.tier.state(key)
            if state is State.ABSENT:
                break
            if state is State.DRAM:
                wanted.append(key)
        return wanted

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        self.asked.append(now_s)
        room = len(self.gpu) - self.reserve
        return max(0, min(self.gpu.spare(count, wait_s, now_s), room))

    def estimate_s(self, num_bytes: int) -> float:
        return self.engine.estimate_s(Kind.PRELOAD, num_bytes)

    def preload(self, keys: Sequence[Hashable], session: Hashable) -> Hashable | None:
        if self.refuses:
            return None
        now_s = self.asked[-1]
        wait_s = self.preloader.left_s(session, now_s)
        if self.preloader._sessions[session].spoke:
            lag_s = self.preloader._lag.mean_s
            wait_s = max(0.0, wait_s - self.preloader._utterances.mean_s - lag_s)
        before = {b: self.gpu.wait_s(b, now_s) for b in range(self.gpu.table.num_blocks)
                  if self.gpu.table.evictable[b]}  # fmt: skip
        blocks = self.take(len(keys))
        self.victims += [(before[block], wait_s) for block in blocks]
        tickets = [self.tier.load(key, block) for key, block in zip(keys, blocks, strict=True)]
        transfer = self.engine.submit(Kind.PRELOAD, blocks, [t.slot for t in tickets], tag=session)
        self.jobs[transfer] = tickets
        return transfer

    def cancel(self, job: Transfer) -> None:
        self.engine.cancel(job)

    def promote(self, job: Transfer) -> None:
        self.engine.promote(job)

    # ---- the rest of a manager ---------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        blocks = self.gpu.evict(count, self.now_s)
        assert len(blocks) == count
        for block in blocks:
            self.gpu.void((block,))
            if block in self.key_at:
                self.tier.lost(self.key_at.pop(block), block)
        return blocks

    def ended(self, preloader: Preloader) -> None:
        for transfer in self.engine.poll():
            tickets = self.jobs.pop(transfer, None)
            if tickets is None:
                continue
            outcome = Outcome.DONE if transfer.ok else Outcome.FAILED
            for ticket in tickets:
                good = self.tier.finish(ticket, outcome, self.now_s)
                if good:
                    self.key_at[ticket.gpu_block] = ticket.key
                self.free([ticket.gpu_block], blank=not good)
            self.used(transfer.tag)
            preloader.ended(transfer, len(tickets) if transfer.ok else 0, self.now_s)

    def free(self, blocks: list[int], *, blank: bool = False) -> None:
        self.gpu.free(blocks, self.now_s, blank=blank)

    def used(self, session: Hashable) -> None:
        keys = self.histories.get(session, ())
        held = {key: block for block, key in self.key_at.items()}
        self.gpu.use(session, [held[key] for key in keys if key in held], self.now_s)

    def offload(self, session: Hashable, count: int) -> None:
        """The session has a history of ``count`` blocks, all of it in DRAM alone."""
        keys = [f"{session}/{n}" for n in range(count)]
        self.histories[session] = keys
        for key in keys:
            (block,) = self.take(1)
            self.values[key] = value = len(self.values) % 251
            self.world.write(block, value)
            self.tier.computed(key, block)
            (ticket,) = self.tier.store([(key, block)], self.now_s)
            transfer = self.engine.submit(Kind.STORE, [block], [ticket.slot])
            self.settle()
            assert transfer.ok
            assert self.tier.finish(ticket, Outcome.DONE, self.now_s)
            self.tier.lost(key, block)
            self.free([block], blank=True)

    def settle(self) -> None:
        if isinstance(self.link, ManualLink):
            self.link.drain()
        else:
            deadline_s = time.monotonic() + 10
            while self.engine.num_unfinished and time.monotonic() < deadline_s:
                time.sleep(0.001)

    def on_gpu(self, session: Hashable) -> int:
        states = [self.tier.state(key) for key in self.histories[session]]
        return states.count(State.BOTH)

    def check(self, preloader: Preloader) -> None:
        self.tier.check()
        under_way = {t.gpu_block for tickets in self.jobs.values() for t in tickets}
        for block in range(self.gpu.table.num_blocks):
            assert self.gpu.table.evictable[block] != (block in under_way), block
        assert set(preloader._jobs) == set(self.jobs)
        held = self.world.blocks_array()
        for block, key in self.key_at.items():
            assert (held[block] == self.values[key]).all(), f"block {block} is not {key}"


def preloading(machine: Machine, **limits) -> Preloader:
    machine.preloader = Preloader(machine, PreloadLimits(**limits))
    return machine.preloader


def say(preloader: Preloader, session: Hashable, length_s: float, at_s: float) -> float:
    """A turn of ``length_s`` with nothing to load, so that its length is learned."""
    preloader.wanted(session, at_s, SPEECH)
    preloader.committed(session, at_s + length_s)
    preloader.arrived(session, at_s + length_s + 0.1)
    return at_s + length_s + 1.0


def test_history_is_resident_when_its_request_arrives():
    machine = Machine(8, 8)
    preloader = preloading(machine)
    machine.offload("a", 4)
    machine.next_use.needed("a", 1.0)
    preloader.wanted("a", 1.0, SPEECH)
    preloader.step(1.0)
    assert preloader.in_flight_bytes == 4 * BLOCK_BYTES
    assert {t.kind for t in machine.jobs} == {Kind.PRELOAD}
    machine.settle()
    machine.ended(preloader)
    assert machine.on_gpu("a") == 4
    preloader.committed("a", 3.0)
    preloader.arrived("a", 3.1)
    assert (preloader.totals.hits, preloader.totals.loaded_blocks) == (1, 4)
    assert preloader.num_jobs == preloader.num_wanted == 0
    machine.check(preloader)


def test_a_request_that_meets_its_preload_promotes_it():
    machine = Machine(8, 8)
    preloader = preloading(machine)
    machine.offload("a", 4)
    preloader.wanted("a", 1.0, SPEECH)
    preloader.step(1.0)
    (job,) = machine.jobs
    preloader.committed("a", 1.5)
    preloader.arrived("a", 1.6)
    assert job.kind is Kind.ON_PATH
    assert preloader.num_wanted == 0
    machine.settle()
    machine.ended(preloader)
    assert preloader.num_jobs == 0
    assert (preloader.totals.late, preloader.totals.wasted_blocks) == (1, 0)
    machine.check(preloader)


def test_only_what_arrives_in_time_is_loaded_and_it_is_the_prefix():
    machine = Machine(64, 64)
    preloader = preloading(machine, slack_s=0.0)
    machine.offload("a", 60)
    preloader.wanted("a", 0.0, PREFETCH, due_s=0.25)
    preloader.step(0.0)
    ((_, tickets),) = machine.jobs.items()
    assert [t.key for t in tickets] == [f"a/{n}" for n in range(25)]
    assert (preloader.totals.admitted, preloader.totals.partial) == (1, 1)
    machine.settle()
    machine.ended(preloader)
    preloader.step(0.1)  # the rest is tried again, as far as there is time
    assert [len(t) for t in machine.jobs.values()] == [15]
    machine.settle()
    machine.ended(preloader)
    machine.check(preloader)


def test_what_the_link_has_to_move_before_counts():
    machine = Machine(64, 64)
    preloader = preloading(machine, slack_s=0.0)
    machine.offload("a", 10)
    busy = machine.engine.submit(Kind.ON_PATH, range(40), range(10, 50))  # 0.4 s
    preloader.wanted("a", 0.0, PREFETCH, due_s=0.45)
    preloader.step(0.0)
    assert [len(t) for t in machine.jobs.values()] == [5]
    machine.engine.cancel(busy)
    machine.settle()
    machine.ended(preloader)
    machine.check(preloader)


def test_an_overloaded_link_refuses_and_is_tried_again_when_it_is_free():
    machine = Machine(128, 64)
    preloader = preloading(machine)
    machine.offload("a", 10)
    busy = machine.engine.submit(Kind.ON_PATH, range(64, 128), list(range(64)))  # 0.64 s
    preloader.wanted("a", 0.0, PREFETCH, due_s=0.5)
    for now_s in (0.0, 0.01, 0.02, 0.06):
        preloader.step(now_s)
    assert preloader.num_jobs == 0
    assert preloader.totals.refused == {"link": 2}  # not looked at in every step
    machine.settle()
    assert busy.ok
    preloader.step(0.2)
    assert preloader.num_jobs == 1
    machine.settle()
    machine.ended(preloader)
    machine.check(preloader)


def test_nothing_that_is_needed_sooner_is_evicted():
    machine = Machine(8, 16)
    preloader = preloading(machine)
    machine.offload("a", 6)
    for session, count, plays_until_s in (("soon", 3, 0.5), ("late", 3, 60.0)):
        machine.offload(session, count)
        preloader.wanted(session, 0.0, PREFETCH, due_s=5.0)
        preloader.step(0.0)
        machine.settle()
        machine.ended(preloader)
        preloader.arrived(session, 0.0)
        machine.next_use.waiting(session, plays_until_s, 1.0, 0.0)
        machine.used(session)
    assert (machine.on_gpu("soon"), machine.on_gpu("late")) == (3, 3)
    preloader.wanted("a", 0.0, PREFETCH, due_s=4.0)  # after "soon" is needed, before "late" is
    preloader.step(0.0)
    assert [len(t) for t in machine.jobs.values()] == [5]  # 2 blank blocks and those of "late"
    assert machine.on_gpu("soon") == 3
    machine.settle()
    machine.ended(preloader)
    preloader.step(0.1)
    assert preloader.totals.refused == {"room": 1}
    machine.check(preloader)


def test_who_does_not_speak_yet_is_needed_an_utterance_later_than_who_does():
    machine = Machine(9, 16)
    preloader = preloading(machine)
    for session in ("a", "speaks", "soon", "lengthy"):
        machine.offload(session, 3)
    for session in ("speaks", "soon"):
        preloader.wanted(session, 0.0, PREFETCH, due_s=5.0)
        preloader.step(0.0)
        machine.settle()
        machine.ended(preloader)
        preloader.arrived(session, 0.0)
    machine.next_use.needed("speaks", 1.0)
    machine.next_use.waiting("soon", 1.0, 1.0, 1.0)
    for session in ("speaks", "soon"):
        machine.used(session)
    say(preloader, "lengthy", 60.0, 0.0)
    left = machine.take(3)  # blank ones
    machine.now_s = 61.0
    machine.next_use.waiting("soon", 61.0, 1.0, 61.0)
    machine.next_use.needed("speaks", 61.0)
    preloader.wanted("lengthy", 61.0, SPEECH)  # goes on for long: "soon" will have spoken before
    preloader.step(61.0)
    assert preloader.num_jobs == 0
    assert preloader.totals.refused == {"room": 1}
    preloader.wanted("a", 61.0, SPEECH)  # "soon" begins in 1 s and speaks for as long
    preloader.step(61.0)
    assert [job.tag for job in machine.jobs] == ["a"]
    assert (machine.on_gpu("soon"), machine.on_gpu("speaks")) == (0, 3)
    machine.settle()
    machine.ended(preloader)
    machine.free(left, blank=True)
    machine.check(preloader)


def test_what_has_no_room_is_looked_at_again_while_there_is_time():
    machine = Machine(4, 8)
    preloader = preloading(machine)
    machine.offload("a", 4)
    taken = machine.take(4)
    preloader.wanted("a", 0.0, SPEECH)  # needed in 4.1 s
    for round_ in range(300):
        preloader.step(0.01 * round_)
    assert preloader.totals.refused["room"] > 5
    machine.free(taken, blank=True)
    for round_ in range(300, 400):
        preloader.step(0.01 * round_)
        if preloader.num_jobs:
            break
    # An eighth of what is left at 3 s, at the latest.
    assert 0.01 * round_ - 3.0 <= (4.1 - 3.0) / 8 + 0.02
    machine.settle()
    machine.ended(preloader)
    machine.check(preloader)


def test_events_that_their_own_request_has_overtaken_are_no_news():
    machine = Machine(8, 8)
    preloader = preloading(machine)
    machine.offload("a", 4)
    preloader.wanted("a", 0.0, SPEECH)
    preloader.arrived("a", 2.0)
    for cause in (COMMIT, SPEECH, RESUME):
        preloader.wanted("a", 1.9, cause)
    assert not preloader.is_wanted("a")
    assert preloader.totals.wanted == {"speech": 1}
    preloader.arrived("a", 2.5)  # it is asked again, wanted or not
    preloader.wanted("a", 2.4, COMMIT)
    assert not preloader.is_wanted("a")
    preloader.wanted("a", 8.0, SPEECH)
    assert preloader.is_wanted("a")


def test_the_reserve_is_not_touched():
    machine = Machine(8, 16, reserve=5)
    preloader = preloading(machine)
    machine.offload("a", 6)
    preloader.wanted("a", 0.0, SPEECH)
    preloader.step(0.0)
    assert [len(t) for t in machine.jobs.values()] == [3]


def test_the_budget_is_shared():
    machine = Machine(16, 16)
    preloader = preloading(machine, max_bytes=5 * BLOCK_BYTES)
    for session in "ab":
        machine.offload(session, 4)
        preloader.wanted(session, 0.0, SPEECH)
    preloader.step(0.0)
    assert sorted(len(t) for t in machine.jobs.values()) == [1, 4]
    machine.offload("c", 1)
    preloader.wanted("c", 0.0, SPEECH)
    preloader.step(0.0)
    assert preloader.totals.refused == {"budget": 1}


def test_the_soonest_needed_goes_first():
    machine = Machine(16, 16)
    preloader = preloading(machine, max_bytes=4 * BLOCK_BYTES)
    for session, due_s in (("later", 9.0), ("sooner", 2.0)):
        machine.offload(session, 4)
        preloader.wanted(session, 0.0, PREFETCH, due_s=due_s)
    preloader.step(0.0)
    assert [job.tag for job in machine.jobs] == ["sooner"]


def test_utterances_are_learned_per_session_and_shrunk_to_all_sessions():
    preloader = preloading(Machine(4, 4))
    at_s = 0.0
    for _ in range(20):
        at_s = say(preloader, "brief", 1.0, at_s)
        at_s = say(preloader, "lengthy", 9.0, at_s)
    left = {}
    for session in ("brief", "lengthy", "new"):
        preloader.wanted(session, at_s, SPEECH)
        left[session] = preloader.left_s(session, at_s)
    lag_s = 0.1
    assert 1.0 < left["brief"] - lag_s < 3.5
    assert left["brief"] < left["new"] < left["lengthy"]
    assert 6.5 < left["lengthy"] - lag_s < 9.0
    # It shrinks as the user speaks, not below a share of what was expected.
    assert preloader.left_s("lengthy", at_s + 2.0) == pytest.approx(left["lengthy"] - 2.0)
    tail_s = preloader.left_s("lengthy", at_s + 30.0)
    assert tail_s == pytest.approx((left["lengthy"] - lag_s) / 4 + lag_s)
    assert preloader.left_s("nobody", at_s) is None


def test_the_lag_from_commit_to_request_is_learned():
    preloader = preloading(Machine(4, 4))
    for turn in range(40):
        preloader.wanted("a", 10.0 * turn, SPEECH)
        preloader.committed("a", 10.0 * turn + 2.0)
        preloader.arrived("a", 10.0 * turn + 2.8)
    preloader.wanted("a", 500.0, SPEECH)
    preloader.committed("a", 502.0)
    assert preloader.left_s("a", 502.0) == pytest.approx(0.8, abs=0.1)
    assert preloader.left_s("a", 510.0) == 0.0


def test_silence_cancels_unless_a_turn_is_made_of_it():
    for commits in (False, True):
        machine = Machine(8, 8)
        preloader = preloading(machine, silence_s=1.0)
        machine.offload("a", 4)
        preloader.wanted("a", 0.0, SPEECH)
        preloader.step(0.0)
        preloader.stopped("a", 0.5)
        if commits:
            preloader.committed("a", 0.6)
        preloader.step(1.4)
        assert preloader.num_wanted == 1
        preloader.step(1.6)
        assert preloader.totals.cancelled == ({} if commits else {"silence": 1})
        assert preloader.num_wanted == commits
        machine.settle()
        machine.ended(preloader)
        assert machine.on_gpu("a") == (4 if commits else 0)
        machine.check(preloader)


def test_speech_that_goes_on_after_a_pause_is_the_same_utterance():
    machine = Machine(8, 8)
    preloader = preloading(machine, silence_s=1.0)
    machine.offload("a", 4)
    preloader.wanted("a", 0.0, SPEECH)
    preloader.stopped("a", 0.5)
    preloader.wanted("a", 1.2, SPEECH)
    preloader.step(2.0)
    assert preloader.num_wanted == preloader.num_jobs == 1
    assert preloader.left_s("a", 2.0) == pytest.approx(4.0 - 2.0 + 0.1)


def test_a_barge_in_after_the_commit_begins_a_new_utterance():
    preloader = preloading(Machine(4, 4))
    preloader.wanted("a", 0.0, SPEECH)
    preloader.committed("a", 2.0)
    preloader.wanted("a", 3.0, BARGE_IN)  # its request never asked
    assert preloader.left_s("a", 3.0) == pytest.approx(3.5, abs=0.5)


def test_a_disconnect_cancels_and_counts_what_was_loaded_in_vain():
    machine = Machine(8, 8)
    preloader = preloading(machine, max_bytes=2 * BLOCK_BYTES)
    machine.offload("a", 4)
    preloader.wanted("a", 0.0, SPEECH)
    preloader.step(0.0)
    machine.settle()
    machine.ended(preloader)
    preloader.step(0.1)
    preloader.closed("a", 0.2)
    assert preloader.totals.cancelled == {"closed": 1}
    machine.ended(preloader)
    assert preloader.num_jobs == 0
    assert preloader.totals.wasted_blocks == 2
    machine.check(preloader)


def test_pressure_cancels_what_is_needed_last_and_admits_nothing_for_a_while():
    machine = Machine(16, 16)
    preloader = preloading(machine)
    for session, due_s in (("first", 2.0), ("last", 9.0)):
        machine.offload(session, 4)
        preloader.wanted(session, 0.0, PREFETCH, due_s=due_s)
    preloader.step(0.0)
    assert preloader.pressure(3, 0.1) == 4
    assert preloader.totals.cancelled == {"pressure": 1}
    machine.ended(preloader)
    assert [job.tag for job in machine.jobs] == ["first"]
    preloader.step(0.2)
    assert preloader.num_jobs == 1
    preloader.step(0.4)
    assert preloader.num_jobs == 2
    assert preloader.pressure(100, 0.5) == 8
    machine.ended(preloader)
    machine.check(preloader)


def test_a_prefetch_that_nobody_uses_is_given_up():
    machine = Machine(8, 8)
    preloader = preloading(machine, give_up_s=10.0)
    machine.offload("a", 4)
    preloader.wanted("a", 0.0, PREFETCH, due_s=5.0)
    preloader.step(0.0)
    machine.settle()
    machine.ended(preloader)
    preloader.step(14.0)
    assert preloader.num_wanted == 1
    preloader.step(15.1)
    assert preloader.num_wanted == 0
    assert preloader.totals.wasted_blocks == 4


def test_a_prefix_is_wanted_until_it_is_there_or_late():
    machine = Machine(16, 16)
    preloader = preloading(machine)
    machine.offload("a", 4)
    keys = machine.histories["a"]
    preloader.wanted("p", 0.0, PREFETCH, due_s=5.0, keys=keys)
    preloader.step(0.0)
    assert [[t.key for t in tickets] for tickets in machine.jobs.values()] == [keys]
    machine.settle()
    machine.ended(preloader)
    preloader.step(0.1)
    assert machine.on_gpu("a") == 4
    machine.offload("b", 4)
    machine.refuses = True
    preloader.wanted("q", 1.0, PREFETCH, due_s=2.0, keys=machine.histories["b"])
    preloader.step(1.5)
    assert preloader.num_wanted == 1
    preloader.step(2.1)
    assert preloader.num_wanted == len(preloader._sessions) == 0
    assert preloader.totals.wasted_blocks == 0


def test_stale_signals_cancel_everything():
    machine = Machine(8, 8)
    preloader = preloading(machine)
    machine.offload("a", 4)
    preloader.wanted("a", 0.0, SPEECH)
    preloader.step(0.0)
    preloader.fail_closed()
    machine.ended(preloader)
    assert preloader.num_jobs == preloader.num_wanted == 0
    machine.check(preloader)


def test_memory_is_bounded():
    machine = Machine(8, 8)
    preloader = preloading(machine, max_sessions=10)
    machine.offload(0, 2)
    for number in range(200):
        preloader.wanted(number, number * 1e-3, SPEECH)
        preloader.step(number * 1e-3)
    assert preloader.num_wanted == len(preloader._sessions) == 10
    assert preloader.totals.cancelled == {"forgotten": 1}
    machine.ended(preloader)
    assert preloader.num_jobs == 0


def test_a_step_looks_at_few_sessions_and_seldom_at_those_it_refused():
    machine, looks = Machine(8, 64), []
    preloader = preloading(machine, max_looks=3)
    offloaded = machine.offloaded

    def counted(session, keys):
        looks.append(session)
        return offloaded(session, keys)

    machine.offloaded = counted
    for number in range(10):
        preloader.wanted(number, 0.0, SPEECH)
    for step in range(4):
        preloader.step(1e-3 * step)
        assert len(looks) == min(3 * (step + 1), 10)
    assert sorted(looks) == list(range(10))
    machine.offload("a", 4)
    machine.refuses = True
    for number in range(10):
        preloader.closed(number, 0.0)
    preloader.wanted("a", 1.0, SPEECH)
    looks.clear()
    for step in range(3000):
        preloader.step(1.0 + 1e-3 * step)
    assert 5 <= len(looks) <= 15  # after 0.05, 0.1, 0.2 … seconds, then an eighth of what is left


def test_a_manager_that_cannot_is_asked_again():
    machine = Machine(8, 8)
    preloader = preloading(machine)
    machine.offload("a", 4)
    machine.refuses = True
    preloader.wanted("a", 0.0, SPEECH)
    preloader.step(0.0)
    assert (preloader.num_jobs, preloader.totals.refused) == (0, {"manager": 1})
    machine.refuses = False
    preloader.step(0.1)
    assert preloader.num_jobs == 1


@pytest.mark.parametrize(
    ("field", "value"), [("max_bytes", 0), ("max_sessions", True), ("retry_s", -1.0),
                         ("slack_s", math.nan)]
)  # fmt: skip
def test_limits_are_checked(field, value):
    with pytest.raises(ValueError, match=field):
        PreloadLimits(**{field: value})


@pytest.mark.parametrize("name", ["lru", "t-lru", "next-use"])
def test_spare_counts_what_evicting_would_take(name):
    policy = make_policy(name, 12, NextUse(), safe_blocks=0)
    for block in range(12):
        policy.free((block,), float(block))
    now_s = 20.0
    for wait_s in (-1.0, 8.5, 12.0, 15.0, 20.0, 30.0):
        expected = sum(now_s - block > wait_s for block in range(12))
        assert policy.spare(12, wait_s, now_s) == expected
        assert policy.spare(3, wait_s, now_s) == min(3, expected)


def test_preload_over_a_threaded_link_in_real_time():
    """The same with the link of a CPU host, at 10 ms a block: a request that comes after the
    predicted time finds everything, and the preload took what was predicted."""
    machine = Machine(16, 16, link=lambda world: open_link(world.cache, world.pool, link_gbps=GBPS))
    with machine.engine:
        machine.offload("a", 10)
        preloader = preloading(machine, slack_s=0.0)
        began_s = machine.now_s = time.monotonic()
        preloader.wanted("a", began_s, PREFETCH, due_s=began_s + 0.15)
        preloader.step(began_s)
        (job,) = machine.jobs
        machine.settle()
        machine.ended(preloader)
        assert 0.09 < job.finished_s - began_s < 0.5
        assert machine.on_gpu("a") == 10
        preloader.arrived("a", began_s + 0.15)
        assert preloader.totals.hits == 1
        machine.check(preloader)


SESSIONS = st.sampled_from(["a", "b", "c", "d"])
BUDGET = 6 * BLOCK_BYTES


class Preloads(RuleBasedStateMachine):
    """Any mix of triggers, ends, failures and other users of the GPU and the link."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(24, 32, reserve=2)
        self.preloader = preloading(self.machine, max_bytes=BUDGET, max_sessions=3)
        self.in_use: list[int] = []
        for session, count in (("a", 3), ("b", 5), ("c", 8), ("d", 2)):
            self.machine.offload(session, count)

    @rule(seconds=st.sampled_from([0.001, 0.06, 0.4, 3.0, 40.0]))
    def time_passes(self, seconds):
        self.machine.now_s += seconds

    @rule(session=SESSIONS, cause=st.sampled_from(list(Cause)), in_s=st.floats(0, 10))
    def trigger(self, session, cause, in_s):
        now_s = self.machine.now_s
        if cause in (SPEECH, BARGE_IN):
            self.machine.next_use.needed(session, now_s)
        due_s = now_s + in_s if cause is PREFETCH else None
        self.preloader.wanted(session, now_s, cause, due_s=due_s)

    @rule(session=SESSIONS)
    def commit(self, session):
        self.preloader.committed(session, self.machine.now_s)

    @rule(session=SESSIONS)
    def silence(self, session):
        self.preloader.stopped(session, self.machine.now_s)

    @rule(session=SESSIONS)
    def request(self, session):
        self.preloader.arrived(session, self.machine.now_s)

    @rule(session=SESSIONS)
    def close(self, session):
        self.preloader.closed(session, self.machine.now_s)
        self.machine.next_use.close(session, self.machine.now_s)

    @rule(session=SESSIONS, plays_s=st.floats(0, 20), gap_s=st.floats(0, 5))
    def answer_plays(self, session, plays_s, gap_s):
        now_s = self.machine.now_s
        self.machine.next_use.waiting(session, now_s + plays_s, gap_s, now_s)
        self.machine.used(session)

    @rule()
    def step(self):
        self.preloader.step(self.machine.now_s)
        self.machine.victims, victims = [], self.machine.victims
        for victim_wait_s, job_wait_s in victims:
            assert victim_wait_s > job_wait_s, "evicts what is needed sooner"

    @rule()
    def stale(self):
        self.preloader.fail_closed()

    @rule(count=st.integers(1, 8))
    def pressure(self, count):
        self.preloader.pressure(count, self.machine.now_s)

    @rule(refuses=st.booleans())
    def manager(self, refuses):
        self.machine.refuses = refuses

    @rule(pieces=st.integers(1, 6), fails=st.booleans())
    def link_moves(self, pieces, fails):
        link = self.machine.link
        for _ in range(pieces):
            if link.take(Direction.LOAD) is not None:
                link.finish(Direction.LOAD, RuntimeError("link") if fails else None)
        self.machine.ended(self.preloader)

    @precondition(lambda self: len(self.machine.gpu) > 0)
    @rule(count=st.integers(1, 8))
    def others_take_blocks(self, count):
        self.in_use += self.machine.take(min(count, len(self.machine.gpu)))

    @precondition(lambda self: self.in_use)
    @rule()
    def others_free_blocks(self):
        self.machine.free(self.in_use, blank=True)
        self.in_use = []

    @invariant()
    def within_budgets(self):
        assert 0 <= self.preloader.in_flight_bytes <= BUDGET
        held = sum(len(t) for t in self.machine.jobs.values()) * BLOCK_BYTES
        assert self.preloader.in_flight_bytes == held
        assert len(self.preloader._sessions) <= 3
        assert self.preloader._wanted.items() <= self.preloader._sessions.items()

    def teardown(self):
        """However it ended: once the link has moved, nothing is held and nothing is lost."""
        for session in "abcd":
            self.preloader.closed(session, self.machine.now_s)
        self.machine.settle()
        self.machine.ended(self.preloader)
        assert self.preloader.num_jobs == 0
        assert self.machine.tier.in_flight == 0
        self.machine.free(self.in_use, blank=True)
        self.machine.check(self.preloader)
        assert len(self.machine.gpu) == 24


Preloads.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
test_any_mix = Preloads.TestCase
