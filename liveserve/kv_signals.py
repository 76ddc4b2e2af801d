"""What sessions do, as next-use times of their KV; and all that an engine knows of its KV.

`KvSignals` turns the events of an engine into `NextUse`: speech, a barge-in or a committed turn
means that a history is needed now; an answer that plays means that it is needed a reply gap after
its end. When views cannot be trusted it lets go of everything, and the policies that follow it go
back to LRU until the full set of views has come.

`KvStage` is the runtime's handle (`StageRuntime.kv`): the GPU's side and, once the connector has
set it, the DRAM tier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from liveserve.events import Event, EventKind, KvSessionRow, KvSnapshot
from liveserve.kvtier.next_use import NextUse
from liveserve.kvtier.report import TierReport
from liveserve.scheduler.views import Phase, SessionView
from liveserve.scheduler.warmup import WarmupReport

if TYPE_CHECKING:
    from liveserve.kv_preload import KvPreload

logger = logging.getLogger("vllm.liveserve")

# Sessions that end so may well go on under another id: their histories are left to recency.
_NOT_OVER = frozenset({"finished", "forgotten", "aborted"})
# A snapshot is as good as new for so long; the API process may ask a hundred times a second.
_SNAPSHOT_S = 0.2
# A playback end that moved by less than this is the same.
_SAME_S = 0.1
_NEEDED = frozenset({EventKind.SPEECH_STARTED, EventKind.COMMITTED, EventKind.RESPONSE_CREATED})
_PROGRESS = frozenset({EventKind.AUDIO_ROUTED, EventKind.PLAYBACK, EventKind.RATE})


class KvSignals:
    """Feeds one `NextUse` with the events of one engine. Its thread owns it.

    Args:
        max_sessions: the longest silent one is forgotten beyond that.
    """

    def __init__(self, max_sessions: int) -> None:
        self.next_use = NextUse(max_sessions)
        self.stale = False
        self.stale_total = 0
        self._max = max_sessions
        self._followers: list[Callable[[], None]] = []
        # Sessions whose user has spoken since their newest response was created: what still plays
        # of it does not say that they wait.
        self._spoke: dict[str, None] = {}

    def follow(self, fail_closed: Callable[[], None]) -> None:
        """Call ``fail_closed`` whenever nothing that was said here can be trusted any more."""
        self._followers.append(fail_closed)

    def trust(self, trusted: bool) -> None:
        """Whether the engine's views are right now; called before the events of a round."""
        if not trusted and not self.stale:
            self.stale = True
            self.stale_total += 1
            self._let_go()

    def load(self, views: Iterable[SessionView], now_s: float) -> None:
        """The complete set of sessions, in place of everything that was known."""
        if not self.stale and len(self.next_use):
            self._let_go()
        self.stale = False
        for view in sorted(views, key=lambda view: view.last_event_s):
            phase, clock = view.phase_at(now_s), view.clock
            answered = clock.started or clock.complete
            if view.speech_active or not (phase is Phase.IDLE or answered):
                self.next_use.needed(view.session_id, now_s)
            elif answered:
                self._waits(view, now_s)

    def happened(self, event: Event, view: SessionView | None) -> None:
        """``event`` has changed its session's view to ``view``; None: the session is closed."""
        if self.stale:
            return
        kind, session_id, now_s = event.kind, event.session_id, event.at_s
        if view is None:
            self._spoke.pop(session_id, None)
            if event.detail in _NOT_OVER:
                self.next_use.lost(session_id)
            else:
                self.next_use.close(session_id, now_s)
        elif kind is EventKind.MOVED:
            # Its turns go on elsewhere: nobody will read this again.
            self._spoke.pop(session_id, None)
            self.next_use.close(session_id, now_s)
        elif kind in _NEEDED or kind is EventKind.BARGE_IN:
            if kind is EventKind.RESPONSE_CREATED:
                self._spoke.pop(session_id, None)
            else:
                self._spoke[session_id] = None
                if len(self._spoke) > self._max:
                    del self._spoke[next(iter(self._spoke))]
            self.next_use.needed(session_id, now_s)
        elif view.speech_active or session_id in self._spoke:
            return
        elif event.response_id and event.response_id != view.response_id:
            return  # about an answer that nobody waits for
        elif kind is EventKind.RESPONSE_DONE:
            self._waits(view, now_s, cut=event.detail != "completed")
        elif kind in _PROGRESS and view.clock.started:
            self._waits(view, now_s)

    def _let_go(self) -> None:
        for fail_closed in self._followers:
            fail_closed()
        self.next_use.clear()
        self._spoke.clear()

    def _waits(self, view: SessionView, now_s: float, *, cut: bool = False) -> None:
        """The answer plays, or is over. ``cut``: it ends here, whatever was routed."""
        clock, known = view.clock, self.next_use.get(view.session_id)
        ends_s = clock.ends_at_s() if clock.started and not cut else now_s
        if clock.paused:
            ends_s = max(ends_s, now_s + clock.buffer_s(now_s))
        if known is not None and not known.needed and not cut:
            if known.since_s <= now_s and ends_s <= now_s + _SAME_S:
                return  # it was over before: a late ack is no news
            same_end = abs(known.since_s - max(ends_s, now_s)) < _SAME_S
            if same_end and known.gap_s == view.reply_gap_s:
                return
        self.next_use.waiting(view.session_id, ends_s, view.reply_gap_s, now_s)


