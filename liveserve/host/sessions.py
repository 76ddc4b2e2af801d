"""Which session a host request belongs to."""

from __future__ import annotations

import base64
import binascii

_PREFIX = "duplex-s."
# Our own requests, which prefill a session's history ahead of its turn (`liveserve.host.warmup`).
_WARMUP = "liveserve-warmup."


def warmup_id(session_id: str, number: int) -> str:
    """The id of a session's warm-up; ``number`` tells those of one process apart."""
    encoded = base64.urlsafe_b64encode(session_id.encode()).decode().rstrip("=")
    return f"{_WARMUP}{encoded}.{number}"


def is_warmup(request_id: str) -> bool:
    """Whether a request is a warm-up: nobody waits for what it makes."""
    return request_id.startswith(_WARMUP)


def session_of(request_id: str) -> str:
    """The session encoded in ``request_id``, else the request id: a session of one turn.

    Duplex ids read ``duplex-s.<base64 session>.e.<epoch>.r.<role>``
    (vllm_omni/engine/duplex/contracts.py); an engine may append a suffix of its own.
    """
    prefix = _PREFIX if request_id.startswith(_PREFIX) else _WARMUP
    if not request_id.startswith(prefix):
        return request_id
    encoded = request_id[len(prefix) :].partition(".")[0]
    try:
        padded = encoded + "=" * (-len(encoded) % 4)
        return base64.urlsafe_b64decode(padded).decode() or request_id
    except (binascii.Error, ValueError):
        return request_id
