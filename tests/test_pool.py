"""Slots and the memory behind them. Pinning runs against a fake of the CUDA runtime's two calls."""

from __future__ import annotations

import contextlib
import mmap
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liveserve.kvtier import host_memory, pool
from liveserve.kvtier.pool import GIB, HostPool, PoolError, slots_in
from liveserve.kvtier.slots import SlotAllocator

# Slots.


@given(st.integers(1, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 13)), max_size=60))
def test_every_slot_is_free_or_owned(num_slots, steps):
    slots = SlotAllocator(num_slots)
    owned: list[list[int]] = []
    for takes, number in steps:
        if takes:
            taken = slots.alloc(number)
            held = {s for group in owned for s in group}
            if number > num_slots - len(held):
                assert taken is None
            else:
                assert taken is not None
                assert len(set(taken)) == len(taken) == number
                assert not set(taken) & held
                assert all(0 <= s < num_slots for s in taken)
                owned.append(taken)
        elif owned:
            slots.free(owned.pop(number % len(owned)))
        held = {s for group in owned for s in group}
        assert (slots.num_owned, slots.num_free) == (len(held), num_slots - len(held))
        assert {s for s in range(num_slots) if slots.is_owned(s)} == held
    for group in owned:
        slots.free(group)
    assert sorted(slots.alloc(num_slots) or []) == list(range(num_slots))


def test_fresh_slots_ascend_and_the_last_freed_comes_first():
    slots = SlotAllocator(6)
    assert slots.alloc(4) == [0, 1, 2, 3]
    slots.free([1, 2])
    assert slots.alloc(3) == [1, 2, 4]
    assert slots.alloc(0) == []


@pytest.mark.parametrize(
    ("freed", "message"),
    [
        ([0, 3], "slot 3 is free already"),
        ([0, 1, 0], "must not be named twice"),
        ([0, 4], "slot 4 is not in 0..3"),
        ([-1], "slot -1 is not in 0..3"),
    ],
)
def test_a_wrong_free_is_refused_and_frees_nothing(freed, message):
    slots = SlotAllocator(4)
    slots.alloc(3)
    with pytest.raises(ValueError, match=re.escape(message)):
        slots.free(freed)
    assert slots.num_owned == 3
    assert slots.is_owned(0)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, None])
def test_a_pool_needs_a_number_of_slots(bad):
    with pytest.raises(ValueError, match="num_slots must be a positive integer"):
        SlotAllocator(bad)


def test_a_negative_count_is_refused():
    with pytest.raises(ValueError, match="count must not be negative"):
        SlotAllocator(4).alloc(-1)


# Sizes.


def test_the_setting_counts_gib():
    assert slots_in(1, 1 << 20) == 1024
    assert slots_in(0.5, 3 << 20) == 170


@pytest.mark.parametrize("bad", [0, -1, float("nan"), float("inf"), "8"])
def test_a_setting_that_is_no_size_is_refused(bad):
    with pytest.raises(PoolError, match="--kv-dram-gb must be a positive number"):
        slots_in(bad, 4096)


def test_a_setting_that_holds_no_block_names_one_that_does():
    with pytest.raises(PoolError, match=r"--kv-dram-gb 0\.001 holds no block") as info:
        slots_in(0.001, 3 << 20)
    least = float(str(info.value).rsplit(" ", 1)[1])
    assert slots_in(least, 3 << 20) == 1


# Memory.


def test_ordinary_memory_on_a_cpu():
    made = HostPool(5, 48)
    assert made.data.shape == (5, 48)
    assert made.data.dtype == torch.uint8
    assert made.data.is_contiguous()
    assert made.data.data_ptr() % mmap.PAGESIZE == 0
    assert not made.data.any()
    assert (made.pinned, made.numa_node, made.num_bytes) == (False, None, 240)
    made.data[4] = 255  # the last byte is there
    assert made.slots.num_free == 5
    data = made.data
    made.close()
    del made
    assert data[4].eq(255).all()  # lives as long as it is used


@pytest.mark.parametrize("bad", [0, -4, 2.0, True])
def test_slots_need_a_size(bad):
    with pytest.raises(ValueError, match="slot_bytes must be a positive integer"):
        HostPool(4, bad)


