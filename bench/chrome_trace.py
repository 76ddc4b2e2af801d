"""Timelines in the Trace Event format, which Perfetto and chrome://tracing open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Trace:
    """Spans on named tracks of named groups. Times are seconds of one clock, written in µs from the
    first span's start on."""

    def __init__(self) -> None:
        self._spans: list[tuple[str, str, str, float, float, dict[str, Any]]] = []

    def span(
        self, group: str, track: str, name: str, start_s: float, end_s: float, **args: Any
    ) -> None:
        """Adds a span.

        Raises:
            ValueError: it ends before it starts.
        """
        if end_s < start_s:
            raise ValueError(f"span {name!r} ends before it starts: {start_s} to {end_s}")
        self._spans.append((group, track, name, start_s, end_s, args))

    def events(self) -> list[dict[str, Any]]:
        """Complete events (``ph`` X), behind the names of their processes and threads."""
        first_s = min((span[3] for span in self._spans), default=0.0)
        pids: dict[str, int] = {}
        tids: dict[tuple[str, str], int] = {}
        names: list[dict[str, Any]] = []
        spans: list[dict[str, Any]] = []
        for group, track, name, start_s, end_s, args in self._spans:
            if group not in pids:
                pids[group] = len(pids) + 1
                names.append(_named("process_name", pids[group], 0, group))
            pid = pids[group]
            if (group, track) not in tids:
                tids[group, track] = len(tids) + 1
                names.append(_named("thread_name", pid, tids[group, track], track))
            spans.append(
                {
                    "ph": "X",
                    "name": name,
                    "cat": track,
                    "pid": pid,
                    "tid": tids[group, track],
                    "ts": round(1e6 * (start_s - first_s), 3),
                    "dur": round(1e6 * (end_s - start_s), 3),
                    "args": args,
                }
            )
        return names + spans

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"displayTimeUnit": "ms", "traceEvents": self.events()}
        path.write_text(json.dumps(content, allow_nan=False) + "\n", encoding="utf-8")


def _named(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
