"""Stage engines: what one replica does, step after step.

An engine follows the host's loop: before a step the plan (LiveServe's runtime, or first come,
first served), then everybody who may run makes one token or computes a piece of a prompt, and the
step's end hands on what was made. Between events in which nothing a policy reads changes, the plan
of the last round stands and steps follow without another one: a plan changes when a request comes,
goes, waits or sends something, when an event of its session arrives, when a buffer crosses P_safe,
or when a hold's deadline comes. `SimConfig.step_by_step` plans every step instead; the result is
the same.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from liveserve.events import Event, EventKind
from liveserve.runtime import StageInfo, StageRuntime
from liveserve.scheduler.chunking import ChunkProgress
from liveserve.scheduler.pacing import may_hold
from liveserve.scheduler.plan import Plan
from liveserve.scheduler.playback import PlaybackClock

if TYPE_CHECKING:
    from liveserve.bench.simulator.world import Answer, World

_NOBODY: frozenset[str] = frozenset()
# What an idle engine lets lie before it looks at events that change nothing for it.
_MAX_EVENTS = 1024
# Events that change no plan are looked at together, so many at most: a rate of barge-ins above
# `_OFTEN` is not rare after them, whatever they are.
_MAX_QUIET = 32
_OFTEN = 0.2
# A buffer that differs by less than this from what was expected is as expected.
_SAME_S = 1e-9
_TICK_S = 1e-6


class Request:
    """One answer's work in one stage.

    Attributes:
        prompt: tokens to compute before the first output; a preempted request's outputs too.
        left: of those still to be computed.
        context: tokens of KV.
        limit: outputs it will make.
        blocked: it cannot run: waits for input or for a load.
        entered: it has its blocks.
    """

    __slots__ = (
        "answer", "asked", "blocked", "blocks", "cached", "capacity", "chunks", "context", "dry_s",
        "entered", "gone", "history", "left", "limit", "load_s", "loaded_blocks",
        "num_output_tokens", "progress", "prompt", "quiet", "ready_s", "recomputed",
        "request_id", "routed_s", "skip", "taken",
    )  # fmt: skip

    def __init__(self, answer: Answer, prompt: int, limit: int, now_s: float) -> None:
        self.answer = answer
        self.request_id: str = answer.request_id
        self.history: Any = None
        self.prompt = self.left = prompt
        self.limit = limit
        self.ready_s = now_s
        self.num_output_tokens = self.context = self.capacity = self.cached = 0
        self.loaded_blocks = self.recomputed = 0
        self.blocks: list[int] = []
        self.blocked = self.entered = self.gone = self.skip = self.taken = self.quiet = False
        self.asked = False
        self.progress: ChunkProgress | None = None
        self.routed_s = self.load_s = self.dry_s = 0.0
        self.chunks: deque[tuple[int, int, int, bool]] = deque()


class Noise:
    """`CostModel.noise`: a log-normal factor of mean 1 that drifts back within ``lasts_s``."""

    def __init__(self, sigma: float, lasts_s: float, seed: str) -> None:
        self._sigma, self._lasts_s = sigma, lasts_s
        self._draw = random.Random(seed)
        self._log = self._draw.gauss(0.0, sigma)
        self._at_s = 0.0

    def factor(self, now_s: float) -> float:
        """Of a step that begins at ``now_s``."""
        kept = math.exp(-(now_s - self._at_s) / self._lasts_s)
        new = self._draw.gauss(0.0, self._sigma)
        self._log = kept * self._log + math.sqrt(1.0 - kept * kept) * new
        self._at_s = now_s
        return math.exp(self._log - self._sigma * self._sigma / 2.0)


class Engine:
    """What every stage's replica has: its requests, and LiveServe's runtime where it is on.

    Attributes:
        busy_s, steps, rounds: since the start.
    """

    def __init__(self, world: World, stage: int, name: str, max_requests: int) -> None:
        self.world = world
        self.name = name
        self.max_requests = max_requests
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.sessions: dict[str, Request] = {}
        self.busy = False
        self.busy_s = 0.0
        self.steps = self.rounds = self.tokens = self.preempted = self.stalled = 0
        self.clock_s = 0.0
        world.engine_count += 1
        costs = world.costs
        self._noise = (
            Noise(costs.noise, costs.noise_s, f"{world.seed}/{world.engine_count}")
            if costs.noise
            else None
        )
        self.runtime: StageRuntime | None = None
        if world.system.live:
            token_s = world.frame_s if name == "talker" else None
            info = StageInfo(
                stage, name, token_s, routes_audio=name == "code2wav", slots=max_requests
            )
            self.runtime = StageRuntime(
                info, world.live_config, self.queues(), _session_of, clock=self._clock
            )
        self.held = _NOBODY
        self.plan: Plan | None = None
        self.dirty = True
        self.valid_s = -math.inf
        self._every_step = world.config.step_by_step
        self._events: list[Event] = []
        self._minor: list[Event] = []
        self._quiet: list[Event] = []
        self._coming = False
        self._idles = False  # the last look found nobody to run, and another would not either
        self._last: tuple[float, list[str]] | None = None
        self._wake_s = math.inf

    def queues(self) -> Queues:
        return Queues(self)

    def _clock(self) -> float:
        return self.clock_s

    def hear(self, event: Event, now_s: float, *, minor: bool, changes: bool) -> None:
        """An event of the interaction plane.

        Args:
            minor: it moves the playback clock of a session that this engine works for, and nothing
                else.
            changes: it changes whether anybody waits for first audio.
        """
        if not self._every_step and not self.dirty:
            if minor:
                self._minor.append(event)
                if self._idles and now_s < self.valid_s and not self._coming:
                    # The look that would follow finds what the last one found.
                    self._clocks_moved(now_s)
                    if not self.dirty:
                        return
                if self.sessions:
                    self._look(now_s)
                return
            if not changes and self._is_quiet(event):
                self._quiet.append(event)
                return
        self._events += self._quiet
        self._events += self._minor
        self._events.append(event)
        self._quiet, self._minor = [], []
        self.dirty = True
        if self.sessions:
            self._look(now_s)
        elif len(self._events) >= _MAX_EVENTS:
            self._round(now_s)

    def _is_quiet(self, event: Event) -> bool:
        """Whether the plan is the same before ``event`` and after it, if nobody's waiting changes:
        it is about nobody here, and leaves the rate of barge-ins well on its side of what counts
        as rare."""
        runtime = self.runtime
        if event.session_id in self.sessions or runtime is None or len(self._quiet) >= _MAX_QUIET:
            return False
        rate = runtime.barge_in_rate
        if event.kind is EventKind.BARGE_IN:
            return rate > _OFTEN
        return (
            event.kind is not EventKind.RESPONSE_DONE or rate > _OFTEN or not may_hold(False, rate)
        )

    def _look(self, now_s: float) -> None:
        if self.busy:
            self.cut(now_s)
        elif not self._coming:
            # Whatever comes at the same moment is seen in the same round.
            self._coming = True
            self.world.at(now_s, self._heard, None)

    def _heard(self, now_s: float, _: None) -> None:
        self._coming = False
        if not self.busy:
            self.step(now_s)

    def _clocks_moved(self, now_s: float) -> None:
        """Apply minor events. They change a plan only where a buffer is not what it was expected
        to be by now."""
        runtime = self.runtime
        assert runtime is not None
        for event in self._minor:
            view = runtime.table.apply(event)
            request = self.sessions.get(event.session_id)
            if request is not None and view is not None and not self.dirty:
                clock = view.clock
                buffer_s = (self._ahead_s(request, clock) - clock.played_s(now_s)) / clock.rate
                if abs(now_s + buffer_s - request.dry_s) > _SAME_S:
                    self.dirty = True
        self._minor = []

    def _ahead_s(self, request: Request, clock: PlaybackClock) -> float:
        """What this stage made for ``request``, as the runtime counts it."""
        return clock.routed_s

    def kick(self, now_s: float) -> None:
        """Something changed for one of its requests."""
        self.dirty = True
        if self.busy:
            self.cut(now_s)
        else:
            self.step(now_s)

    def cut(self, now_s: float) -> None:
        """The next step must not follow the one under way without a look at what happened."""

    def wake_at(self, at_s: float, now_s: float) -> None:
        """Look again at ``at_s``, or up to two timer ticks later, unless something happens before.

        The grid makes a deadline that was computed twice the same moment, and puts the look safely
        past it.
        """
        at_s = (math.floor(at_s / _TICK_S) + 2) * _TICK_S
        if at_s < self._wake_s or self._wake_s <= now_s:
            self._wake_s = at_s
            self.world.at(at_s, self._woken, at_s)

    def _woken(self, now_s: float, meant_s: float) -> None:
        if meant_s == self._wake_s:
            self._wake_s = math.inf
            if not self.busy:
                self.step(now_s)

    def step(self, now_s: float) -> None:
        raise NotImplementedError

    def add(self, request: Request, now_s: float) -> None:
        self.waiting.append(request)
        self.sessions[request.answer.session_id] = request
        self.kick(now_s)

    def _remove(self, request: Request) -> None:
        request.gone = True
        self.sessions.pop(request.answer.session_id, None)
        for queue in (self.running, self.waiting):
            if request in queue:
                queue.remove(request)
        self.dirty = True

    def _slowed(self) -> float:
        """A step begins: by how much it is slower because others are under way, and by chance."""
        world = self.world
        self.busy = True
        world.active += 1
        factor = 1.0 if self._noise is None else self._noise.factor(world.now_s)
        parallel = world.costs.parallel_steps
        if parallel is not None and world.active > parallel:
            factor *= world.active / parallel
        return factor

    def _round(self, now_s: float) -> None:
        """One planning round of the runtime."""
        runtime = self.runtime
        assert runtime is not None
        if self._last is not None:
            self.clock_s, ids = self._last
            runtime.scheduled(ids)
            self._last = None
        self.clock_s = now_s
        if self._minor:
            self._clocks_moved(now_s)
        if self._quiet or self._events:
            runtime.ring.push(runtime.ring.next_seq, self._quiet + self._events)
            self._quiet, self._events = [], []
        runtime.round()
        self.plan = runtime.plan()
        self.rounds += 1
        self.held = _NOBODY if self.plan is None else self.plan.held
        self.dirty = False

    def _in_order(self, requests: list[Request]) -> list[Request]:
        plan = self.plan
        if plan is None or len(requests) < 2:
            return requests
        place = {request_id: index for index, request_id in enumerate(plan.order)}
        last = len(place)
        return sorted(requests, key=lambda r: place.get(r.request_id, last))


def _session_of(request_id: str) -> str:
    return request_id.partition("-")[0]


class Queues:
    """`liveserve.runtime.Queues` over an engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def running(self) -> Iterator[Request]:
        return iter(self._engine.running)

    def waiting(self) -> Iterator[Request]:
        return iter(self._engine.waiting)

    def can_run(self, request: Any) -> bool:
        return not request.blocked

    def kv_blocks(self) -> tuple[int, int]:
        return 0, 0

    def kv_blocks_of(self, request: Any) -> int:
        return 0
