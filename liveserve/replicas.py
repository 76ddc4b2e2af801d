"""What the API process knows of the replicas that serve sessions, and its choice for each turn.

From the engines: their pressure (`PressureSnapshot`), and how much of a session's KV each has when
it was asked last. From the requests: which replica took them, how long their prompts were, and what
was submitted since an engine told of its queue. The choice itself is `scheduler.replicas.choose`.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from liveserve.events import KvSessionRow, PressureSnapshot
from liveserve.scheduler.replicas import ReplicaPolicy, ReplicaView, choose

# An engine that did not answer for so long is busy, and for as long as it did not beyond that; one
# that did not answer for `MAX_AGE_S` may be anything.
QUIET_S = 5.0
MAX_AGE_S = 15.0
# How often an engine is asked for a session's KV while its user speaks.
ASK_EVERY_S = 1.0


@dataclass(slots=True)
class _Held:
    """Tokens of a session's history in one replica."""

    gpu: int = 0
    dram: int = 0


@dataclass(slots=True)
class _Session:
    tokens: int = 0  # of its history
    last: int | None = None
    held: dict[int, _Held] = field(default_factory=dict)  # by replica
    asked_s: float = -math.inf
    newest: str = ""  # its newest request, until that has output


@dataclass(slots=True)
class _Sent:
    """What an engine has to prefill of a request. ``at_s``: when it was sent; infinite: not yet."""

    replica_id: int
    tokens: int
    at_s: float = math.inf


@dataclass(slots=True)
class _Replica:
    snapshot: PressureSnapshot
    asked_s: float  # when it was asked for it: what was sent before is in it
    told_s: float


@dataclass
class ReplicaTotals:
    """Since the start.

    Attributes:
        choices: turns by `Choice.why`.
        moved: turns that another replica took than the one before, whoever chose it.
        prompt_tokens, cached_tokens: of sessions' turns after their first; found in KV.
    """

    choices: Counter[str] = field(default_factory=Counter)
    moved: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0


