"""Events of live sessions, and the messages that carry them to the stage engines.

One `Batch` goes down per engine and flush over the host's UTILITY channel; the engine's `Reply`
is its `PressureSnapshot`. Both travel as msgpack bytes, so neither side depends on the other's
host types. Times are seconds on the sender's monotonic clock.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec

from liveserve.config import Switches
from liveserve.kvtier.preload import PreloadReport
from liveserve.kvtier.report import TierReport
from liveserve.scheduler.views import SessionView
from liveserve.scheduler.warmup import WarmupReport


class EventKind(IntEnum):
    OPENED = 0  # value_s: playback rate; detail: "duplex", "turn" or "text"
    INPUT = 1  # value_s: seconds of input audio of this turn so far
    SPEECH_STARTED = 2
    SPEECH_STOPPED = 3
    COMMITTED = 4  # the user's turn is complete
    RESPONSE_CREATED = 5  # response_id
    AUDIO_ROUTED = 6  # value_s: seconds of audio routed to the client in this response
    PLAYBACK = 7  # value_s: seconds the client reports as played
    RESPONSE_DONE = 8  # detail: completed, cancelled, failed, incomplete
    BARGE_IN = 9  # value_s: seconds heard when the user interrupted; detail: reason
    RATE = 10  # value_s: new playback rate
    REPLY_GAP = 11  # value_s: predicted gap from playback end to next input
    TEXT_PACE = 12  # value_s: seconds of speech per text token
    CLOSED = 13  # detail: why
    RESUMED = 14  # the client came back on a new connection
    MOVED = 15  # another replica took over: sent to the one that the session left


# Of these only the newest per session counts while they wait in a queue: their values accumulate.
COALESCED = frozenset({EventKind.INPUT, EventKind.AUDIO_ROUTED, EventKind.PLAYBACK})


class Event(msgspec.Struct, frozen=True, array_like=True):
    kind: EventKind
    session_id: str
    at_s: float
    value_s: float = 0.0
    response_id: str = ""
    detail: str = ""


class Prefetch(msgspec.Struct, array_like=True):
    """KV that is to be on the GPU ``within_s`` from when the engine hears of it.

    Attributes:
        session_id: whose history; where ``token_ids`` are given, a name for the prefix.
        token_ids: of a prompt's beginning; empty: the session's history.
        compute: what is in no tier is computed (by the API process: engines have no need of it).
    """

    session_id: str
    within_s: float
    token_ids: list[int] = []
    compute: bool = False


class Batch(msgspec.Struct, array_like=True):
    """Events for one engine.

    Attributes:
        boot_id: names the machine whose monotonic clock ``sent_s`` and the events are on.
        first_seq: sequence number of ``events[0]``; numbers have no gaps within one link.
        views: the complete set of sessions; given when the engine asked to resync, and then it
            replaces everything the engine knows, as of ``first_seq``.
        detail: ask for one row per request and session in the reply.
        switches: which mechanisms are on now; None: as before.
        profile: note when requests get where (`liveserve.profile`), and say so in the replies.
        prefetch: what will be needed soon, as somebody outside says.
        kv_of: sessions whose KV the reply is to tell of.
    """

    boot_id: str
    sent_s: float
    first_seq: int
    events: list[Event]
    views: list[SessionView] | None = None
    detail: bool = False
    switches: Switches | None = None
    profile: bool = False
    prefetch: list[Prefetch] = []
    kv_of: list[str] = []


class StageMarks(msgspec.Struct, array_like=True):
    """When a request first got somewhere in one engine; monotonic seconds, 0: not yet.

    Attributes:
        scheduled_s: it was given compute.
        made_s: the step after which it had its first output was over.
        sent_s: its first codec chunk left for the next stage.
        loading_s, loaded_s: it began to wait for KV from DRAM, and it was there.
        match_s: how long looking for its history took.
    """

    request_id: str
    scheduled_s: float = 0.0
    made_s: float = 0.0
    sent_s: float = 0.0
    loading_s: float = 0.0
    loaded_s: float = 0.0
    match_s: float = 0.0

    def shifted(self, offset_s: float) -> StageMarks:
        """The same on another clock. Durations and what did not happen stay."""

        def moved(at_s: float) -> float:
            return at_s + offset_s if at_s else 0.0

        return StageMarks(
            self.request_id,
            scheduled_s=moved(self.scheduled_s),
            made_s=moved(self.made_s),
            sent_s=moved(self.sent_s),
            loading_s=moved(self.loading_s),
            loaded_s=moved(self.loaded_s),
            match_s=self.match_s,
        )


class RequestRow(msgspec.Struct):
    """One request in one engine, as of its last scheduling round."""

    request_id: str
    session_id: str
    state: str  # "running" or "waiting"
    held: bool
    urgency: str
    buffer_s: float | None
    age_s: float
    produced_s: float
    tokens: int
    kv_blocks: int


class SessionRow(msgspec.Struct):
    """One session in one engine's views."""

    session_id: str
    phase: str
    speech_active: bool
    response_id: str
    clock_source: str
    routed_s: float
    played_s: float
    acked_s: float
    buffer_s: float
    barge_ins: int
    reply_gap_s: float


