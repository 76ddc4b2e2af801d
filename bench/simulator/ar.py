"""Autoregressive engines: continuous batching with chunked prefill, and the thinker."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Any

from liveserve.bench.simulator.engines import Engine, Queues, Request
from liveserve.bench.simulator.kv import CachingPool, Pool
from liveserve.bench.simulator.model import StageCost
from liveserve.events import Event
from liveserve.runtime import CROWDED_SHARE, slots_short
from liveserve.scheduler.reserve import Claim, Lengths, may_enter, may_grow
from liveserve.scheduler.urgency import Urgency

if TYPE_CHECKING:
    from liveserve.bench.simulator.world import World

_U1, _U2 = Urgency.U1, Urgency.U2
# A plan is made again this long before the moment at which it would change, so that rounding never
# decides.
_EARLY_S = 1e-6
# Steps of one stretch.
_LONGEST = 64


class PoolQueues(Queues):
    """With the KV pool of an autoregressive engine."""

    _engine: ArEngine

    def kv_blocks(self) -> tuple[int, int]:
        pool = self._engine.pool
        return pool.used, pool.total

    def kv_blocks_of(self, request: Any) -> int:
        return request.capacity // self._engine.pool.block_tokens


class ArEngine(Engine):
    """Thinker or talker: continuous batching with chunked prefill."""

    pool: Pool | CachingPool

    def __init__(self, world: World, stage: int, name: str, cost: StageCost, most: int) -> None:
        super().__init__(world, stage, name, cost.max_requests)
        self.cost = cost
        self._most = most  # outputs that KV is reserved for
        self._lengths = Lengths()
        self._batch: list[Request] = []
        self._ids: list[str] = []
        self._pieces: dict[Request, int] = {}
        self._context = 0
        self._began_s = 0.0
        self._ends_s: list[float] = []
        self._stretch_id = 0
        self._again = False  # the same batch makes the next step
        self._reserves = world.system.live and world.system.switches.reserve

    def queues(self) -> Queues:
        return PoolQueues(self)

    # ---- one step --------------------------------------------------------------------------

    def step(self, now_s: float) -> None:
        self._idles = False
        if not self.sessions:
            return
        if self._minor:
            self._clocks_moved(now_s)
        if self.runtime is not None and (self.dirty or self._every_step or now_s >= self.valid_s):
            self._round(now_s)
            self._again = False
            self._set_validity(now_s)
        elif self.runtime is None and self.dirty:
            self._again = self.dirty = False
        stalled = self.stalled
        if not self._again:
            self._choose(now_s)
        batch = self._batch
        if not batch:
            self._idles = not (self.dirty or self.waiting) and self.stalled == stalled
            if self.plan is not None and self.plan.next_deadline_s is not None:
                self.wake_at(max(self.plan.next_deadline_s, now_s), now_s)
            return
        self._began_s = now_s
        self._ends_s = self._stretch(batch, now_s, self._slowed())
        self._stretch_id += 1
        self.world.at(self._ends_s[-1], self._ended, self._stretch_id)

    def _stretch(self, batch: list[Request], now_s: float, slowed: float) -> list[float]:
        """When the next steps end: as many as follow one another without anything happening."""
        cost, pieces, context = self.cost.step, self._pieces, self._context
        if pieces:
            tokens = sum(pieces.values())
            pairs = sum(n * (r.context + n / 2) for r, n in pieces.items())
            seconds = cost.seconds(
                len(batch) - len(pieces), context, tokens, pairs, self._fed(batch)
            )
            return self._tokens([now_s + slowed * seconds])
        count = len(batch)
        most = 1
        if (
            count
            and self._again
            and not self._every_step
            and self.world.costs.parallel_steps is None
            and self._noise is None
            and not cost.per_fed_s
        ):
            most = min(self._until_told(batch, now_s), _LONGEST)
            for request in batch:
                left = request.limit - request.num_output_tokens
                if left < most:
                    most = left
                left = request.capacity - request.context
                if left < most:
                    most = left
        base_s, each_s = cost.fixed_s + cost.per_request_s * count, cost.per_context_token_s
        if cost.per_fed_s:
            base_s += cost.per_fed_s * self._fed(batch)
        ends_s: list[float] = []
        at_s, valid_s = now_s, self.valid_s if self.runtime is not None else math.inf
        while True:
            at_s += slowed * (base_s + each_s * context)
            context += count
            ends_s.append(at_s)
            if len(ends_s) >= most or at_s >= valid_s:
                return self._tokens(ends_s)

    def _fed(self, batch: list[Request]) -> int:
        """How many of ``batch`` decode and take a text token."""
        return 0

    def _until_told(self, batch: list[Request], now_s: float) -> int:
        """Steps until another stage must be told of one's output, or has to give more input."""
        raise NotImplementedError

    def _tokens(self, ends_s: list[float]) -> list[float]:
        """The batch's next tokens will be made then. May return fewer, where something happens."""
        raise NotImplementedError

    def _untold(self, count: int) -> None:
        """Of the stretch under way only the first ``count`` steps stand."""
        raise NotImplementedError

    def cut(self, now_s: float) -> None:
        """What is complete of a stretch counts from now on; the step under way is its last."""
        ends_s = self._ends_s
        if not self.busy or len(ends_s) < 2:
            return
        done = bisect_right(ends_s, now_s)
        if done >= len(ends_s):
            return
        if done + 1 < len(ends_s):
            self._untold(done + 1)
            self._stretch_id += 1
            self.world.at(ends_s[done], self._ended, self._stretch_id)
        if done:
            self._advance(done)
            self.busy_s += ends_s[done - 1] - self._began_s
            self._began_s = ends_s[done - 1]
        self._ends_s = [ends_s[done]]

    def _advance(self, steps: int) -> None:
        """The batch has made ``steps`` tokens each, and nothing came of them."""
        for request in self._batch:
            if not request.gone:
                request.num_output_tokens += steps
                request.context += steps
                self.tokens += steps
        self._context += steps * len(self._batch)
        self.steps += steps

    def _set_validity(self, now_s: float) -> None:
        """Until when the plan stands if nothing happens."""
        runtime, plan = self.runtime, self.plan
        assert runtime is not None
        if self._pressed() or self._buffers_grow():
            self.valid_s = now_s
            return
        valid_s = math.inf
        if plan is not None:
            if plan.next_deadline_s is not None:
                valid_s = plan.next_deadline_s
            p_safe_s, held = runtime.policy.p_safe_s, plan.held
            ranks = runtime.ranks
            crossings = 0
            first_s = math.inf
            for request in self.sessions.values():
                ranked = ranks[request.request_id]
                buffer_s = ranked.buffer_s
                if buffer_s is None:
                    request.dry_s = math.nan
                    continue
                dry_s = request.dry_s = now_s + buffer_s
                if ranked.urgency is _U2 and request.request_id not in held:
                    crossings += 1
                    if dry_s - p_safe_s < first_s:
                        first_s = dry_s - p_safe_s
            # One that becomes urgent makes holds begin earlier; if it runs alone beside those that
            # are held already, nobody is left to be held. (With order off that is the same.)
            if crossings > 1 or self.waiting:
                valid_s = min(valid_s, first_s)
        self.valid_s = valid_s - _EARLY_S

    def _round(self, now_s: float) -> None:
        assert self.runtime is not None
        self.runtime.promised_blocks = self._promised()
        super()._round(now_s)

    def _promised(self) -> int:
        """Blocks that those in the pool are likely to take yet; 0 where too few to matter."""
        pool = self.pool
        if not self._reserves or pool.free >= len(self.running) * pool.blocks_for(self._most):
            return 0
        holders = (r for r in (*self.running, *self.waiting) if r.entered)
        return sum(self._claim(r).likely for r in holders)

    def _pressed(self) -> bool:
        """Whether KV in use or promised counts in plans, or how many sessions there are for the
        slots: then they change with it."""
        runtime, pool = self.runtime, self.pool
        assert runtime is not None
        if slots_short(len(self.running), self.max_requests):
            return True
        share = min(CROWDED_SHARE, runtime.policy.kv_high_watermark)
        return pool.used + runtime.promised_blocks > share * pool.total

    def _is_quiet(self, event: Event) -> bool:
        return super()._is_quiet(event) and not self._pressed()

    def _buffers_grow(self) -> bool:
        return False

    def _means_nothing(self, request: Request, now_s: float) -> bool:
        """Whether the plan of all others is the same with ``request`` and without it, and it is
        not held if it runs.

        So it is before its first audio: its session waits for that whether this request can run or
        not. And with a buffer that is safe but too small for a hold to begin.
        """
        runtime = self.runtime
        if runtime is None or self._every_step or self._buffers_grow():
            return False
        ranked = runtime.ranks.get(request.request_id)
        if ranked is None or self.valid_s <= now_s:
            return False
        if ranked.urgency is _U1:
            return True
        policy = runtime.tight_policy  # holds begin and end earlier with no other
        left_s = request.dry_s - now_s
        return ranked.urgency is _U2 and policy.p_safe_s < left_s <= policy.p_release_s

    def _choose(self, now_s: float) -> None:
        """The next step's batch."""
        held = self.held
        batch: list[Request] = []
        pieces: dict[Request, int] = {}
        budget = self.cost.max_step_tokens
        context = 0
        running = self.running
        prefilling = any(r.left for r in running)
        if prefilling and self.plan is not None:
            running = self._in_order(running)
        stalls = self._make_room(running, held, now_s)
        for request in tuple(running):
            if request.blocked or request.skip or request.gone or request.request_id in held:
                continue
            if request in stalls or not request.entered:
                continue
            if budget <= 0:
                break
            if request.left:
                piece = pieces[request] = min(request.left, budget)
                budget -= piece
            else:
                budget -= 1
                context += request.context
            batch.append(request)
        if self.waiting and not stalls:
            self._admit(batch, pieces, budget, now_s)
        self._batch, self._pieces, self._context = batch, pieces, context
        self._ids = [request.request_id for request in batch]
        self._again = bool(batch) and not pieces and not self.waiting and not stalls
        skipped = [request for request in running if request.skip]
        for request in skipped:
            request.skip, self._again, self.dirty = False, False, True
        if skipped and not batch:
            self._choose(now_s)  # nobody else to run: their turn comes at once

    def _admit(
        self, batch: list[Request], pieces: dict[Request, int], budget: int, now_s: float
    ) -> None:
        # Who holds blocks already (they were loaded) goes in, whoever else does not fit.
        order = self._in_order(list(self.waiting))
        for request in sorted(order, key=lambda r: not r.entered):
            if len(self.running) >= self.max_requests or budget <= 0:
                return
            if request.blocked:
                continue
            if not request.entered:
                if self._reserves and not self._may_enter(request):
                    return
                entered = self.pool.enter(request, now_s)
                if entered is False:
                    self._refused(request, now_s)
                    return
                request.entered = request.capacity > 0
                if entered is None:
                    request.blocked = self.dirty = True
                    request.ready_s = now_s
                    continue
                self._cached(request)
            self.waiting.remove(request)
            self.running.append(request)
            self.dirty = True
            piece = pieces[request] = min(request.left, budget)
            budget -= piece
            batch.append(request)

    def _cached(self, request: Request) -> None:
        request.context = min(request.cached, request.prompt - 1)
        request.left = request.prompt - request.context

    def unblock(self, request: Request, now_s: float) -> None:
        """``request`` has the input that it waited for."""
        request.blocked = False
        self._again = False
        if not (request.quiet and self._means_nothing(request, now_s)):
            self.dirty = True
        if self.busy:
            self.cut(now_s)
        else:
            self.step(now_s)

    def loaded(self, request: Request, now_s: float) -> None:
        """What ``request`` waited for on the link is there."""
        if request.gone:
            return
        request.blocked = False
        request.load_s += now_s - request.ready_s
        if request.entered:
            self._cached(request)
        self.kick(now_s)

    def room(self, now_s: float) -> None:
        """Blocks that a copy held are free: somebody may fit now."""
        if self.waiting and not self.busy:
            self.step(now_s)

    def _ended(self, now_s: float, stretch_id: int) -> None:
        if stretch_id != self._stretch_id:
            return  # it was cut
        # Busy until all outputs are dealt with: `end` must not begin a step among them.
        self.world.active -= 1
        self.clock_s = now_s
        ends_s = self._ends_s
        self.busy_s += now_s - self._began_s
        self._last = (ends_s[-2] if len(ends_s) > 1 else self._began_s, self._ids)
        if len(ends_s) > 1:
            self._advance(len(ends_s) - 1)
        self.steps += 1
        pieces = self._pieces
        batch = self._batch
        if pieces:
            for request, piece in pieces.items():
                if request.gone:
                    continue
                request.left -= piece
                request.context += piece
                self.world.prefilled += piece
                if request.left:
                    self.dirty = True
                else:
                    self.pool.computed(request)
            batch = [r for r in batch if not r.left]
        if self._made(batch, now_s):
            self._again = False
        else:
            self._context += len(batch)
        self.busy = False
        self.step(now_s)

    def _made(self, batch: list[Request], now_s: float) -> bool:
        """Everybody in ``batch`` made one output. Returns whether the next step's batch is
        another."""
        raise NotImplementedError

    # ---- KV --------------------------------------------------------------------------------

    def _grown(self, request: Request, now_s: float) -> bool:
        """``request`` needs a block for its next output."""
        if self._reserves and self.pool.free < self._most // self.pool.block_tokens * len(
            self.running
        ):
            return False  # look closely, in `_make_room`
        grown = self.pool.grow(request, now_s)
        if self.runtime is not None and not self.dirty:
            self.dirty = self._pressed()
        return grown

    def _make_room(
        self, running: list[Request], held: frozenset[str], now_s: float
    ) -> set[Request]:
        """Blocks for everybody whose next output needs one. Returns who gets none and sits out."""
        stalls: set[Request] = set()
        short = [r for r in running if r.entered and not r.left and r.context >= r.capacity]
        short = [r for r in short if r.request_id not in held and not r.blocked]
        if not short:
            return stalls
        if self._reserves:
            holders = self._in_order([r for r in self.running if r.entered])
            wants = [int(r in short) for r in holders]
            claims = [self._claim(r) for r in holders]
            granted = may_grow(self.pool.free, claims, wants)
            for request, want, go in zip(holders, wants, granted, strict=True):
                if want and not (go and self.pool.grow(request, now_s)):
                    stalls.add(request)
                    self.stalled += 1
            return stalls
        for request in short:
            while not request.gone and request.entered and not self.pool.grow(request, now_s):
                self._preempt(now_s)
        return stalls

    def _preempt(self, now_s: float) -> None:
        """The host's victim: who came last. It computes everything again."""
        victim = next(r for r in reversed(self.running) if r.entered)
        self.preempted += 1
        self.dirty = True
        self.running.remove(victim)
        self.waiting.insert(0, victim)
        self.pool.release(victim, victim.context, now_s)
        victim.prompt = victim.left = victim.context or victim.prompt
        victim.context, victim.entered = 0, False

    def _claim(self, request: Request) -> Claim:
        pool = self.pool
        held = request.capacity // pool.block_tokens
        most = pool.blocks_for(request.prompt + self._most)
        likely = pool.blocks_for(request.prompt + int(self._lengths.share * self._most))
        return Claim(held, max(0, most - held), max(0, likely - held))

    def _may_enter(self, request: Request) -> bool:
        pool = self.pool
        new = self._claim(request)
        claims = [self._claim(r) for r in (*self.running, *self.waiting) if r.entered]
        if sum(c.more for c in claims) + new.more <= pool.free:
            return True
        first = pool.blocks_for(request.prompt + 1)
        alone = not claims and first <= pool.free
        return alone or may_enter(pool.free, claims, new, first)

    def _refused(self, request: Request, now_s: float) -> None:
        """Its prompt does not fit: wait, or fail where it never will."""
        if self.pool.blocks_for(request.prompt + 1) > self.pool.total:
            self._remove(request)
            self.world.fail(request.answer, f"the prompt does not fit the {self.name}'s KV", now_s)

    def end(self, request: Request, kept: int, now_s: float) -> None:
        """``request`` is over; ``kept`` tokens of it stay in the conversation."""
        if request.gone:
            return
        self.cut(now_s)
        self._lengths.learn(request.num_output_tokens, self._most)
        nothing = not self.waiting and self._means_nothing(request, now_s)
        before = self.dirty
        self._remove(request)
        if nothing:
            self.dirty = before
        self._again = False
        if request.entered:
            self.pool.release(request, kept, now_s)
            request.entered = False
        if self.waiting and not self.busy:
            self.step(now_s)


