"""Reserving KV ahead: safety against brute force, and a pool that is filled without preemption."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liveserve.scheduler.reserve import Claim, Lengths, is_safe, may_enter, may_grow


@st.composite
def claims(draw, streams=True):
    made = []
    for _ in range(draw(st.integers(0, 5))):
        more = draw(st.integers(0, 8))
        likely = draw(st.integers(0, more))
        ends = not streams or draw(st.booleans())
        made.append(Claim(draw(st.integers(0, 8)), more, likely, ends))
    return made


def finish_in_turn(free: int, order: tuple[Claim, ...]) -> bool:
    for claim in order:
        if claim.more > free:
            return False
        free += claim.held
    return True


@given(st.integers(0, 12), claims())
def test_safe_means_that_some_order_works(free, state):
    kept = sum(claim.more for claim in state if not claim.ends)
    ending = [claim for claim in state if claim.ends]
    possible = any(finish_in_turn(free - kept, order) for order in permutations(ending))
    assert is_safe(free, state) == (free >= kept and possible)


@given(st.integers(0, 30), claims(), st.integers(0, 8), st.integers(0, 8))
def test_who_enters_leaves_a_safe_and_likely_state(free, state, more, first):
    first = min(first, more)
    new = Claim(0, more, more // 2)
    if may_enter(free, state, new, first):
        assert first <= free
        assert is_safe(free - first, [*state, new.grown(first)])
        assert sum(claim.likely for claim in state) + new.likely <= free
    assert may_enter(free, state, new, first) <= may_enter(free + 1, state, new, first)


@given(st.integers(0, 30), claims(streams=False))
def test_worst_cases_that_fit_together_enter_and_grow_freely(free, state):
    total = sum(claim.more for claim in state)
    assert may_enter(total + free, state, Claim(0, free, free), free)
    wants = [claim.more for claim in state]
    assert may_grow(total, state, wants) == [True] * len(state)


def test_alone_everything_that_fits_the_pool_enters_and_nothing_else():
    assert may_enter(10, [], Claim(0, 10, 10), 3)
    assert not may_enter(10, [], Claim(0, 11, 2), 3)
    assert not may_enter(10, [], Claim(0, 10, 10), 11)


def test_a_likely_stall_keeps_a_request_out_although_it_would_be_safe():
    running = [Claim(4, 4, 4)]
    assert is_safe(4, [*running, Claim(1, 4, 4)])
    assert not may_enter(5, running, Claim(0, 5, 5), 1)
    assert may_enter(5, running, Claim(0, 5, 1), 1)


def test_what_a_streaming_session_may_take_is_kept_and_what_it_holds_is_not_counted_on():
    session = Claim(held=20, more=6, likely=6, ends=False)
    assert is_safe(6, [session])
    assert not is_safe(5, [session])
    assert not may_enter(10, [session], Claim(0, 5, 5), 1)
    assert may_enter(11, [session], Claim(0, 5, 5), 1)


@given(st.integers(0, 12), claims(), st.data())
def test_growth_stays_safe_and_within_the_pool(free, state, data):
    wants = [data.draw(st.integers(0, claim.more)) for claim in state]
    granted = may_grow(free, state, wants)
    taken = sum(want for want, go in zip(wants, granted, strict=True) if go)
    after = [c.grown(w) if go else c for c, w, go in zip(state, wants, granted, strict=True)]
    assert taken <= free
    assert all(go for go, want in zip(granted, wants, strict=True) if not want)
    if is_safe(free, state):
        assert is_safe(free - taken, after)
        wanting = [go for go, want in zip(granted, wants, strict=True) if want]
        idle = all(claim.ends for claim in state) and len(wanting) == len(state)
        assert not idle or not wanting or any(wanting)


def test_the_most_urgent_grows_first():
    twins = [Claim(3, 3, 3), Claim(3, 3, 3)]
    assert may_grow(3, twins, [1, 1]) == [True, False]


def test_an_unsafe_state_hands_out_what_there_is():
    state = [Claim(4, 9, 9), Claim(4, 9, 9)]
    assert not is_safe(2, state)
    assert may_grow(2, state, [1, 2]) == [True, False]


@dataclass
class Job:
    """A request of the simulated stage; sizes in blocks."""

    prompt: int
    limit: int
    length: int  # what it takes in truth: prompt <= length <= limit
    has: int = 0
    entered: int = -1

    def claim(self, share: float) -> Claim:
        likely = self.prompt + round(share * (self.limit - self.prompt))
        return Claim(self.has, self.limit - self.has, max(0, likely - self.has))


def simulate(pool: int, jobs: list[Job]) -> int:
    """Run ``jobs`` in a stage until all have ended; returns how many rounds had a stall."""
    waiting, running, lengths = list(jobs), [], Lengths()
    stalls = 0
    for step in range(10_000):
        if not waiting and not running:
            return stalls
        free = pool - sum(job.has for job in running)
        claims_now = [job.claim(lengths.share) for job in running]
        granted = may_grow(free, claims_now, [1] * len(running))
        assert any(granted) or not running, "nobody can go on"
        for job, go in zip(running, granted, strict=True):
            job.has += go
        stalls += not all(granted)
        free = pool - sum(job.has for job in running)
        assert free >= 0, "the pool is overdrawn"
        while waiting and all(granted):
            job = waiting[0]
            state = [other.claim(lengths.share) for other in running]
            if not may_enter(free, state, job.claim(lengths.share), job.prompt):
                break
            job.has, job.entered = job.prompt, step
            free -= job.prompt
            running.append(waiting.pop(0))
        assert is_safe(free, [job.claim(lengths.share) for job in running])
        for job in [job for job in running if job.has >= job.length]:
            lengths.learn(job.has - job.prompt, job.limit - job.prompt)
            running.remove(job)
    raise AssertionError("it never ends")


@st.composite
def crowds(draw):
    pool = draw(st.integers(4, 40))
    jobs = []
    for _ in range(draw(st.integers(1, 14))):
        limit = draw(st.integers(1, pool))
        prompt = draw(st.integers(1, limit))
        jobs.append(Job(prompt, limit, draw(st.integers(prompt, limit))))
    return pool, jobs


@given(crowds())
def test_whatever_the_lengths_a_full_pool_never_overdraws_and_all_finish_in_turn(crowd):
    pool, jobs = crowd
    simulate(pool, jobs)
    entered = [job.entered for job in jobs]
    assert entered == sorted(entered)
    assert min(entered) >= 0


@given(crowds())
def test_where_everybody_takes_the_most_nobody_ever_stalls(crowd):
    pool, jobs = crowd
    for job in jobs:
        job.length = job.limit
    assert simulate(pool, jobs) == 0


def test_short_answers_are_let_in_together_once_they_are_known_to_be_short():
    """100-block claims of which 4 are used: the worst case alone would run them one by one."""
    jobs = [Job(2, 100, 4) for _ in range(400)]
    simulate(120, jobs)
    entered = [job.entered for job in jobs]
    assert entered[1] > entered[0]  # nothing is known yet
    assert entered[-1] - entered[-8] <= 3  # about eight at a time; two rounds each


def test_a_wrong_guess_stalls_but_everybody_finishes():
    jobs = [Job(2, 60, 4) for _ in range(200)] + [Job(2, 60, 60) for _ in range(20)]
    assert simulate(80, jobs) > 0


@pytest.mark.parametrize(("tokens", "limit", "share"), [(5, 10, 0.98), (0, 0, 0.98), (20, 10, 1)])
def test_the_first_answers_lower_the_share_slowly(tokens, limit, share):
    lengths = Lengths()
    lengths.learn(tokens, limit)
    assert lengths.share == share


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 100)), min_size=1))
def test_the_share_is_never_below_the_last_answer_nor_outside_its_range(answers):
    lengths = Lengths()
    for tokens, limit in answers:
        lengths.learn(tokens, limit)
    tokens, limit = answers[-1]
    assert min(1.0, tokens / max(1, limit)) <= lengths.share <= 1.0
