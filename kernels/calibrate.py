"""Which method for which copy: bandwidth by (direction, fragment size, count), measured or known.

Without a measured table of the machine ``BUILT_IN`` decides.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from liveserve.kernels.base import CopyMethod, Direction
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.reference import ReferenceCopy

SCHEMA = 1
# Among methods within TOLERANCE of the fastest the earlier one: the copy engine takes no SM, and
# staged copies take some for a fraction of the time.
PREFERENCE = ("batch", "memcpy", "staged", "raw", "triton", "reference")
TOLERANCE = 0.07
KIB = 1024
MIB = 1024 * KIB
SIZES = tuple(4 * KIB << shift for shift in range(10))  # 4 KiB to 2 MiB


@dataclass(frozen=True, slots=True)
class Rate:
    """Bandwidth of one method: ``count`` fragments in one copy, ``gbps`` in 1e9 bytes/s."""

    method: str
    direction: Direction
    fragment_bytes: int
    count: int
    gbps: float
    source: str = "measured"


class Table:
    """Rates of several methods, and the choice that follows from them."""

    def __init__(self, rates: Iterable[Rate], machine: str = "") -> None:
        self.rates = tuple(rates)
        self.machine = machine
        # (method, direction) → count → [(fragment bytes, GB/s)], all ascending
        self._curves: dict[tuple[str, Direction], dict[int, list[tuple[int, float]]]] = {}
        for rate in sorted(self.rates, key=lambda r: (r.count, r.fragment_bytes)):
            curves = self._curves.setdefault((rate.method, rate.direction), {})
            curves.setdefault(rate.count, []).append((rate.fragment_bytes, rate.gbps))

    def gbps(
        self, method: str, direction: Direction, fragment_bytes: int, count: int
    ) -> float | None:
        """Expected bandwidth, linear between the rates in the logarithms of size and count, level
        outside them; None where nothing is known of so few fragments."""
        curves = self._curves.get((method, direction))
        if not curves or count < next(iter(curves)) or fragment_bytes <= 0:
            return None
        at_counts = []
        for curve in curves.values():
            sizes, rates = zip(*curve, strict=True)
            at_counts.append(np.interp(math.log2(fragment_bytes), np.log2(sizes), rates))
        return float(np.interp(math.log2(count), np.log2(list(curves)), at_counts))

    def choose(
        self,
        direction: Direction,
        fragment_bytes: int,
        count: int,
        *,
        slot_bytes: int | None = None,
        methods: Iterable[str] | None = None,
    ) -> str:
        """Name of the method for ``count`` fragments of ``fragment_bytes``.

        Args:
            slot_bytes: contiguous bytes of a slot that are copied. Where given, ``staged`` is not
                thought faster than the copy engine is on pieces of that size.
            methods: those to choose from; all by default.

        Raises:
            ValueError: no methods to choose from.
        """
        names = list(PREFERENCE if methods is None else methods)
        if not names:
            raise ValueError("methods must name at least one method")
        rated: dict[str, float] = {}
        for name in names:
            rate = self.gbps(name, direction, fragment_bytes, count)
            if rate is None:
                continue
            if name == "staged" and slot_bytes is not None:
                engine = self.gbps("batch", direction, slot_bytes, count)
                rate = rate if engine is None else min(rate, engine)
            rated[name] = rate
        if not rated:
            return min(names, key=_preference)
        enough = max(rated.values()) * (1 - TOLERANCE)
        return min((name for name, rate in rated.items() if rate >= enough), key=_preference)

    def save(self, path: Path) -> None:
        """Writes the table as JSON."""
        rows = [asdict(rate) | {"direction": rate.direction.value} for rate in self.rates]
        content = {"schema": SCHEMA, "machine": self.machine, "rates": rows}
        path.write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Table:
        """Reads what ``save`` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is not such a table.
        """
        try:
            content = json.loads(path.read_text())
            if content["schema"] != SCHEMA:
                raise ValueError(f"schema {content['schema']}, expected {SCHEMA}")
            return cls(map(_rate_of, content["rates"]), str(content["machine"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not a calibration table ({error}); delete it and calibrate again"
            ) from error


def _rate_of(row: dict[str, Any]) -> Rate:
    rate = Rate(**row | {"direction": Direction(row["direction"])})
    for name in ("fragment_bytes", "count", "gbps"):
        value = getattr(rate, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e15:
            raise ValueError(f"{name} must be a positive number, got {value!r}")
    return rate


def _preference(name: str) -> int:
    return PREFERENCE.index(name) if name in PREFERENCE else len(PREFERENCE)


def measure(
    methods: Mapping[str, CopyMethod],
    cases: Iterable[tuple[Direction, int, int]],
    device: str,
    *,
    repeats: int = 5,
    refcheck: bool = False,
    progress: Callable[[Rate], None] | None = None,
) -> list[Rate]:
    """Measures methods on this machine; the median of ``repeats`` copies after one to warm up.

    A case is ``(direction, fragment_bytes, count)``. Its fragments are spread over up to 48 layers,
    blocks and slots in random order. On a GPU the pool is pinned and CUDA events take the time.

    Raises:
        RuntimeError: with ``refcheck``, a method copied wrong bytes.
    """
    rates = []
    for direction, fragment_bytes, count in cases:
        case = _Case(direction, fragment_bytes, count, device)
        for name, method in methods.items():
            if not method.supports(case.cache, case.pool):
                continue
            if refcheck:
                case.scramble()
            case.run(method)
            if refcheck:
                case.check(name)
            taken_s = statistics.median(case.time_s(method) for _ in range(repeats))
            rates.append(
                Rate(name, direction, fragment_bytes, case.count, case.nbytes / taken_s / 1e9)
            )
            if progress is not None:
                progress(rates[-1])
    return rates


class _Case:
    def __init__(self, direction: Direction, fragment_bytes: int, count: int, device: str) -> None:
        layers = min(48, count)
        blocks = count // layers
        self.direction = direction
        self.count = blocks * layers
        self.nbytes = self.count * fragment_bytes
        on_gpu = device.startswith("cuda")
        self.stored = torch.empty(
            (layers, 2 * blocks, fragment_bytes), dtype=torch.uint8, device=device
        )
        self.cache = PagedCache.from_allocation(self.stored)
        self.pool = torch.empty(
            (blocks, self.cache.slot_bytes), dtype=torch.uint8, pin_memory=on_gpu
        )
        self.stored.fill_(1)
        self.pool.fill_(2)
        self.blocks = torch.randperm(2 * blocks)[:blocks].numpy()
        self.slots = torch.randperm(blocks).numpy()
        self.stream = torch.cuda.Stream(device) if on_gpu else None

    def run(self, method: CopyMethod) -> None:
        method.copy(
            self.direction, self.cache, self.pool, self.blocks, self.slots, stream=self.stream
        )

    def time_s(self, method: CopyMethod) -> float:
        if self.stream is None:
            start_s = time.perf_counter()
            self.run(method)
            return time.perf_counter() - start_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(self.stream)
        self.run(method)
        end.record(self.stream)
        end.synchronize()
        return begin.elapsed_time(end) * 1e-3

    def scramble(self) -> None:
        """Other bytes everywhere, different on the two sides."""
        self.stored.random_()
        self.pool.random_()
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stored.device))

    def check(self, name: str) -> None:
        """After ``scramble`` and ``run``: both sides hold the bytes of the side that was read."""
        if self.stream is not None:
            self.stream.synchronize()
        expected = self.pool.clone()
        ReferenceCopy().copy(Direction.STORE, self.cache, expected, self.blocks, self.slots)
        if not torch.equal(expected, self.pool):
            raise RuntimeError(f"{name} copied wrong bytes ({self.direction.value})")


def default_cases(
    fragment_bytes: Sequence[int] = SIZES,
    counts: Sequence[int] = (48, 480, 4800),
    max_bytes: int = 2 << 30,
) -> list[tuple[Direction, int, int]]:
    """Fragments of 4 KiB to 2 MiB, both directions, without copies above ``max_bytes``."""
    return [
        (direction, size, count)
        for direction in Direction
        for size in fragment_bytes
        for count in counts
        if size * count <= max_bytes
    ]


def _published(
    method: str, direction: Direction, points: Mapping[int, float], count: int, source: str
) -> list[Rate]:
    return [Rate(method, direction, size, count, gbps, source) for size, gbps in points.items()]


# Middles of the ranges that others published for PCIe Gen5 x16. Stores by the copy engine are taken
# to be like loads. Kernels are considered from 16 fragments on (vLLM #57555).
_ENGINE = {4 * KIB: 5.5, 16 * KIB: 6.5, 28 * KIB: 36.0, 64 * KIB: 45.5, 2 * MIB: 55.6}
_ENGINE_SOURCE = "vLLM #42212 (H100), nvbandwidth"
_STAGED_SOURCE = "estimate: copy engine on whole slots, less the last half's scatter"
BUILT_IN = Table(
    [
        *_published("batch", Direction.LOAD, _ENGINE, 1, _ENGINE_SOURCE),
        *_published("batch", Direction.STORE, _ENGINE, 1, _ENGINE_SOURCE),
        *_published("triton", Direction.LOAD, {4 * KIB: 35.0}, 16, "SM copies, H100"),
        *_published("triton", Direction.STORE, {4 * KIB: 53.0}, 16, "SM copies, H100"),
        *_published("staged", Direction.LOAD, {4 * KIB: 50.0}, 96, _STAGED_SOURCE),
        *_published("staged", Direction.STORE, {4 * KIB: 50.0}, 96, _STAGED_SOURCE),
    ],
    machine="PCIe Gen5 x16, published figures",
)
