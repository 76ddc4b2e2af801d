"""The omni platform for machines without a GPU (out-of-tree, see vllm_omni/platforms/)."""

from __future__ import annotations

import psutil
import torch
from vllm.platforms.cpu import CpuPlatform
from vllm_omni.platforms.interface import OmniPlatform, OmniPlatformEnum


class CpuOmniPlatform(OmniPlatform, CpuPlatform):
    """vLLM's CPU platform with what vLLM-Omni asks of a platform on top.

    Mirrors ``vllm_omni/platforms/cuda/platform.py``. Diffusion stages are not supported.
    """

    _omni_enum = OmniPlatformEnum.OOT

    @classmethod
    def get_omni_ar_worker_cls(cls) -> str:
        return "liveserve.host.cpu.worker.CpuARWorker"

    @classmethod
    def get_omni_generation_worker_cls(cls) -> str:
        return "liveserve.host.cpu.worker.CpuGenerationWorker"

    @classmethod
    def get_default_stage_config_path(cls) -> str:
        return "vllm_omni/model_executor/stage_configs"

    @classmethod
    def get_torch_device(cls, local_rank: int | None = None) -> torch.device:
        return torch.device("cpu")

    @classmethod
    def get_device_count(cls) -> int:
        return 1

    @classmethod
    def get_device_version(cls) -> str | None:
        return None

    @classmethod
    def synchronize(cls) -> None:
        """CPU operators are synchronous: nothing to wait for."""

    @classmethod
    def supports_torch_inductor(cls) -> bool:
        # Only the talker's code predictor asks. Compiling it costs minutes and gained nothing.
        return False

    @classmethod
    def supports_talker_mtp_graph_capture(cls) -> bool:
        return False

    @classmethod
    def get_free_memory(cls, device: torch.device | None = None) -> int:
        """Available host memory in bytes."""
        return int(psutil.virtual_memory().available)

    @classmethod
    def get_device_memory(cls, device: torch.device | None = None) -> tuple[int, int]:
        """(available, total) host memory in bytes."""
        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
