"""Starts and stops a real server for demos, tests and comparisons."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from liveserve.host.cpu.adapt import WARM_CHUNKS_ENV

# Lines of the server's log that a failed start shows.
_LOG_TAIL = 25
_LOWEST_PORT = 10_000
# Environment of servers that are measured: no kernel is compiled while users wait.
WARM = {WARM_CHUNKS_ENV: "1"}


class ServerFailed(RuntimeError):
    """The server did not come up; the message has the end of its log."""


def free_port() -> int:
    """A TCP port on the loopback interface that nobody uses now.

    A server binds it seconds later. The kernel must not give it to an outgoing connection
    meanwhile, so it lies below the ports that it hands out by itself.

    Raises:
        OSError: a hundred ports at random are all in use.
    """
    for _ in range(100):
        port = secrets.randbelow(_handed_out() - _LOWEST_PORT) + _LOWEST_PORT
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {_LOWEST_PORT} to {_handed_out() - 1}")


def _handed_out() -> int:
    """The first port that the kernel hands out by itself."""
    with contextlib.suppress(OSError, ValueError):
        lowest = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
        return max(int(lowest), _LOWEST_PORT + 1000)
    return 32768


def add_server_arguments(
    parser: argparse.ArgumentParser, name: str, model: str = "tiny-model"
) -> None:
    """What a benchmark that starts servers asks for: ``--model-dir`` and ``--logs``."""
    parser.add_argument(
        "--model-dir", type=Path, default=Path(".cache") / model, help="(%(default)s)"
    )
    parser.add_argument("--logs", type=Path, default=Path("out") / name, help="(%(default)s)")


@dataclass
class Server:
    """A running server. ``name`` is its model's served name."""

    process: subprocess.Popen[bytes]
    url: str
    name: str
    log: Path
    began_s: float = field(default_factory=time.monotonic)
    started_in_s: float = 0.0
    known: set[int] = field(default_factory=set)  # its processes when it came up

    def wait_until_up(self, timeout_s: float = 300.0) -> None:
        """Return when it answers.

        Raises:
            ServerFailed: it exited, or has not answered ``timeout_s`` after it was started.
        """
        while not _healthy(self.url):
            what = ""
            if self.process.poll() is not None:
                what = f"exited with code {self.process.returncode}"
            elif time.monotonic() - self.began_s > timeout_s:
                what = f"did not answer within {timeout_s:.0f} s"
            if what:
                raise ServerFailed(f"the server {what}; end of {self.log}:\n{_tail(self.log)}")
            time.sleep(0.25)
        self.started_in_s = time.monotonic() - self.began_s
        self.known.update(self.pids())

    def pids(self) -> list[int]:
        """The API server and every process it started."""
        found, todo = [], [self.process.pid]
        while todo:
            pid = todo.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    todo += map(int, (task / "children").read_text().split())
        return found

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """No process of the server runs until the block ends, or until this process does.

        An idle server polls: each takes a quarter of a core from the one that is measured.
        """
        pids = self.pids()
        thaw = f"read _; kill -s CONT {' '.join(map(str, pids))} 2>/dev/null"
        shell = ["/bin/sh", "-c", thaw]  # a session of its own: Ctrl-C is not for it
        with subprocess.Popen(shell, stdin=subprocess.PIPE, start_new_session=True):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
            yield

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send ``signum`` to the API server alone."""
        self.process.send_signal(signum)


@contextlib.contextmanager
def running_server(
    model: Path,
    log: Path,
    *,
    flags: Sequence[str] = (),
    env: dict[str, str] | None = None,
    serve: Sequence[str] = (sys.executable, "-m", "liveserve.cli", "serve"),
    omni: bool = True,
    wait: bool = True,
) -> Iterator[Server]:
    """A server on a free loopback port until the block ends.

    Args:
        model: checkpoint folder.
        log: file for the server's output; its folder is made.
        flags: further flags of the command.
        env: variables on top of this process's environment.
        serve: the command, up to the model.
        omni: the command serves omni models, whose stages may take long to start.
        wait: return when it answers; else the caller calls `Server.wait_until_up`.

    Raises:
        ServerFailed: it exited, or did not answer in time.
    """
    port = free_port()
    name = "tiny"
    command = [*serve, str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", name]
    if omni:
        command += ["--stage-init-timeout", "600", "--init-timeout", "600"]
    command += flags
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **offline, **(env or {})},
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    server = Server(process, f"http://127.0.0.1:{port}", name, log)
    try:
        if wait:
            server.wait_until_up()
        yield server
    finally:
        _stop(process, server.known | set(server.pids()))


def _end_with_parent() -> None:
    """In the child: end when the process that started it dies, however it dies (Linux)."""
    pr_set_pdeathsig = 1
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def _stop(process: subprocess.Popen[bytes], pids: set[int], patience_s: float = 15.0) -> None:
    """Ask the server to end; after ``patience_s`` end it and what it left behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            # Only what still belongs to the server's own session: a pid may have been reused.
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _tail(log: Path) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])
    return "(no log)"
