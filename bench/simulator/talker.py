"""The talker: codec frames, and when they leave together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liveserve.bench.simulator.ar import ArEngine
from liveserve.bench.simulator.engines import Request
from liveserve.bench.simulator.kv import Pool
from liveserve.bench.simulator.model import StageCost
from liveserve.scheduler.chunking import ChunkPolicy, ChunkProgress, ChunkTimes
from liveserve.scheduler.playback import PlaybackClock

if TYPE_CHECKING:
    from liveserve.bench.simulator.world import World


class Talker(ArEngine):
    """Makes codec frames, and decides when they leave together."""

    pool: Pool

    def __init__(self, world: World, stage: int, name: str, cost: StageCost, most: int) -> None:
        super().__init__(world, stage, name, cost, most)
        costs = world.costs
        self._sizes = ChunkPolicy(first=costs.first_chunk_frames, largest=costs.chunk_frames)
        runtime = self.runtime
        self._chunking = runtime is not None and world.system.switches.chunking
        self._times = ChunkTimes() if runtime is None else runtime.chunk_times
        self._policy = self._sizes
        self._policy_of: tuple[bool, float, float] | None = None
        # Of the stretch under way: frames before it, and frame times after each of its steps.
        self._before: tuple[list[tuple[ChunkProgress, int]], list[float]] = ([], [])
        self._alternates = costs.alternate_steps and not (
            world.system.live and world.system.switches.lookahead
        )
        if self._chunking and runtime is not None:
            self._sizes = runtime.config.chunks.within(costs.first_chunk_frames, costs.chunk_frames)

    def _fed(self, batch: list[Request]) -> int:
        if not self.cost.step.per_fed_s:
            return 0
        return sum(not (request.left or request.answer.text_over) for request in batch)

    def add(self, request: Request, now_s: float) -> None:
        request.progress = ChunkProgress(self._times)
        super().add(request, now_s)

    def _ahead_s(self, request: Request, clock: PlaybackClock) -> float:
        runtime = self.runtime
        assert runtime is not None
        sent_s = runtime.sent_s.get(request.request_id)
        return request.num_output_tokens * self.world.frame_s if sent_s is None else sent_s

    def _buffers_grow(self) -> bool:
        return not self._chunking  # without `sent_s` what is made counts, frame by frame

    def _sized(self) -> ChunkPolicy:
        runtime = self.runtime
        assert runtime is not None
        reads = (runtime.policy.pace, runtime.barge_in_rate, self._times.deliver_s)
        if reads != self._policy_of:
            self._policy_of = reads
            self._policy = runtime.sized(self._sizes)
        return self._policy

    def _until_told(self, batch: list[Request], now_s: float) -> int:
        if self._alternates:
            return 1
        return min([r.answer.text_ready(now_s) - r.num_output_tokens for r in batch])

    def _tokens(self, ends_s: list[float]) -> list[float]:
        """Frames are told to the chunk rules as if they were made already; see `_untold`."""
        pieces = self._pieces
        batch = self._batch
        if pieces:
            batch = [r for r in batch if r.left <= pieces.get(r, 0)]
        if not self._chunking:
            return self._fixed_chunks(batch, ends_s)
        runtime, times, frame_s = self.runtime, self._times, self.world.frame_s
        assert runtime is not None
        rows: list[tuple[ChunkProgress, PlaybackClock | None]] = []
        for request in batch:
            assert request.progress is not None
            rows.append((request.progress, self._clock_of(request)))
        after_s: list[float] = []
        self._before = ([(p, p.total) for p, _ in rows], after_s)
        for progress, clock in rows:
            if clock is not None and clock.routed_s > 0.0:
                progress.observe(clock, ends_s[0])
        policy = self._sized()
        rested = [runtime.rested(request.request_id) for request in batch]
        for steps, at_s in enumerate(ends_s, start=1):
            for (progress, _), was in zip(rows, rested, strict=True):
                progress.made(at_s, rested=was and steps == 1)
            stop = any(
                progress.pending >= progress.least(policy)
                and progress.is_due(policy, clock, frame_s, at_s)
                for progress, clock in rows
            )
            after_s.append(times.frame_s)
            # A plan would follow the measured chunk time: make one if that changes it.
            if stop or runtime.chunk_time_moved():
                return ends_s[:steps]
        return ends_s

    def _fixed_chunks(self, batch: list[Request], ends_s: list[float]) -> list[float]:
        """Chunks of the host's sizes: nothing is measured, and the next one's end is known."""
        steps = len(ends_s)
        policy, rows = self._policy, []
        for request in batch:
            progress = request.progress
            assert progress is not None
            full = policy.largest if progress.sent else policy.first
            steps = min(steps, max(1, full - progress.pending))
            rows.append((progress, progress.total))
        for progress, total in rows:
            progress.total = total + steps
        self._before = (rows, [])
        return ends_s[:steps]

    def _untold(self, count: int) -> None:
        rows, after_s = self._before
        for progress, total in rows:
            progress.total = total + count
            if after_s:
                progress._last_frame_s = self._ends_s[count - 1]
        if after_s:
            self._times.frame_s = after_s[count - 1]

    def _clock_of(self, request: Request) -> PlaybackClock | None:
        if not self._chunking:
            return None
        assert self.runtime is not None
        view = self.runtime.view_of(request.answer.session_id)
        return None if view is None else view.clock

    def _made(self, batch: list[Request], now_s: float) -> bool:
        world, runtime, chunking = self.world, self.runtime, self._chunking
        frame_s = world.frame_s
        other = False
        policy, sized = self._policy, False
        for request in batch:
            if request.gone:
                other = True
                continue
            request.context += 1
            made = request.num_output_tokens = request.num_output_tokens + 1
            progress, answer = request.progress, request.answer
            assert progress is not None
            last = made >= request.limit
            if chunking:
                if not sized:
                    policy, sized = self._sized(), True
                if made == 1:
                    assert runtime is not None
                    runtime.sent_s[request.request_id] = 0.0
                    other = True
            clock = self._clock_of(request)
            if last or progress.is_due(policy, clock, frame_s, now_s):
                context = min(progress.sent, world.costs.left_context_frames)
                count = progress.leave(frame_s, now_s)
                if chunking and runtime is not None:
                    runtime.sent_s[request.request_id] = progress.sent * frame_s
                    request.dry_s += count * frame_s / (1.0 if clock is None else clock.rate)
                if not last and not self._means_nothing(request, now_s):
                    self.dirty = True
                answer.frames_left(context, count, progress.sent, last, now_s)
            if last:
                other = True
                self.end(request, 0, now_s)
                continue
            if request.context >= request.capacity and not self._grown(request, now_s):
                other = True
            if made >= answer.text_ready(now_s):
                request.quiet = self._means_nothing(request, now_s)
                request.blocked = other = True
                self.dirty = self.dirty or not request.quiet
                answer.want_text(made + 1)
            elif self._alternates and not answer.text_over:
                request.skip = other = True
        self.tokens += len(batch)
        if chunking and runtime is not None and not self.dirty:
            self.dirty = runtime.chunk_time_moved()
        return other
