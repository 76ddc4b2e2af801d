"""What a round finds of its requests' next inputs: in shared memory, with the host's adapter; how
long it waits for an adapter that reads from elsewhere. What it brings is measured on the real
pipeline in test_host_identity.py."""

from __future__ import annotations

import threading
import uuid
from collections import deque
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")
from vllm.v1.request import RequestStatus
from vllm_omni.distributed.omni_connectors.transfer_adapter.chunk_transfer_adapter import (
    OmniChunkTransferAdapter,
)

from liveserve.host import lookahead
from liveserve.host.lookahead import Lookahead


class Adapter:
    """The chunk adapter's side of the calls; every look at the pending loads may complete one."""

    receives_chunks = True
    connector = None
    _registered_load_entries = _poll_single_request = None

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


class Talker:
    """The host's adapter of stage 1 over shared memory, two requests of which run."""

    def __init__(self) -> None:
        model = SimpleNamespace(
            stage_id=1, max_num_seqs=4, max_model_len=64, worker_type="ar", async_chunk=True
        )
        self.adapter = OmniChunkTransferAdapter(
            SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=4))
        )
        self.scheduler = Scheduler(self.adapter)
        self.scheduler.waiting = deque()
        self.scheduler.running = [
            SimpleNamespace(
                request_id=f"{name}-{uuid.uuid4().hex}",
                status=RequestStatus.RUNNING,
                additional_information=None,
                resumable=False,
            )
            for name in "ab"
        ]
        for request in self.scheduler.running:
            request.external_req_id = f"ext-{request.request_id}"
        self.scheduler.requests = {r.request_id: r for r in self.scheduler.running}

    def arrive(self, index: int, chunk: int) -> None:
        """The thinker's ``chunk`` of a request."""
        key = f"{self.scheduler.running[index].external_req_id}_0_{chunk}"
        ok, _, _ = self.adapter.connector.put("0", "1", key, {"meta": {"finished": False}})
        assert ok

    def ready(self) -> set[str]:
        """Who can run in the round that is scheduled now: a and b, in short."""
        self.scheduler.schedule()
        running = self.scheduler.running
        self.adapter.process_pending_chunks(
            self.scheduler.waiting, running, scheduler_requests=self.scheduler.requests
        )
        found = {request.request_id[0] for request in running}
        self.adapter.restore_queues(
            self.scheduler.waiting, running, scheduler_requests=self.scheduler.requests
        )
        running.sort(key=lambda request: request.request_id)
        return found

    def ran(self) -> None:
        """What was ready has run."""
        self.adapter.requests_with_ready_chunks.clear()


@pytest.fixture
def talker():
    talker = Talker()
    yield talker
    talker.adapter.shutdown()


def test_a_round_finds_the_chunks_that_are_there_though_the_adapters_thread_does_not_run(talker):
    with talker.adapter._recv_cond:  # its thread waits in this between its passes
        talker.arrive(0, 0)
        assert talker.ready() == {"a"}
        talker.ran()
        talker.arrive(0, 1)
        talker.arrive(1, 0)
        assert talker.ready() == {"a", "b"}
        talker.ran()
        assert talker.ready() == set()


def test_a_chunk_is_taken_once_by_whichever_thread_comes_first(talker, caplog):
    pauses = threading.Event()
    for chunk in range(200):
        talker.arrive(0, chunk)
        assert talker.ready() == {"a"}
        assert talker.adapter.get_req_chunk[talker.scheduler.running[0].request_id] == chunk + 1
        talker.ran()
        pauses.wait(0.0005 * (chunk % 4))  # the adapter's thread is looking for what is not there
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