def smaps_kib(address: int, field: str) -> int:
    """A figure of the mapping around ``address``, in KiB."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        match = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if match:
            low, high = (int(part, 16) for part in match.groups())
            inside = low <= address < high
        elif inside and line.startswith(f"{field}:"):
            return int(line.split()[1])
    raise AssertionError(f"no mapping holds {address:#x}")


def test_pages_are_touched_at_construction():
    size = 16 << 20
    made = HostPool(16, size // 16)
    assert smaps_kib(made.data.data_ptr(), "Rss") * 1024 >= size


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages here"
)
def test_huge_pages_are_asked_for():
    made = HostPool(8, 2 << 20)
    assert made.huge_pages
    assert made.data.data_ptr() % host_memory.HUGE_PAGE_BYTES == 0
    assert smaps_kib(made.data.data_ptr(), "AnonHugePages") > 0


def test_too_little_memory_names_the_setting_and_what_fits(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 100 << 20)
    with pytest.raises(PoolError, match="--kv-dram-gb may be at most") as info:
        HostPool(110, 1 << 20)
    assert "0.107 GiB" in str(info.value)
    fits = float(str(info.value).rsplit(" ", 1)[1])
    assert fits == pytest.approx(0.95 * (100 << 20) / GIB, abs=1e-3)
    HostPool(slots_in(fits, 1 << 20), 1 << 20).close()


def test_a_mapping_that_the_kernel_refuses_is_one_clear_error(monkeypatch):
    def refuse(size: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(host_memory, "map_anonymous", refuse)
    with pytest.raises(PoolError, match=r"Cannot allocate memory\): lower --kv-dram-gb"):
        HostPool(4, 4096)


# Pinning.


class FakeRuntime:
    """cudaHostRegister with a limit, and what is registered."""

    def __init__(self, limit: int, code: int = 2) -> None:
        self.limit = limit
        self.code = code
        self.registered: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        assert address not in self.registered
        if size > self.limit:
            return self.code
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


@pytest.fixture
def gpu(monkeypatch):
    runtime = FakeRuntime(1 << 40)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(pool, "_cudart", lambda: runtime)
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return runtime


def test_it_is_pinned_for_a_gpu_and_unpinned_once(gpu):
    made = HostPool(8, 4 << 20, device="cuda:0")
    assert made.pinned
    assert gpu.registered == {made.data.data_ptr(): made.num_bytes}
    made.close()
    made.close()
    assert not made.pinned
    assert gpu.registered == {}


@pytest.mark.parametrize(("code", "reason"), [(2, "out of memory"), (801, "CUDA error 801")])
def test_a_pin_that_fails_names_the_limit_and_what_fits(gpu, monkeypatch, code, reason):
    gpu.limit, gpu.code = 9 << 20, code
    monkeypatch.setattr(host_memory, "memlock_bytes", lambda: 8 << 20)
    with pytest.raises(PoolError, match=reason) as info:
        HostPool(8, 4 << 20, device="cuda:0")
    text = str(info.value)
    assert "RLIMIT_MEMLOCK is 0.00781 GiB" in text
    assert "--kv-dram-gb" in text
    assert text.endswith("0.007 could be pinned")  # 8 MiB, by halves from 32
    assert gpu.registered == {}


def test_the_pin_limit_is_the_process_s():
    limit = host_memory.memlock_bytes()
    assert limit is None or limit >= 0


# NUMA.


def nodes(sys: Path, count: int) -> None:
    for number in range(count):
        (sys / f"devices/system/node/node{number}").mkdir(parents=True)


@pytest.mark.parametrize(
    ("count", "text", "node"),
    [(2, "1\n", 1), (2, "-1\n", None), (1, "0\n", None), (2, None, None), (2, "?", None)],
)
def test_the_node_of_a_gpu_as_sysfs_tells(tmp_path, count, text, node):
    nodes(tmp_path, count)
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    if text is not None:
        (device / "numa_node").write_text(text)
    assert host_memory.gpu_node("0000:1B:00.0", tmp_path) == node


def test_a_pool_is_near_its_gpu(gpu, monkeypatch):
    asked = []
    monkeypatch.setattr(host_memory, "gpu_node", lambda address: asked.append(address) or 3)
    placed = []
    monkeypatch.setattr(host_memory, "prefer_node", lambda *args: placed.append(args) or True)
    made = HostPool(4, 4096, device="cuda:0")
    assert asked == ["0000:1b:02.0"]
    assert placed == [(made.data.data_ptr(), made.num_bytes, 3)]
    assert made.numa_node == 3


def test_without_topology_it_is_where_the_kernel_puts_it(gpu, monkeypatch):
    monkeypatch.setattr(host_memory, "gpu_node", lambda address: 3)
    monkeypatch.setattr(host_memory, "prefer_node", lambda *args: False)
    made = HostPool(4, 4096, device="cuda:0")
    assert made.pinned
    assert made.numa_node is None
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    assert HostPool(4, 4096, device="cuda:0").numa_node is None


@pytest.mark.skipif(
    not Path("/sys/devices/system/node/node0").exists(), reason="a kernel without NUMA"
)
def test_the_kernel_takes_a_preferred_node_and_no_other():
    made = HostPool(4, 1 << 20)
    assert host_memory.prefer_node(made.data.data_ptr(), made.num_bytes, 0)
    assert not host_memory.prefer_node(made.data.data_ptr(), made.num_bytes, 900)


# What is left.


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_available_memory_is_the_machine_s_without_cgroups(tmp_path):
    assert host_memory.available_bytes(tmp_path) >= 1 << 50
    write(tmp_path / "proc/meminfo", "MemTotal: 9000 kB\nMemAvailable:   5000 kB\n")
    assert host_memory.available_bytes(tmp_path) == 5000 * 1024


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("where", ["own", "parent", "mount only"])
def test_available_memory_respects_the_cgroup(tmp_path, version, where):
    write(tmp_path / "proc/meminfo", "MemAvailable:   5000 kB\n")
    line = "0::/a/b" if version == 2 else "5:cpu,memory:/a/b"
    write(tmp_path / "proc/self/cgroup", f"9:name=systemd:/\n{line}\n")
    root = tmp_path / ("sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/memory")
    folder = {"own": root / "a/b", "parent": root / "a", "mount only": root}[where]
    limit, used, cached = (
        ("memory.max", "memory.current", "inactive_file")
        if version == 2
        else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    )
    write(folder / limit, "1000000\n")
    write(folder / used, "400000\n")
    write(folder / "memory.stat", f"anon 1\n{cached} 50000\n")
    assert host_memory.available_bytes(tmp_path) == 650_000
    write(folder / limit, "max\n" if version == 2 else f"{1 << 62}\n")
    assert host_memory.available_bytes(tmp_path) == 5000 * 1024
    write(folder / limit, "300000\n")
    assert host_memory.available_bytes(tmp_path) == 0


def test_what_this_machine_has_is_a_sane_figure():
    assert 64 << 20 < host_memory.available_bytes() < 1 << 50