class GpuCache(Protocol):
    """The engine's prefix cache and who goes first in it (`liveserve.host.block_pool`)."""

    def used(self, session: str, blocks: Sequence[int]) -> None:
        """``session`` reads ``blocks``, first one first; they are in use and have hashes."""
        ...

    def upcoming(self, count: int) -> list[int]:
        """At most ``count`` blocks that would lose their content next, in order."""
        ...

    def spare(self, count: int, wait_s: float) -> int:
        """Of ``count`` blocks, how many can be taken now without evicting what is expected to be
        needed within ``wait_s``."""
        ...

    def switch(self, on: bool) -> None:
        """Whether the policy decides, or the host's order."""
        ...

    def fill(self, snapshot: KvSnapshot) -> None:
        """Enter what is known of the GPU."""
        ...

    def blocks_of(self, session: str) -> int:
        """Blocks with content of one session."""
        ...

    def sessions(self, limit: int) -> dict[str, int]:
        """Blocks with content by session, of the ``limit`` newest."""
        ...


class DramTier(Protocol):
    """The scheduler's half of the connector, as far as it tells of itself."""

    def report(self) -> TierReport: ...

    def sessions(self) -> dict[str, int]:
        """Blocks in DRAM by session, of the newest sessions."""
        ...


@dataclass(slots=True)
class KvStage:
    """KV of one engine: `StageRuntime.kv`.

    Attributes:
        on_void: told of the hash keys of what nobody will read again, before those hashes leave
            the prefix cache.
        tier: set by the connector.
        preload: likewise.
        warmups: what they did; None where there are none. Set by `liveserve.host.warmup_round`.
    """

    signals: KvSignals
    gpu: GpuCache
    now_s: Callable[[], float]
    tier: DramTier | None = None
    preload: KvPreload | None = None
    warmups: Callable[[], WarmupReport] | None = None
    on_void: list[Callable[[list[bytes]], None]] = field(default_factory=list)
    _made: tuple[float, KvSnapshot] | None = field(default=None, repr=False)

    @property
    def next_use(self) -> NextUse:
        return self.signals.next_use

    def follow(self, policy: Any) -> None:
        """Let ``policy`` of another tier fail closed with the signals."""
        fail_closed = getattr(getattr(policy, "shadow", policy), "fail_closed", None)
        if fail_closed is not None:
            self.signals.follow(fail_closed)

    def void(self, keys: list[bytes]) -> None:
        """Nobody will read ``keys`` again: an unheard suffix."""
        for told in self.on_void:
            try:
                told(keys)
            except Exception:
                logger.exception("LiveServe: the KV tier keeps what nobody will read")

    def snapshot(self, *, fresh: bool = True) -> KvSnapshot:
        """Totals; not ``fresh``: they may be a moment old."""
        now_s = self.now_s()
        if not fresh and self._made is not None and now_s - self._made[0] < _SNAPSHOT_S:
            return self._made[1]
        snapshot = KvSnapshot(
            signals_stale=self.signals.stale,
            signals_stale_total=self.signals.stale_total,
            sessions_known=len(self.next_use),
        )
        self.gpu.fill(snapshot)
        if self.tier is not None:
            snapshot.dram = self.tier.report()
        if self.preload is not None:
            snapshot.preload = self.preload.preloader.report()
            snapshot.load_block_s = self.preload.block_s
        if self.warmups is not None:
            snapshot.warmups = self.warmups()
        self._made = now_s, snapshot
        return snapshot

    def session_rows(self, limit: int) -> list[KvSessionRow]:
        """Sessions that have blocks, most blocks first, ``limit`` at most."""
        gpu = self.gpu.sessions(limit)
        dram = self.tier.sessions() if self.tier is not None else {}
        now_s = self.now_s()
        rows = [
            self._row(session, gpu.get(session, 0), dram.get(session, 0), now_s)
            for session in gpu.keys() | dram.keys()
        ]
        rows.sort(key=lambda row: (-row.gpu_blocks - row.dram_blocks, row.session_id))
        return rows[:limit]

    def rows_of(self, sessions: Iterable[str]) -> list[KvSessionRow]:
        """The rows of ``sessions``, also of those that have no blocks."""
        dram = self.tier.sessions() if self.tier is not None else {}
        now_s = self.now_s()
        return [self._row(s, self.gpu.blocks_of(s), dram.get(s, 0), now_s) for s in sessions]

    def _row(self, session: Hashable, gpu: int, dram: int, now_s: float) -> KvSessionRow:
        known = self.next_use.get(session)
        row = KvSessionRow(str(session), gpu, dram)
        if known is not None:
            row.needed, row.turns = known.needed, known.turns
            row.next_use_in_s = known.next_use_s - now_s
            row.reply_gap_s = known.gap_s
        return row
