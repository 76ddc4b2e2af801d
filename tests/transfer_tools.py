"""A cache small enough to check byte by byte, a link that moves when told to, and an oracle."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from liveserve.kernels.base import Direction
from liveserve.kernels.layout import PagedCache
from liveserve.kernels.reference import ReferenceCopy
from liveserve.kvtier.transfer_base import Kind, Piece, Source, Transfer

LOAD, STORE = Direction.LOAD, Direction.STORE
SOUND, TOLD = -1, -2


class Happening:
    """An event that happens when the test says so."""

    def __init__(self) -> None:
        self.happened = False

    def query(self) -> bool:
        return self.happened


@dataclass
class World:
    """``layers[i]``: uint8 ``[num_blocks, 16]``; ``pool``: uint8 ``[num_slots, slot_bytes]``."""

    layers: list[torch.Tensor]
    pool: torch.Tensor
    cache: PagedCache = field(init=False)

    def __post_init__(self) -> None:
        self.cache = PagedCache.from_layers(self.layers)

    @classmethod
    def random(cls, seed: int, *, num_layers: int, num_blocks: int, num_slots: int) -> World:
        rng = np.random.default_rng(seed)
        layers = [
            torch.from_numpy(rng.integers(0, 256, (num_blocks, 16), dtype=np.uint8))
            for _ in range(num_layers)
        ]
        pool = rng.integers(0, 256, (num_slots, 16 * num_layers), dtype=np.uint8)
        return cls(layers, torch.from_numpy(pool))

    def blocks_array(self) -> np.ndarray:
        """uint8 ``[num_blocks, num_layers, 16]``, a copy."""
        return torch.stack(self.layers, dim=1).numpy().copy()

    def slots_array(self) -> np.ndarray:
        """uint8 ``[num_slots, num_layers, 16]``, a copy."""
        return self.pool.numpy().reshape(self.pool.shape[0], len(self.layers), 16).copy()

    def write(self, block: int, value: int) -> None:
        """What a forward pass does to a block."""
        for layer in self.layers:
            layer[block] = value


class ManualLink:
    """Takes, moves and finishes pieces one at a time, in the test's thread.

    Checks at every piece that no other transfer with bytes under way, or begun and not ended,
    conflicts with it.
    """

    def __init__(self, world: World, gbps: float) -> None:
        self.world = world
        self.gbps = gbps
        self.under_way: dict[Direction, deque[tuple[Piece, bool]]] = {d: deque() for d in Direction}
        self.taken: list[Piece] = []
        self.ordered: list[tuple[Any, Any]] = []
        self.joined = False

    def start(self, source: Source) -> None:
        self.source = source

    def join(self) -> None:
        self.joined = True

    def order(self, fence: Any, stream: Any) -> None:
        self.ordered.append((fence, stream))

    def take(self, direction: Direction, *, early: bool = True) -> Piece | None:
        """``early``: the bytes move now, else when the piece is finished."""
        piece = self.source.take(direction, block=False)
        if piece is not None:
            begun = {p.transfer for p in self.taken if not p.transfer.ended}
            for other in begun:
                assert other is piece.transfer or not conflict(other, piece.transfer)
            self.taken.append(piece)
            self.under_way[direction].append((piece, early))
            self.source.issued(piece, f"fence {len(self.taken)}")
            if early:
                self._move(piece)
        return piece

    def finish(self, direction: Direction, error: Exception | None = None) -> Piece | None:
        """Finish the piece taken first."""
        if not self.under_way[direction]:
            return None
        piece, early = self.under_way[direction].popleft()
        if not early and error is None:
            self._move(piece)
        self.source.finish(piece, error)
        return piece

    def step(self, direction: Direction) -> Piece | None:
        """Finish what is under way, then take and finish one piece."""
        while self.under_way[direction]:
            self.finish(direction)
        piece = self.take(direction)
        self.finish(direction)
        return piece

    def drain(self) -> None:
        while any([bool(self.under_way[d]) | bool(self.step(d)) for d in Direction]):
            pass

    def _move(self, piece: Piece) -> None:
        ReferenceCopy().copy(
            piece.transfer.kind.direction,
            self.world.cache,
            self.world.pool,
            piece.block_ids,
            piece.slot_ids,
            piece.layers,
        )


def conflict(a: Transfer, b: Transfer) -> bool:
    """Whether the two touch a block or slot that one of them writes."""
    blocks = set(a.block_ids) & set(b.block_ids)
    slots = set(a.slot_ids) & set(b.slot_ids)
    stores = [t.kind is Kind.STORE for t in (a, b)]
    return bool((blocks and not all(stores)) or (slots and any(stores)))


class Oracle:
    """What memory holds if everything had run one after the other, in order of submission.

    Where a transfer that did not end well should have written, anything may be, and nobody may
    have read it, except that a block may be stored once the owner was told.
    """

    def __init__(self, world: World) -> None:
        self.blocks, self.slots = world.blocks_array(), world.slots_array()
        self.log: list[Transfer | tuple[int, int]] = []

    def submitted(self, transfer: Transfer) -> None:
        self.log.append(transfer)

    def wrote(self, block: int, value: int) -> None:
        self.log.append((block, value))

    def check(self, world: World, told: dict[Transfer, int]) -> None:
        """``told``: for transfers that `poll` reported, how many had been submitted by then."""
        # Who should have written there: SOUND if it did, TOLD if the owner knows that it did not.
        block_culprits = np.full(self.blocks.shape[:2], SOUND)
        slot_culprits = np.full(self.slots.shape[:2], SOUND)
        by_number: dict[int, Transfer] = {}
        for entry in self.log:
            if isinstance(entry, tuple):
                self.blocks[entry[0]] = entry[1]
                block_culprits[entry[0]] = SOUND
                continue
            by_number[entry.number] = entry
            layers = slice(entry.layers.start, entry.layers.stop)
            sides = (
                (self.blocks, block_culprits, entry.block_ids),
                (
                    self.slots,
                    slot_culprits,
                    entry.slot_ids,
                ),
            )
            stores = entry.kind is Kind.STORE
            (source, bad, source_ids), (target, target_bad, target_ids) = (
                sides if stores else sides[::-1]
            )
            for from_id, to_id in zip(source_ids, target_ids, strict=True):
                if not entry.ok:
                    target_bad[to_id, layers] = entry.number
                    continue
                for culprit in set(bad[from_id, layers].tolist()) - {SOUND, TOLD}:
                    assert stores, f"{entry} read slot {from_id}, spoiled by {culprit}"
                    assert told[by_number[culprit]] <= entry.number, f"{entry} read a lost block"
                target[to_id, layers] = source[from_id, layers]
                sound = bad[from_id, layers] == SOUND
                target_bad[to_id, layers] = np.where(sound, SOUND, TOLD)
        for held, expected, bad in (
            (world.blocks_array(), self.blocks, block_culprits),
            (world.slots_array(), self.slots, slot_culprits),
        ):
            sound = bad == SOUND
            assert np.array_equal(held[sound], expected[sound])
