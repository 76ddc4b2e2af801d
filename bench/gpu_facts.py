"""What NVML tells of a GPU while a benchmark runs: clocks, and the link's generation and width."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def gpu_facts(device: str) -> dict[str, Any] | None:
    """Facts of the GPU that torch calls ``device``, right now; None: no GPU, or no pynvml.

    A link that idles may report a lower generation than it has under load: ask right after copies.
    What the driver does not tell is None.
    """
    if not device.startswith("cuda"):
        return None
    try:
        import pynvml  # type: ignore[import-not-found]
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None

    def ask(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except pynvml.NVMLError:
            return None

    try:
        handle = _handle_of(pynvml, device)
        return {
            "sm_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
            "memory_clock_mhz": ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM),
            "pcie_generation": ask(pynvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            "pcie_generation_max": ask(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            "pcie_width": ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            "pcie_width_max": ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            "temperature_c": ask(
                pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU
            ),
            "driver": ask(pynvml.nvmlSystemGetDriverVersion),
            "sms": torch.cuda.get_device_properties(device).multi_processor_count,
        }
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _handle_of(pynvml: Any, device: str) -> Any:
    """By UUID: torch counts only the GPUs of CUDA_VISIBLE_DEVICES, NVML all."""
    index = torch.device(device).index or 0
    uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
    if uuid is not None:
        try:
            return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except pynvml.NVMLError:
            pass
    return pynvml.nvmlDeviceGetHandleByIndex(index)
