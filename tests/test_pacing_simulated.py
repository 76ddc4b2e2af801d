"""1,000 paced responses on a simulated clock: pacing never costs a listener a gap.

The real runtime, plan and chunk rules run in a small world: a talker whose step takes longer the
larger its batch, a vocoder that makes one chunk after another, listeners who play at 1x. The same
world with the host's rules (no holds, 4 then 25 frames, first come first served) is the yardstick.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from liveserve.config import LiveServeConfig
from liveserve.events import Event, EventKind
from liveserve.runtime import StageInfo, StageRuntime
from liveserve.scheduler.chunking import ChunkPolicy, ChunkProgress, ChunkTimes
from liveserve.scheduler.playback import PlaybackClock

FRAME_AUDIO_S = 0.08
CONTEXT = 25
GAP_S = 0.1


@dataclass
class Answer:
    session: str
    frames: int
    request_id: str
    num_output_tokens: int = 0
    progress: ChunkProgress | None = None
    clock: PlaybackClock = field(default_factory=PlaybackClock)
    gaps: list[float] = field(default_factory=list)
    first_s: float | None = None
    asked_s: float = 0.0
    lead_s: list[float] = field(default_factory=list)


class Queues:
    """The world as the runtime looks at it: `liveserve.runtime.Queues`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def running(self):
        return iter(self._world.running)

    def waiting(self):
        return iter(())

    def can_run(self, request):
        return True

    def kv_blocks(self):
        return 0, 1000

    def kv_blocks_of(self, request):
        return 1


