"""Companion rows by DRAM slot."""

from __future__ import annotations

import pytest
import torch

from liveserve.kvtier import rows as rows_module
from liveserve.kvtier.rows import RowsError, RowStore

BLOCK = 4
SHAPES = {"hidden": (torch.float32, 6), "layer_2": (torch.bfloat16, 8)}
BYTES = BLOCK * (6 * 4 + 8 * 2)


def some_rows(count: int, seed: int = 0, shapes=SHAPES) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        key: torch.randn(count * BLOCK, width, generator=random).to(dtype)
        for key, (dtype, width) in shapes.items()
    }


def block(rows: dict[str, torch.Tensor], index: int) -> dict[str, torch.Tensor]:
    return {key: value[index * BLOCK : (index + 1) * BLOCK] for key, value in rows.items()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype
        assert torch.equal(got[key], value)


def test_rows_come_back_bit_for_bit_in_any_order():
    store = RowStore(5, BLOCK)
    rows = some_rows(3)
    rows["hidden"][0, 0] = -0.0
    store.put([4, 0, 2], rows)
    assert_same(store.take([4, 0, 2]), rows)
    assert_same(store.take([2]), block(rows, 2))
    both = store.take([0, 4])
    assert_same(block(both, 0), block(rows, 1))
    assert_same(block(both, 1), block(rows, 0))
    assert torch.signbit(store.take([4])["hidden"][0, 0])


def test_what_is_taken_is_a_copy():
    store = RowStore(2, BLOCK)
    rows = some_rows(1)
    store.put([1], rows)
    with torch.inference_mode():
        store.take([1])["hidden"].zero_()
    assert_same(store.take([1]), rows)
    rows["hidden"].zero_()
    assert bool(store.take([1])["hidden"].any())


def test_a_slot_holds_what_was_put_last():
    store = RowStore(3, BLOCK)
    store.put([0, 1], some_rows(2, 1))
    new = some_rows(1, 2)
    store.put([1], new)
    assert_same(store.take([1]), new)
    assert_same(store.take([0]), block(some_rows(2, 1), 0))


def test_bytes_are_known_once_a_key_is_open():
    store = RowStore(10, BLOCK)
    assert (store.bytes_per_slot, store.num_bytes) == (0, 0)
    store.put([0], some_rows(1))
    assert (store.bytes_per_slot, store.num_bytes) == (BYTES, 10 * BYTES)


def test_memory_is_bounded():
    store = RowStore(10, BLOCK, max_bytes=3 * BYTES + 1)
    store.put([2, 0], some_rows(2))
    assert store.usable_slots == 3
    assert store.num_bytes == 3 * BYTES
    assert sum(data.nbytes for data in store._data.values()) == 3 * BYTES
    with pytest.raises(RowsError, match="slot 3 is over the memory for rows"):
        store.put([1, 3], some_rows(2))
    assert not store.holds(1)
    assert store.holds(2)


def test_no_memory_for_a_single_block():
    store = RowStore(10, BLOCK, max_bytes=BYTES - 1)
    with pytest.raises(RowsError, match="no memory for rows"):
        store.put([0], some_rows(1))
    assert store.num_bytes == 0


def test_more_than_the_machine_has(monkeypatch):
    monkeypatch.setattr(rows_module.host_memory, "available_bytes", lambda: 10 * BYTES - 1)
    store = RowStore(10, BLOCK)
    with pytest.raises(RowsError, match="are available"):
        store.put([0], some_rows(1))
    monkeypatch.setattr(rows_module.host_memory, "available_bytes", lambda: 10 * BYTES)
    store.put([0], some_rows(1))


@pytest.mark.parametrize(
    "shapes",
    [
        {"hidden": SHAPES["hidden"]},
        {**SHAPES, "new": (torch.float32, 2)},
        {**SHAPES, "hidden": (torch.float32, 7)},
        {**SHAPES, "hidden": (torch.float16, 6)},
    ],
    ids=["key missing", "key new", "width", "dtype"],
)
def test_rows_of_another_shape_are_refused_and_the_slot_holds_none(shapes):
    store = RowStore(3, BLOCK)
    store.put([0, 1], some_rows(2))
    with pytest.raises(RowsError, match="rows changed from"):
        store.put([1], some_rows(1, shapes=shapes))
    assert (store.holds(0), store.holds(1)) == (True, False)
    with pytest.raises(RowsError, match="slot 1 holds no rows"):
        store.take([0, 1])


@pytest.mark.parametrize("rows", [{}, some_rows(1), some_rows(3)], ids=["none", "few", "many"])
def test_the_number_of_rows_must_fit(rows):
    store = RowStore(3, BLOCK)
    store.put([0, 1], some_rows(2))
    with pytest.raises(RowsError, match="2 blocks have 8 rows per key"):
        store.put([0, 1], rows)
    assert not store.holds(0)
    assert not store.holds(1)


@pytest.mark.parametrize("slots", [[], [1, 1], [3], [-1]])
def test_bad_slots(slots):
    store = RowStore(3, BLOCK)
    for call in (lambda: store.put(slots, some_rows(len(slots))), lambda: store.take(slots)):
        with pytest.raises(RowsError, match=r"named once|not in 0\.\.2"):
            call()


@pytest.mark.parametrize("key", list(SHAPES))
def test_damage_is_found(key):
    store = RowStore(3, BLOCK, checksums=True)
    rows = some_rows(2)
    store.put([0, 1], rows)
    assert_same(store.take([0, 1]), rows)
    store._data[key].view(torch.uint8)[1, BLOCK - 1, 3] ^= 1
    with pytest.raises(RowsError, match="slot 1 are not what was stored"):
        store.take([0, 1])
    assert_same(store.take([0]), block(rows, 0))
    assert not store.holds(1)
    store.put([1], block(rows, 1))
    assert_same(store.take([0, 1]), rows)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0, 4), "num_slots"),
        ((True, 4), "num_slots"),
        ((4, 0), "block_size"),
        ((4, 2.0), "block_s"),
    ],
)
def test_bad_sizes(arguments, name):
    with pytest.raises(ValueError, match=name):
        RowStore(*arguments)


def test_a_bound_must_be_positive():
    with pytest.raises(ValueError, match="max_bytes"):
        RowStore(4, 4, max_bytes=0)


def test_inside_and_outside_inference_mode():
    """The host calls from inside it; what was opened there must stay writable."""
    store = RowStore(2, BLOCK)
    with torch.inference_mode():
        rows = some_rows(1)
        store.put([0], rows)
    store.put([1], some_rows(1, 3))
    assert_same(store.take([0]), rows)
