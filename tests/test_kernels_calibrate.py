"""Choosing a method from a table, and measuring one."""

from __future__ import annotations

import json

import pytest

from liveserve.kernels.base import Direction
from liveserve.kernels.calibrate import BUILT_IN, KIB, MIB, Rate, Table, default_cases, measure
from liveserve.kernels.reference import ReferenceCopy

LOAD, STORE = Direction


def table(*rates: tuple[str, int, int, float]) -> Table:
    return Table(Rate(name, LOAD, size, count, gbps) for name, size, count, gbps in rates)


def test_the_fastest_method_wins_and_near_ties_go_to_the_copy_engine():
    known = table(("batch", 4096, 1, 10.0), ("triton", 4096, 1, 30.0), ("raw", 4096, 1, 29.0))
    assert known.choose(LOAD, 4096, 1) == "raw"
    assert known.choose(LOAD, 4096, 1, methods=["triton", "batch"]) == "triton"
    near = table(("batch", 4096, 1, 28.0), ("triton", 4096, 1, 30.0))
    assert near.choose(LOAD, 4096, 1) == "batch"


def test_rates_between_those_measured():
    known = table(
        ("batch", 4 * KIB, 1, 4.0),
        ("batch", 16 * KIB, 1, 8.0),
        ("batch", 4 * KIB, 16, 12.0),
        ("batch", 16 * KIB, 16, 24.0),
    )
    assert known.gbps("batch", LOAD, 4 * KIB, 1) == 4.0
    assert known.gbps("batch", LOAD, 8 * KIB, 1) == pytest.approx(6.0)
    assert known.gbps("batch", LOAD, 8 * KIB, 4) == pytest.approx((6.0 + 18.0) / 2)
    assert known.gbps("batch", LOAD, MIB, 1000) == 24.0
    assert known.gbps("batch", LOAD, 1, 1) == 4.0
    assert known.gbps("batch", STORE, 4 * KIB, 1) is None
    assert known.gbps("raw", LOAD, 4 * KIB, 1) is None


def test_a_method_is_not_chosen_for_fewer_fragments_than_it_was_measured_with():
    known = table(("batch", 4096, 1, 5.0), ("triton", 4096, 16, 50.0))
    assert known.choose(LOAD, 4096, 15) == "batch"
    assert known.choose(LOAD, 4096, 16) == "triton"


def test_staged_is_not_thought_faster_than_the_engine_on_its_slots():
    known = table(
        ("batch", 4 * KIB, 1, 5.0),
        ("batch", MIB, 1, 55.0),
        ("staged", 4 * KIB, 1, 50.0),
        ("triton", 4 * KIB, 1, 35.0),
    )
    assert known.choose(LOAD, 4 * KIB, 100, slot_bytes=MIB) == "staged"
    assert known.choose(LOAD, 4 * KIB, 100, slot_bytes=8 * KIB) == "triton"


def test_methods_that_nothing_is_known_of_are_chosen_by_preference():
    assert BUILT_IN.choose(LOAD, 4096, 100, methods=["reference"]) == "reference"
    assert table().choose(STORE, 4096, 1, methods=["triton", "memcpy"]) == "memcpy"
    with pytest.raises(ValueError, match="at least one"):
        BUILT_IN.choose(LOAD, 4096, 1, methods=[])


def test_the_built_in_table_knows_the_cliff_of_the_copy_engine():
    direct = ["batch", "triton"]
    assert BUILT_IN.choose(LOAD, 16 * KIB, 96, methods=direct) == "triton"
    assert BUILT_IN.choose(LOAD, 16 * KIB, 8, methods=direct) == "batch"
    assert BUILT_IN.choose(LOAD, 64 * KIB, 96, methods=direct) == "batch"
    # One block of Qwen3-Omni's thinker: 96 pieces of 16 KiB, a slot of 1.5 MiB.
    for direction in Direction:
        chosen = BUILT_IN.choose(direction, 16 * KIB, 96 * 64, slot_bytes=3 * MIB // 2)
        assert chosen == "staged"
        assert BUILT_IN.choose(direction, 2 * MIB, 96) == "batch"


def test_tables_survive_the_disk(tmp_path):
    path = tmp_path / "table.json"
    BUILT_IN.save(path)
    loaded = Table.load(path)
    assert (loaded.rates, loaded.machine) == (BUILT_IN.rates, BUILT_IN.machine)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(schema=2),
        lambda c: c.pop("rates"),
        lambda c: c["rates"][0].update(direction="up"),
        lambda c: c["rates"][0].update(gbps=-1),
        lambda c: c["rates"][0].update(count=True),
        lambda c: c["rates"][0].update(unknown=1),
        lambda c: c["rates"][0].pop("method"),
    ],
)
def test_files_that_are_no_tables_are_refused(tmp_path, change):
    path = tmp_path / "table.json"
    BUILT_IN.save(path)
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"table.json is not a calibration table"):
        Table.load(path)
    path.write_text("{")
    with pytest.raises(ValueError, match="calibrate again"):
        Table.load(path)


def test_measuring_covers_the_cases_and_checks_bytes():
    seen: list[Rate] = []
    cases = [(STORE, 512, 100), (LOAD, 100, 3)]
    methods = {"reference": ReferenceCopy()}
    rates = measure(methods, cases, "cpu", repeats=2, refcheck=True, progress=seen.append)
    assert seen == rates
    assert [(r.direction, r.fragment_bytes, r.count) for r in rates] == [
        (STORE, 512, 96),
        (LOAD, 100, 3),
    ]
    assert all(rate.gbps > 0 and rate.source == "measured" for rate in rates)


class Lazy(ReferenceCopy):
    """Leaves out the last block."""

    def copy(self, direction, cache, pool, block_ids, slot_ids, layers=None, stream=None):
        super().copy(direction, cache, pool, block_ids[:-1], slot_ids[:-1], layers, stream)


@pytest.mark.parametrize("direction", Direction)
def test_refcheck_finds_a_method_that_copies_too_little(direction):
    methods = {"reference": ReferenceCopy(), "lazy": Lazy()}
    with pytest.raises(RuntimeError, match="lazy copied wrong bytes"):
        measure(methods, [(direction, 64, 96)], "cpu", repeats=1, refcheck=True)


def test_default_cases_cover_4_kib_to_2_mib_in_both_directions():
    cases = default_cases()
    assert {size for _, size, _ in cases} >= {4 * KIB, 16 * KIB, 2 * MIB}
    assert {direction for direction, _, _ in cases} == set(Direction)
    assert max(size * count for _, size, count in cases) <= 2 << 30