class World:
    """Sessions that ask, listen and ask again, until ``answers`` answers were given."""

    def __init__(self, *, ours: bool, seed: int, sessions: int, answers: int) -> None:
        self.ours, self.now_s, self.rng = ours, 0.0, random.Random(seed)
        self.running: list[Answer] = []
        self.done: list[Answer] = []
        self.left = answers
        self.asks: list[tuple[float, str, int]] = []
        self.vocoder: list[tuple[float, int, Answer, int, int]] = []  # queue
        self.under_way: tuple[float, Answer, int] | None = None
        self.seq = self.count = self.chunks = 0
        self.runtime = StageRuntime(
            StageInfo(1, "talker", token_s=FRAME_AUDIO_S),
            LiveServeConfig(),
            Queues(self),
            lambda request_id: request_id.partition("-")[0],
            clock=lambda: self.now_s,
        )
        self.runtime.barge_in_rate = 0.5  # users interrupt: holding always pays
        self.policy = self.runtime.config.chunks if ours else ChunkPolicy()
        self.times = self.runtime.chunk_times if ours else ChunkTimes()
        for index in range(sessions):
            self.plan_next(f"s{index}", 0.5 * index)

    def tell(self, kind: EventKind, session: str, value: float = 0.0, response: str = "") -> None:
        event = Event(kind, session, self.now_s, value, response, "duplex")
        self.runtime.ring.push(self.seq, [event])
        self.seq += 1

    def plan_next(self, session: str, at_s: float) -> None:
        if self.left > 0:
            self.left -= 1
            heapq.heappush(self.asks, (at_s, session, self.rng.choice((60, 120, 200, 300))))

    def begin(self) -> None:
        while self.asks and self.asks[0][0] <= self.now_s:
            _, session, frames = heapq.heappop(self.asks)
            self.count += 1
            answer = Answer(session, frames, f"{session}-{self.count}", asked_s=self.now_s)
            answer.progress = ChunkProgress(self.times)
            self.tell(EventKind.OPENED, session, 1.0)
            self.tell(EventKind.COMMITTED, session)
            self.tell(EventKind.RESPONSE_CREATED, session, response=answer.request_id)
            self.running.append(answer)

    def step(self) -> None:
        self.begin()
        self.runtime.round()
        made = self.runtime.plan() if self.ours else None
        batch = [a for a in self.running if made is None or a.request_id not in made.held]
        if not batch:
            self.advance(0.005)
            return
        self.runtime.scheduled([a.request_id for a in batch])
        self.advance(0.016 + 0.0008 * len(batch))  # a saturated talker would not pace
        for answer in batch:
            self.frame(answer)

    def frame(self, answer: Answer) -> None:
        progress = answer.progress
        answer.num_output_tokens += 1
        progress.made(self.now_s, rested=self.runtime.rested(answer.request_id))
        view = self.runtime.view_of(answer.session) if self.ours else None
        clock = view.clock if view is not None else None
        progress.observe(clock, self.now_s)
        last = answer.num_output_tokens == answer.frames
        policy = self.runtime.sized(self.policy) if self.ours else self.policy
        if last or progress.is_due(policy, clock, FRAME_AUDIO_S, self.now_s):
            context = min(progress.sent, CONTEXT)
            size = progress.leave(FRAME_AUDIO_S, self.now_s)
            rank = self.runtime.ranks.get(answer.request_id) if self.ours else None
            key = float(rank.urgency) if rank is not None else 0.0
            self.chunks += 1
            item = (key, self.chunks, answer, context + size, progress.sent)
            heapq.heappush(self.vocoder, item)
        if self.ours:
            self.runtime.sent_s[answer.request_id] = progress.sent * FRAME_AUDIO_S
        if last:
            self.running.remove(answer)

    def advance(self, seconds: float) -> None:
        """Time passes; the vocoder works meanwhile."""
        end_s = self.now_s + seconds
        while True:
            if self.under_way is None and self.vocoder:
                _, _, answer, cost, total = heapq.heappop(self.vocoder)
                self.under_way = (self.now_s + 0.01 + 0.0012 * cost, answer, total)
            if self.under_way is None or self.under_way[0] > end_s:
                break
            self.now_s, answer, total = self.under_way
            self.under_way = None
            self.arrive(answer, total * FRAME_AUDIO_S)
        self.now_s = end_s

    def arrive(self, answer: Answer, total_s: float) -> None:
        clock = answer.clock
        if clock.started:
            dry_s = self.now_s - clock.ends_at_s()
            if dry_s > 0:
                answer.gaps.append(dry_s)
        else:
            answer.first_s = self.now_s - answer.asked_s
        clock.route(total_s, self.now_s)
        answer.lead_s.append(clock.buffer_s(self.now_s))
        self.tell(EventKind.AUDIO_ROUTED, answer.session, total_s, answer.request_id)
        if total_s >= answer.frames * FRAME_AUDIO_S - 1e-9:
            self.done.append(answer)
            self.plan_next(answer.session, clock.ends_at_s() + self.rng.uniform(0.5, 2.0))

    def run(self) -> list[Answer]:
        while self.running or self.asks or self.vocoder or self.under_way:
            if not self.running and not self.vocoder and self.under_way is None:
                self.now_s = max(self.now_s, self.asks[0][0])
            self.step()
        return self.done


def simulate(*, ours: bool, seed: int, sessions: int, answers: int = 250) -> list[Answer]:
    return World(ours=ours, seed=seed, sessions=sessions, answers=answers).run()


@pytest.fixture(scope="module", params=[2, 4, 6, 8])
def worlds(request):
    seed, sessions = request.param, request.param
    return (
        simulate(ours=False, seed=seed, sessions=sessions),
        simulate(ours=True, seed=seed, sessions=sessions),
    )


def gaps(answers: list[Answer]) -> int:
    return sum(any(gap > GAP_S for gap in answer.gaps) for answer in answers)


def test_every_answer_is_given_whole(worlds):
    for answers in worlds:
        assert len(answers) == 250
        assert all(a.clock.routed_s == pytest.approx(a.frames * FRAME_AUDIO_S) for a in answers)


def test_no_listener_hears_a_gap_that_the_host_would_not_have_made(worlds):
    stock, ours = worlds
    assert gaps(stock) > 0  # the yardstick is not trivial
    assert gaps(ours) == 0


def test_answers_were_paced(worlds):
    stock, ours = worlds
    lead = [max(a.lead_s) for a in ours if a.frames >= 200]
    free = [max(a.lead_s) for a in stock if a.frames >= 200]
    assert sum(lead) / len(lead) < 0.5 * sum(free) / len(free)
