"""A KV connector for tests: every block of a finished request moves to another block of the GPU.

Its companion rows travel through a slot of a `RowStore`, its KV directly; what the old block held
is overwritten before the rows are restored. So every later hit reads restored rows.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from liveserve.host import omni_rows

logger = logging.getLogger("vllm.rows_mover")
SLOTS = 512
MOVED = "rows_mover moved"


@dataclass
class Moves(KVConnectorMetadata):
    moves: list[tuple[int, int, int]] = field(default_factory=list)  # old block, slot, new block


class RowsMover(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.blocks = kv_cache_config.num_blocks
        self.todo: list[Any] = []
        self.flying: list[tuple[Any, Any]] = []
        self.rows = None
        if role is KVConnectorRole.WORKER:
            self.rows = omni_rows.companion(vllm_config, num_slots=SLOTS, checksums=True)

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # --- scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return (None if self.todo or self.flying else 0), False

    def update_state_after_alloc(self, *args: Any) -> None:
        pass

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        hashed = [self.pool.blocks[i] for i in block_ids[0] if self.pool.blocks[i].block_hash]
        self.pool.touch(hashed)
        self.todo += hashed
        return False, None

    def build_connector_meta(self, scheduler_output: Any) -> Moves:
        for old, new in self.flying:  # one batch under way at a time: the last step did it
            self.pool.move_block_hashes(old, new)
            self.pool.free_blocks([new, old])
        new_blocks = self.pool.get_new_blocks(len(self.todo)) if self.todo else []
        self.flying = list(zip(self.todo, new_blocks, strict=True))
        self.todo = []
        return Moves(
            [(old.block_id, i % SLOTS, new.block_id) for i, (old, new) in enumerate(self.flying)]
        )

    def has_pending_push_work(self) -> bool:
        return bool(self.todo or self.flying)

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.caches = [
            cache.movedim(cache.shape.index(self.blocks), 0) for cache in kv_caches.values()
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        moves = self._get_connector_metadata().moves
        if not moves:
            return
        old, slots, new = (list(ids) for ids in zip(*moves, strict=True))
        assert not set(old) & set(new)
        with torch.inference_mode():
            for cache in self.caches:
                cache[new] = cache[old]
                cache[old] = 777.0
        self.rows.save(old, slots)
        mirror = self.rows._mirror()._pool._caches
        with torch.inference_mode():
            for key in mirror:
                mirror[key][old] = 777.0
        self.rows.restore(slots, new)
        logger.warning(
            "%s %d blocks, %d bytes of rows each, %d expected, keys %s", MOVED, len(moves),
            self.rows.store.bytes_per_slot,
            omni_rows.expected_bytes_per_block(self._vllm_config), sorted(mirror),
        )  # fmt: skip

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
