"""KV events of the DRAM tier, as the host publishes its own (vllm/distributed/kv_events.py).

The GPU's events are the host's: a block that is evicted by our policy leaves the pool as any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)


def tier_events(
    changes: Iterable[tuple[bytes, bool]], block_tokens: Mapping[int, int]
) -> Iterator[KVCacheEvent]:
    """One event per change, for a connector's ``take_events``.

    Args:
        changes: hash keys with group id, in order; True: it is in DRAM now, False: no longer.
        block_tokens: tokens per block, by KV cache group.
    """
    for raw, stored in changes:
        key = BlockHashWithGroupId(raw)
        group = get_group_id(key)
        hashes = [maybe_convert_block_hash(get_block_hash(key))]
        if stored:
            yield BlockStored(
                block_hashes=hashes,
                parent_block_hash=None,
                token_ids=[],
                block_size=block_tokens[group],
                lora_id=None,
                medium=MEDIUM_CPU,
                lora_name=None,
                group_idx=group,
            )
        else:
            yield BlockRemoved(block_hashes=hashes, medium=MEDIUM_CPU, group_idx=group)