class Thinker(ArEngine):
    """Makes text; its talkers wait for it token by token."""

    pool: CachingPool

    def _until_told(self, batch: list[Request], now_s: float) -> int:
        return min([r.answer.text_wanted - r.num_output_tokens for r in batch])

    def _tokens(self, ends_s: list[float]) -> list[float]:
        pieces = self._pieces
        for request in self._batch:
            if request.left <= pieces.get(request, 0):
                request.answer.text_times_s += ends_s
        return ends_s

    def _untold(self, count: int) -> None:
        dropped = len(self._ends_s) - count
        for request in self._batch:
            if not request.gone:
                request.answer.text_untold(dropped)

    def _made(self, batch: list[Request], now_s: float) -> bool:
        over: list[Request] = []
        short = False
        for request in batch:
            if request.gone:
                short = True
                continue
            request.context += 1
            made = request.num_output_tokens = request.num_output_tokens + 1
            self.tokens += 1
            answer = request.answer
            if made == 1:
                short = True
                answer.first_text(now_s)
            if made >= request.limit:
                over.append(request)
            elif request.context >= request.capacity and not self._grown(request, now_s):
                short = True
            if made >= answer.text_wanted:
                answer.text_is_made(answer.text_wanted)
        for request in over:
            answer = request.answer
            answer.text_over = True
            self.end(request, request.context, now_s)
            answer.thinker_done(now_s)
        return short or bool(over)
