"""code2wav: chunks in, audio out, one step for several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from liveserve.bench.simulator.engines import Engine, Request
from liveserve.bench.simulator.model import VocoderCost
from liveserve.scheduler.one_shot import Chunk, one_shot_batch

if TYPE_CHECKING:
    from liveserve.bench.simulator.world import World

# The host's wait before it looks again whether a chunk can still wait.
_NAP_S = 0.002


class Vocoder(Engine):
    """code2wav: chunks in, audio out, one step for several."""

    def __init__(self, world: World, stage: int, name: str, cost: VocoderCost) -> None:
        super().__init__(world, stage, name, cost.max_requests)
        self.cost = cost
        self.frames_made = 0
        self._batch: list[Request] = []
        self._chooses = (
            self.runtime is not None and world.system.one_shot and world.system.switches.order
        )

    def chunk(self, now_s: float, given: tuple[Request, tuple[int, int, int, bool]]) -> None:
        """``(left context, frames, frames so far, last)`` of a request came."""
        request, chunk = given
        if request.gone:
            return
        if not request.chunks and not request.taken:
            request.ready_s = now_s
        request.chunks.append(chunk)
        request.blocked = False
        if request.answer.session_id in self.sessions:
            self.kick(now_s)
        else:
            self.add(request, now_s)

    def _look(self, now_s: float) -> None:
        if not self.busy and any([r.chunks for r in self.sessions.values()]):
            super()._look(now_s)

    def step(self, now_s: float) -> None:
        ready = [r for r in (*self.running, *self.waiting) if r.chunks]
        if not ready:
            return
        if self.runtime is not None:
            self._round(now_s)
        # Without ranks (the round failed) in the host's order.
        runtime = self.runtime if self._chooses else None
        if runtime is not None and runtime.ranks and not runtime.ring.stale:
            batch = self._take(ready, now_s)
            if not batch:
                return
        else:
            ready.sort(key=lambda r: (r.ready_s, r.request_id))
            batch = ready[: self.max_requests]
        longest = 0
        for request in batch:
            context, frames, _, _ = request.chunks[0]
            longest = max(longest, context + frames)
            request.taken = True
            if request in self.waiting:
                self.waiting.remove(request)
                self.running.append(request)
        self._batch = batch
        if self.runtime is not None:
            self.runtime.scheduled([r.request_id for r in batch])
        seconds = self.cost.seconds(len(batch), longest) * self._slowed()
        self.world.at(now_s + seconds, self._ended, (now_s, len(batch) * longest))

    def _take(self, ready: list[Request], now_s: float) -> list[Request]:
        runtime = self.runtime
        assert runtime is not None
        by_id = {r.request_id: r for r in ready if r.request_id in runtime.ranks}
        chunks = []
        for request in self._in_order(list(by_id.values())):
            request_id = request.request_id
            ranked, (context, frames, _, _) = runtime.ranks[request_id], request.chunks[0]
            chunks.append(
                Chunk(
                    request_id,
                    ranked.urgency,
                    ranked.buffer_s,
                    context + frames,
                    runtime.can_wait(request_id),
                )
            )
        limit_s = runtime.config.generation_step_s
        names = one_shot_batch(chunks, runtime.token_s, limit_s, runtime.first_audio_waits())
        if not names:
            self._sleep(by_id, now_s)
        return [by_id[name] for name in names[: self.max_requests]]

    def _sleep(self, ready: dict[str, Request], now_s: float) -> None:
        """All can wait: until the first cannot."""
        runtime = self.runtime
        assert runtime is not None
        policy = runtime.policy
        safe_s = policy.p_safe_s + runtime.config.generation_step_s
        at_s = min(
            min(
                now_s + (runtime.ranks[name].buffer_s or 0.0) - safe_s,
                request.ready_s + policy.age_limit_s,
            )
            for name, request in ready.items()
        )
        self.wake_at(max(at_s, now_s + _NAP_S), now_s)

    def _ended(self, now_s: float, step: tuple[float, int]) -> None:
        self.busy = False
        self.world.active -= 1
        self.clock_s = now_s
        began_s, padded = step
        self.busy_s += now_s - began_s
        self.steps += 1
        if self.runtime is not None:
            self.runtime.stepped(began_s, 0, padded)
        for request in self._batch:
            request.taken = False
            if request.gone:
                continue
            _, frames, total, last = request.chunks.popleft()
            self.frames_made += frames
            request.ready_s = now_s
            request.blocked = not request.chunks
            answer = request.answer
            sent_s = now_s + self.world.crowding() * self.world.costs.deliver_s
            self.world.at(sent_s, answer.route, (frames, total, last))
            if last:
                self._remove(request)
        self.dirty = True
        self.step(now_s)

    def end(self, request: Request, now_s: float) -> None:
        if not request.gone:
            self._remove(request)
