"""Which session a host request belongs to."""

from __future__ import annotations

import base64
import binascii

_PREFIX = "duplex-s."


def session_of(request_id: str) -> str:
    """The duplex session encoded in ``request_id``, else the request id: a session of one turn.

    Duplex ids read ``duplex-s.<base64 session>.e.<epoch>.r.<role>``
    (vllm_omni/engine/duplex/contracts.py); an engine may append a suffix of its own.
    """
    if not request_id.startswith(_PREFIX):
        return request_id
    encoded = request_id[len(_PREFIX) :].partition(".")[0]
    try:
        padded = encoded + "=" * (-len(encoded) % 4)
        return base64.urlsafe_b64decode(padded).decode() or request_id
    except (binascii.Error, ValueError):
        return request_id
