"""How LiveServe enters the host: a seam is one named place that is checked before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger("vllm.liveserve")


class SeamError(RuntimeError):
    """The host does not look as this seam expects; the message says what is missing."""


def expect(condition: object, what: str) -> None:
    """Raise SeamError naming ``what`` unless ``condition`` holds."""
    if not condition:
        raise SeamError(what)


def install(name: str, seam: Callable[[], None]) -> bool:
    """Run ``seam``; on any failure log one line and leave the host as it was there."""
    try:
        seam()
    except Exception as exc:
        reason = exc if isinstance(exc, SeamError) else f"{type(exc).__name__}: {exc}"
        logger.warning("LiveServe: %s stays stock, the host is not as expected (%s).", name, reason)
        return False
    return True
