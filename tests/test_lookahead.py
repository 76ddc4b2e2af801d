"""How long a round waits for its requests' next inputs. What it brings is measured on the real
pipeline in test_host_identity.py."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from liveserve.host import lookahead
from liveserve.host.lookahead import Lookahead


class Adapter:
    """The chunk adapter's side of the calls; every look at the pending loads may complete one."""

    receives_chunks = True

    def __init__(self, pending: int, arrive: int) -> None:
        self.calls: list[str] = []
        self.left, self.arrive = deque(range(pending)), arrive

    @property
    def _pending_load_reqs(self) -> deque:
        return self.left

    def process_pending_chunks(self, waiting, running, *, scheduler_requests) -> None:
        self.calls.append("process")

    def restore_queues(self, waiting, running, *, scheduler_requests) -> None:
        self.calls.append("restore")


class Host:
    def __init__(self) -> None:
        self.scheduled = 0

    def schedule(self) -> str:
        self.scheduled += 1
        return "round"


class Scheduler(Lookahead, Host):
    waiting = running = requests = ()

    def __init__(self, adapter, *, on=True, asynchronous=False) -> None:
        self.chunk_transfer_adapter = adapter
        self.liveserve = SimpleNamespace(switches=SimpleNamespace(lookahead=on))
        self.scheduler_config = SimpleNamespace(async_scheduling=asynchronous)
        super().__init__()


@pytest.fixture
def sleeps(monkeypatch):
    """A clock that moves only by sleeping; each sleep completes what is about to arrive."""
    state = SimpleNamespace(now_s=0.0, adapter=None)

    def sleep(seconds: float) -> None:
        state.now_s += seconds
        if state.adapter.arrive and state.adapter.left:
            state.adapter.left.popleft()
            state.adapter.arrive -= 1

    clock = SimpleNamespace(monotonic=lambda: state.now_s, sleep=sleep)
    monkeypatch.setattr(lookahead, "time", clock)
    return state


@pytest.mark.parametrize(
    ("pending", "arrive", "waited_s"),
    [
        (0, 0, 0.0),  # nobody waits for input
        (3, 3, 3 * 0.0002),  # all are there: no longer than they need
        (3, 0, 0.001),  # none is: give up soon
        (3, 1, 0.0002 + 0.001),  # one came: the others may
        (99, 99, 0.005),  # a limit for all
    ],
)
def test_waits_for_what_comes_and_not_long_for_what_does_not(sleeps, pending, arrive, waited_s):
    sleeps.adapter = adapter = Adapter(pending, arrive)
    assert Scheduler(adapter).schedule() == "round"
    assert adapter.calls == ["process", "restore"]
    assert sleeps.now_s == pytest.approx(waited_s, abs=0.00021)


@pytest.mark.parametrize("case", [{"on": False}, {"asynchronous": True}])
def test_stays_out_of_the_way(sleeps, case):
    sleeps.adapter = adapter = Adapter(3, 0)
    scheduler = Scheduler(adapter, **case)
    assert scheduler.schedule() == "round"
    assert adapter.calls == []
    assert Scheduler(None).schedule() == "round"  # a stage without a chunk adapter


def test_an_adapter_without_the_expected_parts_stays_stock():
    adapter = SimpleNamespace(receives_chunks=True)  # has none of what is called
    assert Scheduler(adapter).schedule() == "round"