class KvSessionRow(msgspec.Struct):
    """KV of one session in one engine. Shared blocks count for each session that reads them.

    Attributes:
        needed: its history is read now, or will be at any moment.
        next_use_in_s: seconds until it is expected to be; None: nothing is known.
    """

    session_id: str
    gpu_blocks: int = 0
    dram_blocks: int = 0
    needed: bool = False
    turns: int = 0
    next_use_in_s: float | None = None
    reply_gap_s: float | None = None


class KvSnapshot(msgspec.Struct):
    """An engine's prefix cache and the tier behind it. What is counted counts since the start.

    Attributes:
        policy: who is evicted from the GPU by now: "next-use", "t-lru", "log-only" or "lru".
        configured: what it should be; it differs while switched off, and after a failure.
        cached: contents that can be found, in use or free. ``free``: blocks that nobody uses.
        evicted: blocks that lost their content to somebody else's, by ``policy/reason``.
        prompt_tokens, hit_tokens: of requests that were admitted; hits of either tier.
        regret: evicted from the GPU and there again within ``regret_s``.
        watched, disagreed: of log-only: LRU's victims, and those that next use would have spared.
        errors: failures of the policy, after each of which the host's order took over.
        load_block_s: what loading a block from DRAM takes; 0: not known.
        warmups: prefill ahead of a turn; None where the engine has none.
    """

    policy: str = ""
    configured: str = ""
    block_tokens: int = 0
    cached: int = 0
    free: int = 0
    evicted: dict[str, int] = {}
    prompt_tokens: int = 0
    hit_tokens: int = 0
    regret: int = 0
    regret_s: float = 0.0
    watched: int = 0
    disagreed: int = 0
    errors: int = 0
    signals_stale: bool = False
    signals_stale_total: int = 0
    sessions_known: int = 0
    load_block_s: float = 0.0
    dram: TierReport | None = None
    preload: PreloadReport | None = None
    warmups: WarmupReport | None = None


class PressureSnapshot(msgspec.Struct):
    """An engine's pressure (paper, Interaction plane). ``*_by_class`` is indexed U0, U1, U2.

    Attributes:
        queued_tokens: of prompts, not computed yet.
        oldest_wait_s: how long a waiting request that could run has waited at most.
        prefill_token_us: what a token of prefill takes; 0: not measured yet.
        kv: None where the engine keeps no prefix cache.
    """

    stage_id: int = -1
    stage: str = ""
    attached: bool = False
    stale: bool = False
    waiting_by_class: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0])
    running_by_class: list[int] = msgspec.field(default_factory=lambda: [0, 0, 0])
    held: int = 0
    holds_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_block_bytes: int = 0
    unheard_blocks_total: int = 0
    tokens_per_s: float = 0.0
    tokens_total: int = 0
    step_ms: float = 0.0
    steps_total: int = 0
    round_us: float = 0.0
    link_queue_bytes: int = 0
    link_queue_jobs: int = 0
    queued_tokens: int = 0
    oldest_wait_s: float = 0.0
    prefill_token_us: float = 0.0
    switches: Switches = Switches()
    sessions: int = 0
    events_total: int = 0
    events_lost: int = 0
    errors_total: int = 0
    kv: KvSnapshot | None = None


class Reply(msgspec.Struct):
    """``next_seq`` is what the engine expects next; ``resync`` asks for the full set of views."""

    snapshot: PressureSnapshot
    next_seq: int = 0
    resync: bool = False
    requests: list[RequestRow] = msgspec.field(default_factory=list)
    views: list[SessionRow] = msgspec.field(default_factory=list)
    kv_sessions: list[KvSessionRow] = msgspec.field(default_factory=list)
    marks: list[StageMarks] = msgspec.field(default_factory=list)


_encode = msgspec.msgpack.Encoder().encode
decode_batch = msgspec.msgpack.Decoder(Batch).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode


def encode(message: Batch | Reply) -> bytes:
    """Msgpack bytes of a message."""
    return _encode(message)


def to_builtins(value: Any) -> Any:
    """JSON-ready plain objects of a message or a part of one."""
    return msgspec.to_builtins(value, enc_hook=str)


def boot_id() -> str:
    """Names the machine whose monotonic clock this process reads ("" if that is not known)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
