"""The host's own OffloadingConnector on a CPU, as a baseline for comparisons.

Its `CPUOffloadingSpec` refuses machines without a GPU. This one copies with torch, at once and
without a link to wait for, which is the best that the connector could get. Named in the connector's
extra configuration as ``spec_name`` and ``spec_module_path``
(vllm/v1/kv_offload/factory.py); scheduling, look-up and eviction are all the host's.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class CpuHostOffloadingSpec(CPUOffloadingSpec):
    """`CPUOffloadingSpec` whose worker runs without a GPU."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return CpuHostOffloadingWorker(kv_caches, self.num_chunks, self.blocks_per_chunk)


class CpuHostOffloadingWorker(OffloadingWorker):
    """Copies blocks when it is asked to.

    Args:
        kv_caches: tensors [blocks, bytes] of one group of full-attention layers.
        num_chunks: chunks of host memory.
        blocks_per_chunk: must be 1.

    Raises:
        ValueError: several groups, or chunks of several blocks.
    """

    def __init__(
        self, kv_caches: CanonicalKVCaches, num_chunks: int, blocks_per_chunk: int
    ) -> None:
        if blocks_per_chunk != 1 or len(kv_caches.group_data_refs) != 1:
            raise ValueError(
                "CpuHostOffloadingSpec copies single blocks of models with one kind of layer; "
                f"got {blocks_per_chunk} blocks per chunk and {len(kv_caches.group_data_refs)} "
                "groups of layers"
            )
        self._cache = [kv.tensor.view(torch.int8) for kv in kv_caches.tensors]
        self._host = [
            torch.zeros((num_chunks, tensor.shape[1]), dtype=torch.int8) for tensor in self._cache
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._cache, src_spec.block_ids, self._host, dst_spec.block_ids)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._host, src_spec.block_ids, self._cache, dst_spec.block_ids)

    def _copy(self, job_id: int, sources: Any, from_ids: Any, targets: Any, to_ids: Any) -> bool:
        start_s = time.monotonic()
        source_ids, target_ids = torch.from_numpy(from_ids).long(), torch.from_numpy(to_ids).long()
        for source, target in zip(sources, targets, strict=True):
            target[target_ids] = source[source_ids]
        moved = sum(len(from_ids) * tensor.shape[1] for tensor in self._host)
        self._done.append(TransferResult(job_id, True, moved, time.monotonic() - start_s))
        return True

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Every copy is done by the time that it was asked for."""
