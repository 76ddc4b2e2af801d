"""CPU workers and model runners for vLLM-Omni's AR and generation stages.

The method resolution order does the work: vLLM-Omni's runner comes first, then
``OmniGPUModelRunner``, then vLLM's ``CPUModelRunner``, then ``GPUModelRunner``; so every
``super()`` call in vLLM-Omni's code reaches vLLM's CPU override before its GPU one.
"""

from __future__ import annotations

# First, by its own header: this module binds shared memory for the CPU workers.
import vllm.v1.worker.cpu_worker as cpu_worker  # isort: skip

from typing import Any

from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from liveserve.host.cpu import adapt
from liveserve.host.cpu.record import RecordingRunner


class _CpuRunnerMixin(RecordingRunner):
    """Model loading shared by both runners."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        config = self.compilation_config  # type: ignore[attr-defined]
        # OmniGPUModelRunner._init_talker_mtp takes max() of it; the CPU platform leaves None.
        config.max_cudagraph_capture_size = config.max_cudagraph_capture_size or 0
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        adapt.install_code_predictor(self.model)  # type: ignore[attr-defined]
        adapt.warm_vocoder(self.model)  # type: ignore[attr-defined]
        self.open_record(self.model_config.stage_id)  # type: ignore[attr-defined]


class CpuARModelRunner(_CpuRunnerMixin, GPUARModelRunner, CPUModelRunner):
    """Autoregressive stages: thinker and talker."""


class CpuGenerationModelRunner(_CpuRunnerMixin, GPUGenerationModelRunner, CPUModelRunner):
    """Generation stages: code2wav."""


class _CpuOmniWorker(OmniWorkerMixin, cpu_worker.CPUWorker):
    model_runner_cls: type[CPUModelRunner]

    def init_device(self) -> None:
        """Mirrors ``GPUARWorker.init_device``: CPUWorker's, with the omni runner class."""
        self.use_v2_model_runner = False  # model runner V2 has no omni runner and needs a GPU
        adapt.follow_talker_dtype(self.model_config.dtype)
        stock = cpu_worker.CPUModelRunner
        cpu_worker.CPUModelRunner = self.model_runner_cls
        try:
            super().init_device()
        finally:
            cpu_worker.CPUModelRunner = stock


class CpuARWorker(_CpuOmniWorker):
    model_runner_cls = CpuARModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    model_runner_cls = CpuGenerationModelRunner
