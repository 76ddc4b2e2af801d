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
from liveserve.scheduler.views import SessionView


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


# Of these only the newest per session counts while they wait in a queue: their values accumulate.
COALESCED = frozenset({EventKind.INPUT, EventKind.AUDIO_ROUTED, EventKind.PLAYBACK})


class Event(msgspec.Struct, frozen=True, array_like=True):
    kind: EventKind
    session_id: str
    at_s: float
    value_s: float = 0.0
    response_id: str = ""
    detail: str = ""


class Batch(msgspec.Struct, array_like=True):
    """Events for one engine.

    Attributes:
        boot_id: names the machine whose monotonic clock ``sent_s`` and the events are on.
        first_seq: sequence number of ``events[0]``; numbers have no gaps within one link.
        views: the complete set of sessions; given when the engine asked to resync, and then it
            replaces everything the engine knows, as of ``first_seq``.
        detail: ask for one row per request and session in the reply.
        switches: which mechanisms are on now; None: as before.
    """

    boot_id: str
    sent_s: float
    first_seq: int
    events: list[Event]
    views: list[SessionView] | None = None
    detail: bool = False
    switches: Switches | None = None


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


class PressureSnapshot(msgspec.Struct):
    """An engine's pressure (paper, Interaction plane). ``*_by_class`` is indexed U0, U1, U2."""

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
    switches: Switches = Switches()
    sessions: int = 0
    events_total: int = 0
    events_lost: int = 0
    errors_total: int = 0


class Reply(msgspec.Struct):
    """``next_seq`` is what the engine expects next; ``resync`` asks for the full set of views."""

    snapshot: PressureSnapshot
    next_seq: int = 0
    resync: bool = False
    requests: list[RequestRow] = msgspec.field(default_factory=list)
    views: list[SessionRow] = msgspec.field(default_factory=list)


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
