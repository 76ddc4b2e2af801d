"""What the kernel tests share: caches in many layouts, and stand-ins for the hardware."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from liveserve.kernels import raw_copy, triton_copy
from liveserve.kernels.base import Direction
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.raw_copy import RawCopy

KINDS = ("LBHNC", "LBNHC", "BLHNC", "LHBNC", "pair", "kv0", "kv1", "split", "padded")


@dataclass(frozen=True)
class Spec:
    """A cache and a pool to build, and a copy between them."""

    kind: str
    layers: int
    blocks: int
    heads: int
    tokens: int
    content: int  # bytes
    slots: int
    shift: int  # bytes that tensors start off a 16-byte boundary (only "padded")
    gap: int  # bytes between the fragments (only "padded")
    pool_gap: int  # bytes between the slots
    direction: Direction
    block_ids: tuple[int, ...]
    slot_ids: tuple[int, ...]
    chosen: range | None
    seed: int


@st.composite
def specs(draw: st.DrawFn, aligned: bool = False) -> Spec:
    """Random copies; ``aligned``: all addresses (of "padded" not all lengths) are multiples of
    16."""
    kind = draw(st.sampled_from(KINDS))
    layers, blocks, slots = (draw(st.integers(1, n)) for n in (3, 5, 6))
    even = [16, 48, 96]
    content = draw(st.sampled_from(even if aligned and kind != "padded" else [1, 3, 8, 20, *even]))
    count = draw(st.integers(0, min(blocks, slots)))
    direction = draw(st.sampled_from(Direction))
    # Only the ids of the side that is written must differ.
    block_ids = draw(
        st.lists(
            st.integers(0, blocks - 1),
            min_size=count,
            max_size=count,
            unique=direction is Direction.LOAD,
        )
    )
    slot_ids = draw(
        st.lists(
            st.integers(0, slots - 1),
            min_size=count,
            max_size=count,
            unique=direction is Direction.STORE,
        )
    )
    bounds = sorted(draw(st.tuples(st.integers(0, layers), st.integers(0, layers))))
    return Spec(
        kind=kind,
        layers=layers,
        blocks=blocks,
        heads=draw(st.integers(1, 3)),
        tokens=draw(st.integers(1, 4)),
        content=content,
        slots=slots,
        shift=0 if aligned else draw(st.sampled_from([0, 1, 2, 4, 8])),
        gap=draw(st.sampled_from([0, 16, 64] if aligned else [0, 1, 4, 16])),
        pool_gap=draw(st.sampled_from([0, 16, 64] if aligned else [0, 1, 4, 16])),
        direction=direction,
        block_ids=tuple(block_ids),
        slot_ids=tuple(slot_ids),
        chosen=draw(st.sampled_from([None, range(*bounds)])),
        seed=draw(st.integers(0, 1000)),
    )


class World:
    """The memory of a spec, filled with random bytes. Two worlds of one spec are equal."""

    def __init__(self, spec: Spec, device: str = "cpu") -> None:
        self.spec = spec
        self.device = device
        self._random = torch.Generator().manual_seed(spec.seed)
        self.memory: list[torch.Tensor] = []
        self.cache = self._cache(spec)
        # A row more than asked for on each side: a stray write shows.
        row = self.cache.slot_bytes + spec.pool_gap
        self._pool = self._bytes((spec.slots + 2) * row + spec.shift, pool=True)
        inside = self._pool[spec.shift :].view(spec.slots + 2, row)[1:-1]
        self.pool = inside[:, : self.cache.slot_bytes]

    def _bytes(self, count: int, pool: bool = False) -> torch.Tensor:
        content = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=self._random)
        on_gpu = self.device != "cpu"
        held = torch.empty(
            count + 16,
            dtype=torch.uint8,
            device="cpu" if pool else self.device,
            pin_memory=pool and on_gpu,
        )
        data = held[-held.data_ptr() % 16 :][:count].copy_(content)
        self.memory.append(data)
        return data

    def _tensor(self, *shape: int) -> torch.Tensor:
        return self._bytes(int(np.prod(shape))).view(shape)

    def _cache(self, s: Spec) -> PagedCache:
        block = (s.heads, s.tokens, s.content)
        swapped = (s.tokens, s.heads, s.content)
        if s.kind == "LBHNC":
            return PagedCache.from_allocation(self._tensor(s.layers, s.blocks, *block))
        if s.kind == "BLHNC":
            whole = self._tensor(s.blocks, s.layers, *block)
            return PagedCache.from_allocation(whole, layer_dim=1, block_dim=0)
        layers: list = []
        for layer in range(s.layers):
            if s.kind == "LBNHC":
                layers.append(self._tensor(s.blocks, *swapped).transpose(1, 2))
            elif s.kind == "LHBNC":
                layers.append(self._tensor(s.heads, s.blocks, s.tokens, s.content).transpose(0, 1))
            elif s.kind == "pair":
                layers.append([self._tensor(s.blocks, *block) for _ in range(2)])
            elif s.kind == "kv0":
                layers.append(self._tensor(2, s.blocks, *block))
            elif s.kind == "kv1":
                layers.append(self._tensor(s.blocks, 2, *block))
            elif s.kind == "split":
                layers.append(self._tensor(s.blocks * 2, *block))
            else:
                # Layers of two sizes; fragments start at multiples of 16 unless shifted.
                size = s.heads * s.tokens * s.content * (1 + layer % 2)
                stride = size + s.gap + (0 if s.shift or s.gap % 16 else -size % 16)
                raw = self._bytes(s.shift + s.blocks * stride)[s.shift :]
                layers.append(raw.view(s.blocks, stride)[:, :size])
        return PagedCache.from_layers(
            layers,
            block_dim=1 if s.kind == "kv0" else 0,
            kernel_blocks_per_block=2 if s.kind == "split" else 1,
        )

    def copy(self, method, stream=None) -> None:
        s = self.spec
        method.copy(
            s.direction, self.cache, self.pool, s.block_ids, s.slot_ids, s.chosen, stream=stream
        )

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, World)
        return all(map(torch.equal, self.memory, other.memory))

    __hash__ = None  # type: ignore[assignment]


def interpreted_kernel():
    """The Triton kernel, run by Triton's interpreter; other modules see no difference."""
    source = Path(triton_copy.__file__).with_name("triton_kernel.py")
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        return load_module(source, "interpreted_triton_kernel").copy_kernel


