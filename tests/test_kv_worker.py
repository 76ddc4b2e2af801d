"""The worker's half of the KV tier, on tensors laid out as hosts lay them out."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
import torch

from liveserve.kvtier.jobs import Ended, Job, Orders, merge
from liveserve.kvtier.pool import PoolError
from liveserve.kvtier.transfer_base import Kind
from liveserve.kvtier.worker import KvWorker, compute_so_far, describe, slots_for

BLOCKS = 6


def lbhnc() -> list[torch.Tensor]:
    """vLLM's CPU attention: layers one behind the other; two here."""
    memory = torch.randint(0, 1 << 15, (2, BLOCKS, 2, 8, 32), dtype=torch.int16)
    return list(memory)


def blhnc() -> list[torch.Tensor]:
    """FlashAttention under "BLHNC": all layers of a block together."""
    memory = torch.randint(0, 1 << 15, (BLOCKS, 2, 2, 8, 32), dtype=torch.int16)
    return [memory[:, layer] for layer in range(2)]


def kv_apart() -> list[torch.Tensor]:
    """[2, B, …]: K and V one behind the other."""
    return [torch.randint(0, 1 << 15, (2, BLOCKS, 8, 2, 16), dtype=torch.int16) for _ in range(2)]


def kernel_blocks() -> list[torch.Tensor]:
    """An attention backend whose blocks are half as long as the KV manager's."""
    return [torch.randint(0, 1 << 15, (2 * BLOCKS, 2, 4, 32), dtype=torch.int16) for _ in range(2)]


LAYOUTS = {
    "LBHNC": (lbhnc, lambda t, b: t[b]),
    "BLHNC": (blhnc, lambda t, b: t[b]),
    "K, V": (kv_apart, lambda t, b: t[:, b]),
    "kernel blocks": (kernel_blocks, lambda t, b: t[2 * b : 2 * b + 2]),
}


def worker_over(layers: Sequence[torch.Tensor], **more: object) -> KvWorker:
    named = {f"layer{i}": tensor for i, tensor in enumerate(layers)}
    return KvWorker(describe(named, BLOCKS), 4, **({"checksums": True} | more))


def run(worker: KvWorker, *jobs: Job) -> list[Ended]:
    worker.begin(jobs)
    return wait(worker, len(jobs))


def wait(worker: KvWorker, count: int) -> list[Ended]:
    ended: list[Ended] = []
    deadline_s = time.monotonic() + 10.0
    while len(ended) < count:
        assert time.monotonic() < deadline_s, "jobs do not end"
        ended += worker.poll()
        time.sleep(0.0005)
    return ended


