"""What turns waited for their offloaded history, and how many found it on the GPU already.

Two sources, both of the running server: the profile of every turn (`liveserve.profile`), whose part
``load`` is the time that a request waited for its history from DRAM, and the tier's counts of what
requests found (`liveserve.kvtier.preload.PreloadReport`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from liveserve.bench.metrics import percentiles
from liveserve.bench.profile import watch
from liveserve.bench.sessions import SessionsConfig, SessionsReport, run_sessions

# An engine's marks of the last turn, and the next question for them, come within this.
_LAST_MARKS_S = 4.0


async def run_watched(case: SessionsConfig) -> tuple[SessionsReport, list[dict[str, Any]]]:
    """Run ``case``. Returns its report, and every turn as the server's profile has it.

    Raises:
        ServerUnreachable: nothing answers, or it is no LiveServe server.
    """
    turns: list[dict[str, Any]] = []
    watching = asyncio.create_task(watch(case.url, math.inf, None, turns.extend))
    try:
        report = await run_sessions(case)
        await asyncio.wait([watching], timeout=_LAST_MARKS_S)
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
    return report, turns


def preload_metrics(
    turns: Sequence[Mapping[str, Any]], found: Mapping[str, Any], slow_motion: float
) -> dict[str, Any]:
    """Figures over the turns whose history was offloaded: it was in DRAM alone when the user began
    to speak or, where nothing is preloaded, when the request came. Milliseconds of the listener.

    A turn that waited is one of them, and so is one that the tier counts by how its request found
    its history: all there (``hits``, and there is nothing to wait for), on its way, or still in
    DRAM. So the turns that did not wait are known by number, though not by name.

    Args:
        turns: of the profile, in seconds; a session's first has no history.
        found: the tier's ``hits``, ``late`` and ``short``, all of them of ``turns``.
        slow_motion: K.
    """
    all_ms = [1e3 * turn["parts"]["load"] / slow_motion for turn in later_turns(turns)]
    waited_ms = sorted(load_ms for load_ms in all_ms if load_ms > 0)
    resident = found.get("hits", 0)
    others = max(len(waited_ms), found.get("late", 0) + found.get("short", 0))
    offloaded = resident + others
    loads_ms = [0.0] * (offloaded - len(waited_ms)) + waited_ms
    return {
        "later_turns_profiled": len(all_ms),
        "turns_offloaded": offloaded,
        "turns_resident": resident,
        "turns_waited": len(waited_ms),
        "resident_fraction": resident / offloaded if offloaded else None,
        **percentiles("onpath_reload", loads_ms, "_ms"),
        "onpath_reloads_ms": loads_ms,
    }


def later_turns(turns: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those with a history, as far as they could be split into their parts."""
    seen: set[str] = set()
    later = []
    for turn in sorted(turns, key=lambda turn: turn["speech_end_s"]):
        if turn["session_id"] in seen and "load" in turn["parts"]:
            later.append(turn)
        seen.add(turn["session_id"])
    return later
