"""Servers that are frozen while another is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from liveserve.bench.launch import Server

# A server with one engine: two processes, the second of which is the first one's child.
TREE = (
    "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'while True: pass']);"
    "print(p.pid, flush=True); p.wait()"
)


def state(pid: int) -> str:
    """R, S, T (stopped), ... of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def becomes(condition: Callable[[], bool]) -> bool:
    end_s = time.monotonic() + 10.0
    while not condition() and time.monotonic() < end_s:
        time.sleep(0.02)
    return condition()


@pytest.fixture
def tree():
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    yield Server(process, "", "", Path()), child
    for pid in (child, process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()


def test_a_frozen_server_does_not_run_and_runs_afterwards(tree):
    server, child = tree
    with server.frozen():
        assert becomes(lambda: state(child) == "T" and state(server.process.pid) == "T")
    assert becomes(lambda: state(child) == "R" and state(server.process.pid) == "S")


def test_it_is_thawed_when_who_froze_it_is_killed(tree):
    server, child = tree
    freezer = os.fork()
    if not freezer:
        with server.frozen():
            time.sleep(60.0)
        os._exit(0)
    assert becomes(lambda: state(child) == "T")
    os.kill(freezer, signal.SIGKILL)
    os.waitpid(freezer, 0)
    assert becomes(lambda: state(child) == "R")