class Rows:
    """A companion that notes what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.fails = fails

    def save(self, block_ids: Sequence[int], slot_ids: Sequence[int]) -> None:
        self._tell("save", block_ids, slot_ids)

    def restore(self, slot_ids: Sequence[int], block_ids: Sequence[int]) -> None:
        self._tell("restore", block_ids, slot_ids)

    def _tell(self, what: str, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self.told.append((what, tuple(blocks), tuple(slots)))
        if self.fails:
            raise RuntimeError("rows are absent")


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_as_they_were_and_elsewhere(name):
    make, block_of = LAYOUTS[name]
    layers = make()
    before = [tensor.clone() for tensor in layers]
    worker = worker_over(layers)
    assert run(worker, Job(1, Kind.STORE, (1, 4), (3, 0))) == [Ended(1, True)]
    for tensor in layers:
        tensor.zero_()
    assert run(worker, Job(2, Kind.ON_PATH, (2, 5), (3, 0))) == [Ended(2, True)]
    for old, new in zip(before, layers, strict=True):
        assert torch.equal(block_of(new, 2), block_of(old, 1))
        assert torch.equal(block_of(new, 5), block_of(old, 4))
        assert not block_of(new, 1).any()
    assert worker.num_moving == 0
    worker.close()
    worker.close()


def test_a_block_of_blhnc_is_one_piece():
    assert len(describe({"a": blhnc()[0], "b": blhnc()[0]}, BLOCKS).fragments()) == 2
    together = blhnc()
    assert len(describe({"a": together[0], "b": together[1]}, BLOCKS).fragments()) == 1


def test_layers_that_share_a_tensor_are_copied_once():
    layer = lbhnc()[0]
    assert describe({"a": layer, "b": layer}, BLOCKS).num_layers == 1


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        ({}, "no layers"),
        ({"a": torch.zeros(BLOCKS + 1, 4)}, "counts the 6 blocks"),
        ({"a": [torch.zeros(BLOCKS, 4)]}, "layer a has no tensor"),
        ({"a": torch.zeros(BLOCKS, 128, 128)[:, :, ::2]}, "not contiguous"),
    ],
)
def test_what_is_no_cache_of_blocks_is_refused(layers, what):
    with pytest.raises(ValueError, match=what):
        describe(layers, BLOCKS)


def test_a_corrupt_slot_is_named_and_the_job_fails():
    worker = worker_over(lbhnc())
    run(worker, Job(1, Kind.STORE, (0, 1, 2), (0, 1, 2)))
    worker.pool.data[1, 5] ^= 1
    (ended,) = run(worker, Job(2, Kind.ON_PATH, (3, 4, 5), (0, 1, 2)))
    assert (ended.ok, ended.corrupt) == (False, (1,))
    assert "slot 1" in ended.error
    worker.close()


def test_companions_follow_the_kv():
    rows = Rows()
    worker = worker_over(lbhnc(), companion=rows)
    run(worker, Job(1, Kind.STORE, (1, 4), (3, 0)))
    run(worker, Job(2, Kind.PRELOAD, (5,), (3,)))
    assert rows.told == [("save", (1, 4), (3, 0)), ("restore", (5,), (3,))]
    worker.close()


@pytest.mark.parametrize("kind", [Kind.STORE, Kind.ON_PATH])
def test_a_job_whose_companions_fail_fails_as_a_whole(kind):
    worker = worker_over(lbhnc(), companion=Rows(fails=True))
    (ended,) = run(worker, Job(1, kind, (1,), (3,)))
    assert (ended.ok, ended.corrupt, ended.error) == (False, (), "rows are absent")
    worker.close()


def test_a_cancelled_job_fails_without_companions():
    rows = Rows()
    # 4 KiB at 1 MB/s: 4 ms for each block, so the second is queued when it is cancelled
    worker = worker_over(lbhnc(), companion=rows, link_gbps=0.001)
    worker.begin([Job(1, Kind.STORE, (0,), (0,)), Job(2, Kind.STORE, (1,), (1,))])
    worker.cancel([2, 77])
    ended = {outcome.number: outcome.ok for outcome in wait(worker, 2)}
    assert ended == {1: True, 2: False}
    assert [told[1] for told in rows.told] == [(0,)]
    worker.close()


def test_a_promoted_preload_overtakes_another():
    worker = worker_over(lbhnc(), link_gbps=0.001)
    worker.begin([Job(n, Kind.PRELOAD, (n,), (n,)) for n in range(4)])
    worker.promote([3, 77])
    order = [outcome.number for outcome in wait(worker, 4)]
    assert order.index(3) < order.index(2)
    worker.close()


def test_nothing_moves_before_the_compute_that_was_enqueued():
    class Later:
        happened = False

        def query(self) -> bool:
            return self.happened

    compute = Later()
    worker = worker_over(lbhnc())
    worker.begin([Job(1, Kind.STORE, (0,), (0,))], after=compute)
    time.sleep(0.02)
    assert not worker.poll()
    compute.happened = True
    assert wait(worker, 1) == [Ended(1, True)]
    worker.close()
    assert compute_so_far("cpu") is None


def test_waiting_is_for_loads_alone_and_ends_with_them():
    worker, opened = worker_over(lbhnc()), threading.Event()
    never = threading.Event().is_set
    worker.begin([Job(1, Kind.STORE, (0,), (0,)), Job(2, Kind.PRELOAD, (1,), (1,))], after=never)
    began_s = time.monotonic()
    worker.wait(60.0)  # nobody waits for these
    assert time.monotonic() - began_s < 30.0
    worker.begin([Job(3, Kind.ON_PATH, (2,), (2,))], after=opened.is_set)
    worker.wait(0.001)
    assert worker.poll() == []
    opened.set()
    worker.wait(60.0)
    assert worker.poll() == [Ended(3, True)]
    assert time.monotonic() - began_s < 30.0
    worker.close()


def test_jobs_that_cannot_begin_end_as_failed():
    worker = worker_over(lbhnc())
    (ended,) = run(worker, Job(1, Kind.STORE, (99,), (0,)))
    assert not ended.ok
    worker.close()
    (ended,) = run(worker, Job(2, Kind.STORE, (0,), (0,)))
    assert not ended.ok
    assert "closed" in ended.error


def test_closing_does_not_wait_for_a_slow_link():
    worker = worker_over(lbhnc(), link_gbps=0.0001)  # 40 ms a block
    worker.begin([Job(n, Kind.STORE, (n,), (n,)) for n in range(4)])
    began_s = time.monotonic()
    worker.close()
    assert time.monotonic() - began_s < 0.15


def test_slots_count_rows_too():
    cache = describe({"a": lbhnc()[0]}, BLOCKS)
    assert cache.slot_bytes == 1024
    assert slots_for(10 * 1024, cache) == 10
    assert slots_for(10 * 1024, cache, row_bytes=1024) == 5
    with pytest.raises(PoolError, match="--kv-dram-gb"):
        slots_for(1000, cache)


def test_one_job_as_two_workers_saw_it():
    both = merge(Ended(3, True), Ended(3, False, (7,), "broken"))
    assert both == Ended(3, False, (7,), "broken")
    assert merge(Ended(3, False, (1,)), Ended(3, False, (0,))).corrupt == (0, 1)
    assert not Orders()
    assert Orders(cancel=(1,))
