"""The interaction plane of one API process: tracker, monitor and metrics, wired together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from liveserve import gc_guard
from liveserve.config import LiveServeConfig, change_switches
from liveserve.events import Event, EventKind, Prefetch, Reply, to_builtins
from liveserve.metrics import Metrics
from liveserve.monitor import EngineKey, Monitor, Send
from liveserve.profile import TurnProfiler, as_json
from liveserve.replicas import ReplicaBook
from liveserve.runtime import session_row
from liveserve.session import SessionTracker

T = TypeVar("T")

logger = logging.getLogger("vllm.liveserve")

# The stage that reads sessions' histories.
THINKER = 0
# The user begins to speak; an answer has been added to the history.
_ASKS = frozenset({EventKind.SPEECH_STARTED, EventKind.RESPONSE_DONE})


_current: InteractionPlane | None = None


class Warming(Protocol):
    """Prefills histories ahead of their turns (`liveserve.host.warmup`)."""

    counts: Counter[str]

    def happened(self, event: Event) -> None: ...

    def want(self, session_id: str) -> None: ...

    async def compute(self, asked: Prefetch) -> bool: ...


def current_plane() -> InteractionPlane | None:
    """The plane of this process, once its orchestrator runs."""
    return _current


class InteractionPlane:
    """Lives on the loop that owns the engine clients; `run` is its background task.

    Args:
        config: LiveServe's configuration.
        engines: the live engines now, with a way to reach each.
    """

    def __init__(
        self, config: LiveServeConfig, engines: Callable[[], dict[EngineKey, Send]]
    ) -> None:
        self.config = config
        self.metrics = Metrics()
        self.tracker = SessionTracker(config, self._publish)
        self.profiler = TurnProfiler(self.now_s)
        self.warmer: Warming | None = None
        self.monitor = Monitor(config, self.tracker.table, engines, self._on_reply)
        self.monitor.profiles = lambda: self.profiler.on
        self.replicas = ReplicaBook(config.max_sessions)
        self._errors = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gc: gc_guard.GcGuard | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Carry events until ``stop`` is set."""
        self._gc = gc_guard.install()
        global _current
        self._loop, _current = asyncio.get_running_loop(), self
        try:
            if self.config.monitor:
                await self.monitor.run(stop)
            else:
                await stop.wait()
        finally:
            _current = None

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run one of this plane's coroutines from another loop (the HTTP server's)."""
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("the interaction plane is not running")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def now_s(self) -> float:
        return time.monotonic()

    def failed(self, where: str) -> None:
        """Count an exception that a hook caught; the first one is logged with its trace."""
        self.metrics.plane_errors.inc()
        self._errors += 1
        if self._errors == 1:
            logger.exception("LiveServe: %s failed; the host goes on (logged once)", where)

    def _publish(self, event: Event) -> None:
        self.metrics.event(event)
        self.profiler.heard(event)
        if self._gc is not None and event.kind is EventKind.RESPONSE_DONE:
            self._gc.answered()
        if self.config.monitor:
            self.monitor.publish(event)
            self._follow(event)
        if self.warmer is not None:
            try:
                self.warmer.happened(event)
            except Exception:
                self.failed("prefill ahead of a turn")

    def _follow(self, event: Event) -> None:
        """Know in time where a session's KV is, if there are several thinkers."""
        kind, session_id = event.kind, event.session_id
        if kind is EventKind.CLOSED:
            self.replicas.closed(session_id)
        elif (
            (kind in _ASKS or kind is EventKind.INPUT)
            and self.monitor.replicas(THINKER) > 1
            and self.replicas.asks(session_id, event.at_s, at_once=kind in _ASKS)
        ):
            self.monitor.ask_kv(THINKER, session_id)

    def _on_reply(self, key: EngineKey, reply: Reply, took_s: float) -> None:
        self.metrics.reply(key, reply.snapshot, took_s)
        if reply.marks:
            self.profiler.marked(reply.snapshot.stage, reply.marks)
        now_s = self.now_s()
        if key[0] == THINKER:
            asked_s = now_s - took_s
            self.replicas.told(key[1], reply.snapshot, reply.kv_sessions, asked_s, now_s)
            self.replicas.keep(replica for stage, replica in self.monitor.links if stage == THINKER)
            self.metrics.replicas(self.replicas.totals)
        self.tracker.expire_turns(now_s)
        self.metrics.sessions(self.tracker.table, self.tracker.totals, now_s)

    # ---- for the endpoints -----------------------------------------------------------------

    async def sessions(self) -> dict[str, object]:
        """Every live session as the API process sees it, and totals since the start."""
        now_s = self.now_s()
        self.tracker.expire_turns(now_s)
        rows = [to_builtins(session_row(view, now_s)) for view in self.tracker.table]
        totals = self.tracker.totals
        return {
            "sessions": rows,
            "totals": {
                "audio_routed_s": totals.routed_s,
                "audio_heard_s": totals.heard_s,
                "audio_wasted_s": totals.wasted_s,
                "barge_ins": totals.barge_ins,
                "responses": totals.responses,
                "false_alarms": totals.false_alarms,
                "stages": {name: asdict(made) for name, made in totals.stages.items()},
                "events": totals.events,
            },
        }

    async def pressure(self, *, detail: bool, timeout_s: float) -> dict[str, object]:
        """Every engine's snapshot; with ``detail`` also its requests and views, asked for now."""
        if not self.config.monitor:
            return {"engines": [], "monitor": "off"}
        fresh = await self.monitor.query(timeout_s) if detail else {}
        engines = []
        for (stage_id, replica_id), link in sorted(self.monitor.links.items()):
            reply = fresh.get((stage_id, replica_id)) or (None if detail else link.reply)
            made = self.tracker.totals.stages.get(reply.snapshot.stage) if reply else None
            engines.append(
                engine_report(stage_id, replica_id, reply, detail=detail)
                | {
                    "age_s": self.now_s() - link.replied_at_s if link.reply else None,
                    "link": to_builtins(link.stats),
                    # of the stage: which of its replicas made what is not told apart
                    "ended": asdict(made) if made else None,
                }
            )
        return {"engines": engines}

    async def kv(self, *, timeout_s: float) -> dict[str, object]:
        """Every engine's KV: totals by tier and sessions with blocks, asked for now."""
        if not self.config.monitor:
            return {"engines": [], "monitor": "off"}
        fresh = await self.monitor.query(timeout_s)
        return {
            "engines": [kv_report(*key, reply) for key, reply in sorted(fresh.items())],
            "replicas": self.replicas.report(on=self.monitor.switches.replicas),
            "warmups": dict(self.warmer.counts) if self.warmer else {},
        }

    async def prefetch(self, asked: Prefetch) -> None:
        """Let the engines load what ``asked`` names, as far as there is time and room.

        Raises:
            KeyError: there is no such session.
            BufferError: too much of it waits for a busy engine already, or there is no engine.
            ValueError: it cannot be computed; says why.
        """
        if not asked.token_ids and self.tracker.table.get(asked.session_id) is None:
            raise KeyError(asked.session_id)
        if not self.monitor.prefetch(asked):
            raise BufferError
        if asked.compute and (self.warmer is None or not await self.warmer.compute(asked)):
            raise ValueError(
                "prefetch: compute needs an omni server with --kv-connector liveserve and the "
                "switch kv_prefill on; without it what is in DRAM is loaded"
            )

    async def profile(self, *, seconds: float, after: int) -> dict[str, object]:
        """Note for ``seconds`` more where turns spend their time; turns above number ``after``."""
        was_on = self.profiler.on
        self.profiler.ask(seconds)
        if not was_on:
            self.monitor.poke()
        turns = [as_json(turn) for turn in self.profiler.turns(after)]
        return {"turns": turns, "newest": self.profiler.newest}

    async def switches(self, changes: bytes | None = None) -> dict[str, object]:
        """Which mechanisms are on; ``changes``, a JSON object of switches, flips some of them.

        Raises:
            ConfigError: an unknown switch, or a value that is not true or false.
        """
        if changes is not None:
            self.monitor.flip(change_switches(self.monitor.switches, changes))
        return to_builtins(self.monitor.switches)


