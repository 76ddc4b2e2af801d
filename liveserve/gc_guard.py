"""One long pause of the garbage collector is enough.

A host's API process holds millions of objects that never go away (tokenizers, processors), some of
them built by the first answer, after the host has frozen its heap. A full collection then stops
every session for seconds. After one that was slow, what is alive is moved out of the collector's
sight, as the host does at its start (`freeze_gc_heap` in vllm/utils/gc_utils.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Mapping

logger = logging.getLogger("vllm.liveserve")

_SLOW_S = 0.1


class GcGuard:
    """A callback of `gc`: times full collections and freezes the heap after a slow one."""

    def __init__(self) -> None:
        self._began_s = 0.0
        self._warm = False

    def answered(self) -> None:
        """The first answer is complete: what it took to give one is there to stay."""
        if not self._warm:
            self._warm = True
            gc.freeze()

    def __call__(self, phase: str, info: Mapping[str, int]) -> None:
        if info["generation"] < 2:
            return
        if phase == "start":
            self._began_s = time.monotonic()
            return
        took_s = time.monotonic() - self._began_s
        if took_s > _SLOW_S:
            gc.freeze()
            logger.info(
                "LiveServe: a garbage collection stopped the process for %.2f s; "
                "froze the %d objects that it left",
                took_s,
                gc.get_freeze_count(),
            )


def install() -> GcGuard:
    """The guard of this process."""
    for callback in gc.callbacks:
        if isinstance(callback, GcGuard):
            return callback
    guard = GcGuard()
    gc.callbacks.append(guard)
    return guard
