"""The gather/scatter kernel. Imports triton, so it is imported only where a copy needs it.

Work is rows × chunks: a row is one piece of one block, a chunk is ``COLS`` words of it. A tile is
``ROWS`` rows of one chunk, so that many small pieces are in flight at once: what a program reaches
is bytes in flight ÷ round trip of the link. Programs stride over the tiles, so the grid, and with
it the number of SMs taken from decoding, is the caller's choice.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=["num_rows", "num_fragments", "num_chunks", "pool_base", "slot_stride"]
)
def copy_kernel(  # type: ignore[no-untyped-def]
    table,
    block_ids,
    slot_ids,
    num_rows,
    num_fragments,
    num_chunks,
    pool_base,
    slot_stride,
    LOAD: tl.constexpr,
    ALIGN: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """Copies pieces between cache and pool.

    Args:
        table: int64 ``[4, num_fragments]``: base, block stride, bytes, offset in the slot.
        block_ids, slot_ids: int64 ``[num_rows // num_fragments]``.
        num_chunks: chunks that the longest piece has.
        pool_base, slot_stride: address of slot 0, and bytes from slot to slot.
        LOAD: pool → cache; else cache → pool.
        ALIGN: bytes that divide every address: 1, 2, 4, 8 or 16. At 16 a thread moves 16 at once.
        TAIL: whether some piece is not a multiple of ``ALIGN`` bytes long.
        ROWS, COLS: the tile, in rows and words of ``min(ALIGN, 8)`` bytes.
    """
    WORD: tl.constexpr = min(ALIGN, 8)
    word_type: tl.constexpr = tl.pointer_type(tl.core.get_int_dtype(WORD * 8, signed=True))
    PER_ACCESS: tl.constexpr = ALIGN // WORD
    num_tiles = (num_rows + ROWS - 1) // ROWS * num_chunks
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        chunk = tile % num_chunks
        row = tile // num_chunks * ROWS + tl.arange(0, ROWS)
        valid = row < num_rows
        item = row // num_fragments
        piece = table + row % num_fragments
        base = tl.load(piece, mask=valid, other=0)
        stride = tl.load(piece + num_fragments, mask=valid, other=0)
        nbytes = tl.load(piece + 2 * num_fragments, mask=valid, other=0)
        offset = tl.load(piece + 3 * num_fragments, mask=valid, other=0)
        block = tl.load(block_ids + item, mask=valid, other=0)
        slot = tl.load(slot_ids + item, mask=valid, other=0)
        cached = base + block * stride
        pooled = pool_base + slot * slot_stride + offset
        source = pooled if LOAD else cached
        target = cached if LOAD else pooled

        # The hints are what lets the compiler use 16-byte accesses through addresses it cannot see.
        source_words = tl.multiple_of(source.to(word_type), ALIGN)
        target_words = tl.multiple_of(target.to(word_type), ALIGN)
        num_words = nbytes // ALIGN * PER_ACCESS
        col = chunk * COLS + tl.arange(0, COLS)
        mask = col[None, :] < num_words[:, None]
        words = tl.load(
            source_words[:, None] + col[None, :], mask=mask, eviction_policy="evict_first"
        )
        tl.store(target_words[:, None] + col[None, :], words, mask=mask)

        if TAIL:  # noqa: SIM102, decided at compile time, the other at run time
            if chunk == 0:
                byte_type: tl.constexpr = tl.pointer_type(tl.int8)
                byte = nbytes[:, None] // ALIGN * ALIGN + tl.arange(0, ALIGN)[None, :]
                left = byte < nbytes[:, None]
                rest = tl.load(source.to(byte_type)[:, None] + byte, mask=left)
                tl.store(target.to(byte_type)[:, None] + byte, rest, mask=left)
