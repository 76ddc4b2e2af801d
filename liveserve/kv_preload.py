"""Preload of sessions' histories: what users do, turned into what `Preloader` decides on.

`KvPreload` hears the events of one engine and is stepped in every round, also in those of an engine
that has nothing else to do: a message wakes it, and what it begins keeps it awake.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

from liveserve.events import Event, EventKind, Prefetch
from liveserve.kvtier.preload import Cause, Loads, Preloader, PreloadLimits
from liveserve.scheduler.views import SessionView

if TYPE_CHECKING:
    from liveserve.kvtier.loads import Load
    from liveserve.kvtier.manager import KvManager

_TRIGGERS = {
    EventKind.SPEECH_STARTED: Cause.SPEECH,
    EventKind.BARGE_IN: Cause.BARGE_IN,
    EventKind.RESUMED: Cause.RESUME,
}


class TierLoads:
    """`liveserve.kvtier.preload.Loads` over the tier's manager.

    Args:
        manager: of this engine.
        gbps: rate of the link, as the workers know it, 1e9 bytes/s.
        block_bytes: bytes of a block on the link.
        room: of ``count`` GPU blocks, how many can be had now without evicting what is expected to
            be needed within ``wait_s``, and without touching what is reserved.
    """

    def __init__(
        self,
        manager: KvManager[Any],
        gbps: float,
        block_bytes: int,
        room: Callable[[int, float], int],
    ) -> None:
        self.block_bytes = block_bytes
        self._manager = manager
        self._bytes_per_s = gbps * 1e9
        self._room = room

    def offloaded(self, session: Hashable, keys: Sequence[Hashable] | None) -> Sequence[Hashable]:
        return self._manager.offloaded(session, keys)

    def spare(self, count: int, wait_s: float, now_s: float) -> int:
        return self._room(count, wait_s)

    def estimate_s(self, num_bytes: int) -> float:
        ahead = self._manager.loading * self.block_bytes
        return (ahead + num_bytes) / self._bytes_per_s

    def preload(self, keys: Sequence[Hashable], session: Hashable) -> Hashable | None:
        return self._manager.preload(keys, session)

    def cancel(self, job: Hashable) -> None:
        self._manager.cancel(cast("Load[Any]", job))

    def promote(self, job: Hashable) -> None:
        self._manager.promote(cast("Load[Any]", job))


class KvPreload:
    """See the module. The engine's thread owns it.

    Args:
        loads: the tier's manager.
        limits: bounds.
        is_on: whether new preloads may begin.
        keys_of: keys of the full blocks of a prompt's token ids.
    """

    def __init__(
        self,
        loads: Loads,
        limits: PreloadLimits,
        is_on: Callable[[], bool],
        keys_of: Callable[[Sequence[int]], Sequence[Hashable]],
    ) -> None:
        self.preloader = Preloader(loads, limits)
        self._is_on = is_on
        self._keys_of = keys_of
        # Sessions whose speech is detected: audio alone says nothing, as silence is sent too.
        self._detected: OrderedDict[str, None] = OrderedDict()
        # Sessions whose turns another replica has taken over: what is here of them is not needed.
        self._moved: OrderedDict[str, None] = OrderedDict()
        # What a block takes on the link that is idle.
        self.block_s = loads.estimate_s(loads.block_bytes) - loads.estimate_s(0)

    def happened(self, event: Event, view: SessionView | None) -> None:
        """``event`` has changed its session's view to ``view``; None: the session is closed."""
        kind, session_id, at_s = event.kind, event.session_id, event.at_s
        preloader = self.preloader
        if view is None or kind is EventKind.MOVED:
            self._detected.pop(session_id, None)
            self._moved.pop(session_id, None)
            preloader.closed(session_id, at_s)
            if view is not None:
                self._moved[session_id] = None
                if len(self._moved) > preloader.limits.max_sessions:
                    self._moved.popitem(last=False)
            return
        if session_id in self._moved:
            return
        cause = _TRIGGERS.get(kind)
        if kind is EventKind.SPEECH_STARTED:
            self._detected[session_id] = None
            if len(self._detected) > preloader.limits.max_sessions:
                self._detected.popitem(last=False)
        elif kind is EventKind.INPUT and session_id not in self._detected:
            # Push to talk: the first audio of a turn is where it begins.
            cause = None if preloader.is_wanted(session_id) else Cause.SPEECH
        elif kind is EventKind.SPEECH_STOPPED:
            preloader.stopped(session_id, at_s)
        elif kind is EventKind.COMMITTED:
            if self._is_on() and not preloader.is_wanted(session_id):
                preloader.wanted(session_id, at_s, Cause.COMMIT)
            preloader.committed(session_id, at_s)
        if cause is not None and self._is_on():
            preloader.wanted(session_id, at_s, cause)

    def load(self, views: Iterable[SessionView], now_s: float) -> None:
        """The complete set of sessions, in place of everything that was known."""
        self.preloader.fail_closed()
        self._detected.clear()
        for view in views:
            if view.speech_active and self._is_on() and view.session_id not in self._moved:
                self._detected[view.session_id] = None
                self.preloader.wanted(view.session_id, now_s, Cause.SPEECH)

    def prefetch(self, asked: Prefetch, now_s: float) -> None:
        """Somebody says what will be needed."""
        if not self._is_on() or asked.session_id in self._moved:
            return
        keys = self._keys_of(asked.token_ids) if asked.token_ids else None
        due_s = now_s + asked.within_s
        self.preloader.wanted(asked.session_id, now_s, Cause.PREFETCH, due_s=due_s, keys=keys)

    def step(self, now_s: float) -> None:
        """Once in a round."""
        if self._is_on():
            self.preloader.step(now_s)
        elif self.preloader.num_wanted:
            self.preloader.fail_closed()

    def arrived(self, session_id: str, now_s: float) -> None:
        """A request of the session is about to look for its history."""
        self._moved.pop(session_id, None)
        self.preloader.arrived(session_id, now_s)

    def ended(self, load: Load[Any], num_loaded: int, now_s: float) -> None:
        """A load is over, preload or not."""
        self.preloader.ended(load, num_loaded, now_s)