def engine_report(
    stage_id: int, replica_id: int, reply: Reply | None, *, detail: bool
) -> dict[str, object]:
    """One engine's answer as a JSON object; ``answered`` is false if it gave none."""
    report: dict[str, object] = {"stage_id": stage_id, "replica_id": replica_id}
    if reply is None:
        return report | {"answered": False}
    report |= {"answered": True, "snapshot": to_builtins(reply.snapshot)}
    if detail:
        report |= {"requests": to_builtins(reply.requests), "views": to_builtins(reply.views)}
    return report


def kv_report(stage_id: int, replica_id: int, reply: Reply | None) -> dict[str, object]:
    """One engine's KV as a JSON object; ``kv`` is null where no KV outlives its request."""
    report: dict[str, object] = {"stage_id": stage_id, "replica_id": replica_id}
    if reply is None:
        return report | {"answered": False}
    snapshot = reply.snapshot
    return report | {
        "answered": True,
        "stage": snapshot.stage,
        "blocks": snapshot.kv_blocks_total,
        "blocks_used": snapshot.kv_blocks_used,
        "block_bytes": snapshot.kv_block_bytes,
        "unheard_blocks_total": snapshot.unheard_blocks_total,
        "kv": to_builtins(snapshot.kv),
        "sessions": to_builtins(reply.kv_sessions),
    }