class ReplicaBook:
    """Sessions and replicas of one stage. Owned by the plane's loop.

    Args:
        max_sessions: the longest silent one is forgotten beyond that.
    """

    def __init__(self, max_sessions: int, policy: ReplicaPolicy | None = None) -> None:
        self.totals = ReplicaTotals()
        self._policy = policy or ReplicaPolicy()
        self._max = max_sessions
        self._sessions: OrderedDict[str, _Session] = OrderedDict()
        self._replicas: dict[int, _Replica] = {}
        self._sent: OrderedDict[str, _Sent] = OrderedDict()  # by request

    # ---- what the engines say --------------------------------------------------------------

    def told(
        self,
        replica_id: int,
        snapshot: PressureSnapshot,
        rows: Iterable[KvSessionRow],
        asked_s: float,
        now_s: float,
    ) -> None:
        """An engine answered what it was asked at ``asked_s``."""
        self._replicas[replica_id] = _Replica(snapshot, asked_s, now_s)
        for request_id in [r for r, sent in self._sent.items() if sent.replica_id == replica_id]:
            if self._sent[request_id].at_s < asked_s:
                del self._sent[request_id]  # it is in the engine's own queue, or done
        block = snapshot.kv.block_tokens if snapshot.kv is not None else 0
        for row in rows:
            session = self._sessions.get(row.session_id)
            if session is not None and block:
                gpu, dram = row.gpu_blocks * block, row.dram_blocks * block
                # Most of what is on the GPU is in DRAM too: only what goes beyond it counts.
                session.held[replica_id] = _Held(gpu, max(0, dram - gpu))

    def keep(self, replica_ids: Iterable[int]) -> None:
        """The replicas that live; what was known of others is forgotten, as is their KV."""
        gone = self._replicas.keys() - set(replica_ids)
        for replica_id in gone:
            del self._replicas[replica_id]
            for session in self._sessions.values():
                session.held.pop(replica_id, None)

    # ---- what sessions do ------------------------------------------------------------------

    def choose(
        self,
        session_id: str,
        request_id: str,
        replica_ids: Iterable[int],
        now_s: float,
        *,
        counted: bool = True,
    ) -> int | None:
        """The replica for a turn among those that are available; None: the host's choice. Not
        ``counted``: a request that is not a turn.
        """
        session = self._session(session_id)
        views = self.views(session_id, replica_ids, now_s)
        choice = choose(views, session.tokens, session.last, self._policy)
        if counted:
            self.totals.choices[choice.why] += 1
        if counted and choice.replica_id is not None:
            held = session.held.get(choice.replica_id, _Held())
            missing = max(1, session.tokens - held.gpu - held.dram)
            self._note(request_id, _Sent(choice.replica_id, missing))
        return choice.replica_id

    def left_to_host(self, why: str) -> None:
        """Nobody was asked about a turn."""
        self.totals.choices[why] += 1

    def submitted(
        self, session_id: str, request_id: str, replica_id: int, tokens: int, now_s: float
    ) -> int | None:
        """A request of ``tokens`` was sent to ``replica_id``. Returns the replica that the session
        leaves with it, if it does.
        """
        session = self._session(session_id)
        left, session.last, session.newest = session.last, replica_id, request_id
        held = session.held.get(replica_id, _Held())
        missing = max(1, tokens - held.gpu - held.dram)
        self._note(request_id, _Sent(replica_id, missing, now_s))
        if left in (None, replica_id):
            return None
        self.totals.moved += 1
        return left

    def answered(
        self, session_id: str, request_id: str, replica_id: int, prompt: int, cached: int, made: int
    ) -> None:
        """A request has output: ``made`` tokens by now, after a prompt of which ``cached`` tokens
        were in KV. Its history is where it runs.
        """
        session = self._sessions.get(session_id)
        self._sent.pop(request_id, None)
        if session is None:
            return
        if session.newest == request_id:
            session.newest = ""
            if session.tokens:
                self.totals.prompt_tokens += prompt
                self.totals.cached_tokens += cached
        session.tokens = prompt + made
        session.held[replica_id] = _Held(session.tokens)

    def sent(self, request_id: str, replica_id: int, tokens: int, now_s: float) -> None:
        """A request without a session was sent."""
        self._note(request_id, _Sent(replica_id, tokens, now_s))

    def ended(self, request_ids: Iterable[str]) -> None:
        """Requests are over, or were never sent."""
        for request_id in request_ids:
            self._sent.pop(request_id, None)

    def closed(self, session_id: str) -> None:
        self._sessions.pop(session_id, None)

    def asks(self, session_id: str, now_s: float, *, at_once: bool) -> bool:
        """Whether the engines are to be asked for the session's KV; not ``at_once``: if that was
        not done just now.
        """
        session = self._sessions.get(session_id)
        if session is None or not (at_once or now_s - session.asked_s >= ASK_EVERY_S):
            return False
        session.asked_s = now_s
        return True

    # ---- what follows ----------------------------------------------------------------------

    def views(self, session_id: str, replica_ids: Iterable[int], now_s: float) -> list[ReplicaView]:
        """The replicas as the session's next turn would find them."""
        session = self._sessions.get(session_id) or _Session()
        replica_ids = list(replica_ids)
        prefill_s = self._prefill_s(replica_ids)
        views = []
        for replica_id in replica_ids:
            held = session.held.get(replica_id, _Held())
            known = self._replicas.get(replica_id)
            token_s = prefill_s.get(replica_id)
            queue_s = load_s = None
            if known is not None and now_s - known.told_s <= MAX_AGE_S and token_s is not None:
                silent_s = now_s - known.told_s - QUIET_S
                queue_s = max(silent_s, self._queue_s(replica_id, known, token_s))
                kv = known.snapshot.kv
                if kv is not None and kv.block_tokens and kv.load_block_s:
                    load_s = kv.load_block_s / kv.block_tokens
            view = ReplicaView(replica_id, queue_s, held.gpu, held.dram, token_s, load_s)
            views.append(view)
        return views

    def report(self, *, on: bool) -> dict[str, object]:
        """For people: totals, and how many sessions each replica served last."""
        totals = self.totals
        homes = Counter(s.last for s in self._sessions.values() if s.last is not None)
        return {
            "on": on,
            "choices": {why: count for why, count in sorted(totals.choices.items())},
            "moved": totals.moved,
            "sessions": {str(replica_id): homes[replica_id] for replica_id in sorted(homes)},
            "prompt_tokens": totals.prompt_tokens,
            "cached_tokens": totals.cached_tokens,
        }

    def _queue_s(self, replica_id: int, known: _Replica, token_s: float) -> float:
        snapshot = known.snapshot
        since = sum(s.tokens for s in self._sent.values() if s.replica_id == replica_id)
        queued_s = (snapshot.queued_tokens + since) * token_s
        # Who waits for memory or for a slot waits longer than for tokens.
        return max(queued_s, snapshot.oldest_wait_s)

    def _prefill_s(self, replica_ids: Iterable[int]) -> Mapping[int, float]:
        """Seconds per token of prefill, by replica: as measured there, else as by the others."""
        measured = {
            replica_id: known.snapshot.prefill_token_us / 1e6
            for replica_id, known in self._replicas.items()
            if known.snapshot.prefill_token_us > 0
        }
        if not measured:
            return {}
        mean = sum(measured.values()) / len(measured)
        return {replica_id: measured.get(replica_id, mean) for replica_id in replica_ids}

    def _session(self, session_id: str) -> _Session:
        session = self._sessions.pop(session_id, None) or _Session()
        self._sessions[session_id] = session  # newest last
        if len(self._sessions) > self._max:
            self._sessions.popitem(last=False)
        return session

    def _note(self, request_id: str, sent: _Sent) -> None:
        self._sent[request_id] = sent
        if len(self._sent) > self._max:
            self._sent.popitem(last=False)
