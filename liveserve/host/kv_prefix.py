"""The prefix cache's keys of a prompt that no request has yet: text tokens alone.

Mirrors `get_request_block_hasher` of vllm/v1/core/kv_cache_utils.py for a prompt without images,
audio, adapters or a salt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import hash_block_tokens, make_block_hash_with_group_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def prefix_keys(
    vllm_config: VllmConfig, block_tokens: int
) -> Callable[[Sequence[int]], list[bytes]]:
    """Makes the keys of the full blocks of ``block_tokens`` tokens of a prompt's ids."""
    hash_fn = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)

    def keys_of(token_ids: Sequence[int]) -> list[bytes]:
        keys: list[bytes] = []
        parent = None
        for end in range(block_tokens, len(token_ids) + 1, block_tokens):
            parent = hash_block_tokens(hash_fn, parent, token_ids[end - block_tokens : end])
            keys.append(make_block_hash_with_group_id(parent, 0))
        return keys

    return keys_of