def load_module(source: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeDriver:
    """``CudaDriver`` on a CPU: copies at once. Refuses overlapping rows."""

    has_batch = True

    def __init__(self) -> None:
        self.calls: list[int] = []  # pieces of each call
        self.orders: set[int] = set()

    def memcpy_batch(self, targets, sources, nbytes, stream, src_access_order=1) -> None:
        assert all(a.dtype == np.int64 and a.flags.c_contiguous for a in (targets, sources, nbytes))
        self.calls.append(len(nbytes))
        self.orders.add(src_access_order)
        for target, source, length in zip(targets, sources, nbytes, strict=True):
            ctypes.memmove(int(target), int(source), int(length))

    def memcpy_2d(
        self, target, target_pitch, source, source_pitch, width_bytes, height, stream
    ) -> None:
        assert width_bytes <= min(target_pitch, source_pitch)
        assert height >= 1
        self.calls.append(height)
        for row in range(height):
            ctypes.memmove(target + row * target_pitch, source + row * source_pitch, width_bytes)


class FakeStream:
    """A CUDA stream on a CPU: keeps what it is given until ``run_all``."""

    def __init__(self) -> None:
        self.operations: list = []

    def record_event(self):
        event = [False]
        self.operations.append(("record", event))
        return event

    def wait_event(self, event) -> None:
        self.operations.append(("wait", event))

    def enqueue(self, function) -> None:
        self.operations.append(("run", function))


def run_all(streams: list[FakeStream], seed: int) -> None:
    """Runs what the streams hold, in a random order that their events allow."""
    chance = random.Random(seed)
    while any(stream.operations for stream in streams):
        ready = [
            stream
            for stream in streams
            if stream.operations
            and (stream.operations[0][0] != "wait" or stream.operations[0][1][0])
        ]
        assert ready, "streams wait for each other"
        kind, what = chance.choice(ready).operations.pop(0)
        if kind == "run":
            what()
        elif kind == "record":
            what[0] = True


# A bulk load reads its source either when it starts or as late as it may; a bulk store reads its
# buffer as late as it may. So a buffer that is used too early or again too soon holds wrong bytes.
EMULATED = r"""
#include <cstring>
#include <deque>
#include <map>
#include <vector>
#define __global__
#define __shared__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
typedef u64 shared_t;
struct Index { int x; } threadIdx, blockIdx, gridDim;
unsigned char buffers[WARPS * STAGES * CHUNK] __attribute__((aligned(128)));
struct Transfer { u64 target, source; u32 nbytes; u64 barrier; };
static std::vector<Transfer> loads;
static std::deque<Transfer> stores;
static std::map<u64, int> owners;  // warp of every buffer and barrier of the program
static int early_loads, error;

static void move(const Transfer& t) { memcpy((void*)t.target, (const void*)t.source, t.nbytes); }
static void check(u64 a, u64 b, u32 n) { if ((a | b | n) % 16) error = 1; }
static void own(u64 address) {
    const int warp = threadIdx.x / 32;
    if (owners.emplace(address, warp).first->second != warp) error = 4;
}
static shared_t shared_address(const void* pointer) { return (u64)pointer; }
static void init_barriers(shared_t barriers, int count) {
    memset((void*)barriers, 0, 8 * count);
}
static void start_load(shared_t buffer, u64 source, u32 nbytes, shared_t barrier) {
    check(buffer, source, nbytes);
    own(buffer);
    own(barrier);
    const Transfer load = {buffer, source, nbytes, barrier};
    if (early_loads) move(load);
    loads.push_back(load);
}
static void wait_load(shared_t barrier, u32 parity) {
    u64& phases = *(u64*)barrier;
    for (size_t i = 0; i < loads.size(); i++)
        if (loads[i].barrier == barrier) {
            if (!early_loads) move(loads[i]);
            loads.erase(loads.begin() + i);
            phases++;
            break;
        }
    if (phases % 2 == parity) error = 2;  // would wait for ever, or did not wait
}
static void start_store(u64 target, shared_t buffer, u32 nbytes) {
    check(target, buffer, nbytes);
    stores.push_back({target, buffer, nbytes, 0});
}
static void drain(size_t keep) {
    for (; stores.size() > keep; stores.pop_front()) move(stores.front());
}
static void wait_buffers_read() { drain(LAG); }
static void wait_stores() { drain(0); }
"""

EMULATED_LAUNCH = r"""
extern "C" int launch(int grid, int early, const i64* table, const i64* block_ids,
                      const i64* slot_ids, i64 num_rows, i64 num_fragments, i64 num_chunks,
                      i64 pool_base, i64 slot_stride, int load) {
    early_loads = early;
    error = 0;
    gridDim.x = grid;
    for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++) {
        owners.clear();
        for (threadIdx.x = 0; threadIdx.x < WARPS * 32; threadIdx.x++) {
            bulk_copy(table, block_ids, slot_ids, num_rows, num_fragments, num_chunks, pool_base,
                      slot_stride, load);
            if (!loads.empty() || !stores.empty()) error = 3;
        }
    }
    return error;
}
"""


def emulated_raw_copy(folder: Path, programs: int, early: bool, **sizes: int) -> RawCopy:
    """The raw kernel's own loop, compiled for this CPU. Needs g++."""

    def launch(grid: int, arguments: tuple) -> None:
        status = library.launch(
            grid,
            int(early),
            *(ctypes.c_uint64(int(a)) for a in arguments[:3]),
            *(ctypes.c_int64(int(a)) for a in arguments[3:-1]),
            int(arguments[-1]),
        )
        assert status == 0, f"emulated kernel failed: {status}"

    copy = RawCopy(programs=programs, launch=launch, **sizes)
    name = "raw-" + "-".join(map(str, sizes.values()))
    source, binary = folder / f"{name}.cpp", folder / f"{name}.so"
    if not binary.exists():
        source.write_text(raw_copy.TYPES + EMULATED + raw_copy.BODY + EMULATED_LAUNCH)
        command = ["g++", *copy.options, "-O1", "-shared", "-fPIC"]
        subprocess.run([*command, "-o", str(binary), str(source)], check=True)
    library = ctypes.CDLL(str(binary))
    return copy
