"""The garbage collector's pauses in an API process."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from liveserve import gc_guard


@pytest.fixture(autouse=True)
def frozen(monkeypatch):
    counts: list[int] = []
    monkeypatch.setattr(gc, "freeze", lambda: counts.append(1))
    return counts


def test_freezes_after_a_slow_full_collection_only(monkeypatch, frozen):
    guard, now = gc_guard.GcGuard(), [0.0]
    monkeypatch.setattr(gc_guard.time, "monotonic", lambda: now[0])
    for generation, took_s, times in ((1, 5.0, 0), (2, 0.05, 0), (2, 0.5, 1)):
        guard("start", {"generation": generation})
        now[0] += took_s
        guard("stop", {"generation": generation})
        assert len(frozen) == times


def test_freezes_once_when_the_first_answer_is_complete(frozen):
    guard = gc_guard.GcGuard()
    guard.answered()
    guard.answered()
    assert len(frozen) == 1


def test_a_frozen_heap_is_not_collected_again():
    code = (
        "import gc; from liveserve import gc_guard; guard = gc_guard.install();"
        "assert gc_guard.install() is guard and gc.callbacks.count(guard) == 1;"
        "heap = [[] for _ in range(100_000)]; guard.answered();"
        "assert gc.get_freeze_count() > 100_000; print(len(gc.get_objects(2)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 50_000
