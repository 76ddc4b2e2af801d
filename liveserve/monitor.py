"""Carries session events from the API process to every stage engine, and pressure back.

One `StageLink` per engine replica. A link has at most one message under way: while an engine is in
a long step, events wait and newer positions replace older ones, so a slow engine costs memory for
each live session and not for each event. A link that overflows, fails or times out starts over by
sending the complete set of views.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from liveserve.config import LiveServeConfig, Switches
from liveserve.events import (
    COALESCED,
    Batch,
    Event,
    Prefetch,
    Reply,
    boot_id,
    decode_reply,
    encode,
)
from liveserve.session import SessionTable

logger = logging.getLogger("vllm.liveserve")

# That wait for a busy engine; more are refused.
MAX_PREFETCHES = 16
# Sessions that one message asks about.
MAX_ASKED = 256
# (stage id, replica id) of an engine.
EngineKey = tuple[int, int]
Send = Callable[[bytes], Awaitable[bytes]]


@dataclass
class LinkStats:
    exchanges: int = 0
    failures: int = 0
    overflows: int = 0
    resyncs: int = 0
    coalesced: int = 0
    last_s: float = 0.0  # duration of the newest exchange


@dataclass
class StageLink:
    """Events on their way to one engine, and the engine's newest answer."""

    key: EngineKey
    send: Send
    capacity: int
    outbox: list[Event] = field(default_factory=list)
    next_seq: int = 0
    resync: bool = True  # an engine that was never told anything knows nothing
    busy: bool = False
    reply: Reply | None = None
    replied_at_s: float = float("-inf")
    tried_at_s: float = float("-inf")
    prefetch: list[Prefetch] = field(default_factory=list)
    kv_of: dict[str, None] = field(default_factory=dict)
    stats: LinkStats = field(default_factory=LinkStats)
    _slots: dict[tuple[int, str, str], int] = field(default_factory=dict)

    def push(self, event: Event) -> None:
        """Queue ``event``; a position report replaces the one that still waits."""
        if self.resync:
            return  # the views that will be sent already contain it
        if event.kind in COALESCED:
            slot = (event.kind, event.session_id, event.response_id)
            index = self._slots.get(slot)
            if index is not None and index >= 0:
                self.outbox[index] = event
                self.stats.coalesced += 1
                return
            # The first one stays: it says when playback began.
            self._slots[slot] = -1 if index is None else len(self.outbox)
        else:
            # Later positions must not move before this event.
            for kind in COALESCED:
                self._slots.pop((kind, event.session_id, event.response_id), None)
        if len(self.outbox) >= self.capacity:
            self.stats.overflows += 1
            self.start_over()
            return
        self.outbox.append(event)

    def start_over(self) -> None:
        self.outbox.clear()
        self._slots.clear()
        self.resync = True

    def batch(self, table: SessionTable, boot: str, now_s: float, detail: bool) -> Batch:
        """Everything that waits, as one message; the link then counts it as sent."""
        events, views = self.outbox, None
        if self.resync:
            events, views, self.resync = [], list(table), False
            self.stats.resyncs += 1
        self.outbox = []
        self._slots.clear()
        batch = Batch(boot, now_s, self.next_seq, events, views, detail, prefetch=self.prefetch)
        batch.kv_of = list(self.kv_of)
        self.kv_of.clear()
        self.prefetch = []
        self.next_seq += len(events)
        return batch


class Monitor:
    """Owns the links. Runs on the loop that owns the engine clients.

    Args:
        config: intervals and bounds.
        table: the views to resync from; the tracker keeps them current.
        engines: the live engines now, with a way to reach each.
        on_reply: called with each engine's answer and how long it took in seconds.
    """

    def __init__(
        self,
        config: LiveServeConfig,
        table: SessionTable,
        engines: Callable[[], dict[EngineKey, Send]],
        on_reply: Callable[[EngineKey, Reply, float], None] = lambda *_: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.links: dict[EngineKey, StageLink] = {}
        self._config = config
        self._table = table
        self._engines = engines
        self._on_reply = on_reply
        self._clock = clock
        self._boot = boot_id()
        self.switches = config.switches
        self.profiles: Callable[[], bool] = lambda: False  # whether engines are to
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def publish(self, event: Event) -> None:
        """Queue ``event`` for every engine."""
        for link in self.links.values():
            link.push(event)
        self._wake.set()

    def tell(self, key: EngineKey, event: Event) -> None:
        """Queue ``event`` for one engine."""
        link = self.links.get(key)
        if link is not None:
            link.push(event)
            self._wake.set()

    def replicas(self, stage_id: int) -> int:
        """Engines of a stage."""
        return sum(stage == stage_id for stage, _ in self.links)

    def ask_kv(self, stage_id: int, session_id: str) -> None:
        """Let the next answers of a stage's engines tell of a session's KV."""
        for (stage, _), link in self.links.items():
            if stage == stage_id and len(link.kv_of) < MAX_ASKED:
                link.kv_of[session_id] = None

    def flip(self, switches: Switches) -> None:
        """Tell every engine which mechanisms are on from now."""
        self.switches = switches
        self.poke()

    def poke(self) -> None:
        """Let every engine hear from us now."""
        for link in self.links.values():
            link.tried_at_s = float("-inf")
        self._wake.set()

    def prefetch(self, asked: Prefetch) -> bool:
        """Tell every engine. Returns whether: not while too much of it waits to be told."""
        self._refresh_links()
        if any(len(link.prefetch) >= MAX_PREFETCHES for link in self.links.values()):
            return False
        for link in self.links.values():
            link.prefetch.append(asked)
        self.poke()
        return bool(self.links)

    async def run(self, stop: asyncio.Event) -> None:
        """Flush and ask for pressure until ``stop`` is set. Never raises but on cancellation."""
        try:
            while not stop.is_set():
                try:
                    await asyncio.wait_for(self._wake.wait(), self._config.heartbeat_ms / 1e3)
                    self._wake.clear()
                    await asyncio.sleep(self._config.flush_interval_ms / 1e3)
                except (TimeoutError, asyncio.TimeoutError):
                    pass
                try:
                    self._flush()
                except Exception:
                    logger.exception("LiveServe: flush failed; engines fail closed meanwhile")
        finally:
            for task in tuple(self._tasks):
                task.cancel()

    def _refresh_links(self) -> None:
        live = self._engines()
        for key in self.links.keys() - live.keys():
            del self.links[key]
        for key in live.keys() - self.links.keys():
            self.links[key] = StageLink(key, live[key], self._config.outbox_capacity)

    def _flush(self) -> None:
        self._refresh_links()
        now_s = self._clock()
        for link in self.links.values():
            # 0.9: the loop's timer may fire a little before the interval is over.
            due = now_s - link.tried_at_s >= 0.9 * self._config.heartbeat_ms / 1e3
            if not link.busy and (link.outbox or due):
                task = asyncio.ensure_future(self._exchange_quietly(link))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _exchange_quietly(self, link: StageLink) -> None:
        try:
            await self._exchange(link, detail=False)
        except Exception as exc:
            level = logging.WARNING if link.stats.failures == 1 else logging.DEBUG
            logger.log(level, "LiveServe: stage %s replica %s: %s", *link.key, exc)

    async def _exchange(self, link: StageLink, *, detail: bool) -> Reply:
        link.busy = True
        started_s = link.tried_at_s = self._clock()
        try:
            batch = link.batch(self._table, self._boot, started_s, detail)
            batch.switches, batch.profile = self.switches, self.profiles()
            payload = encode(batch)
            raw = await asyncio.wait_for(link.send(payload), self._config.exchange_timeout_s)
            reply = decode_reply(raw)
        except Exception as exc:
            # It is unknown whether the engine applied the batch.
            link.stats.failures += 1
            link.start_over()
            if isinstance(exc, TimeoutError | asyncio.TimeoutError):
                raise TimeoutError(
                    f"no answer within {self._config.exchange_timeout_s} s"
                ) from None
            raise
        finally:
            link.busy = False
            if link.outbox:
                self._wake.set()
        link.reply, link.replied_at_s = reply, self._clock()
        link.stats.exchanges += 1
        link.stats.last_s = link.replied_at_s - started_s
        if reply.resync:
            link.start_over()
            self._wake.set()
        self._on_reply(link.key, reply, link.stats.last_s)
        return reply

    async def query(self, timeout_s: float) -> dict[EngineKey, Reply | None]:
        """Ask every engine for its requests and views now; None for one that does not answer."""
        self._refresh_links()

        async def ask(link: StageLink) -> Reply | None:
            deadline_s = self._clock() + timeout_s
            while link.busy and self._clock() < deadline_s:
                await asyncio.sleep(0.002)
            if link.busy:
                return None
            try:
                return await asyncio.wait_for(self._exchange(link, detail=True), timeout_s)
            except Exception as exc:
                logger.debug("LiveServe: stage %s replica %s: %s", *link.key, exc)
                return None

        links = list(self.links.values())
        replies = await asyncio.gather(*(ask(link) for link in links))
        return {link.key: reply for link, reply in zip(links, replies, strict=True)}
