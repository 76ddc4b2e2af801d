"""vLLM-Omni's three-stage pipelines on vLLM's CPU backend.

Two entry points lead here; both do nothing on a machine with a GPU:

* ``vllm.platform_plugins`` → :func:`prepare`. vLLM resolves its platform while ``import vllm``
  runs, in every process (API server, stage engines, the model registry's inspection subprocess),
  so this is the one hook that comes before anything imports torchvision. It never names a
  platform. (Setting ``VLLM_TARGET_DEVICE=cpu`` makes vLLM skip these plugins; a CPU build of vLLM
  does not need it.)
* ``vllm_omni.platform_plugins`` → :func:`register`, which names :class:`CpuOmniPlatform`.

Adaptations of the host are in :mod:`liveserve.host.cpu.adapt`, nowhere else.
"""

from __future__ import annotations

import logging

__all__ = ["prepare", "register"]

PLATFORM_CLS = "liveserve.host.cpu.platform.CpuOmniPlatform"

logger = logging.getLogger("vllm.liveserve.cpu")


def prepare() -> None:
    """Make CUDA builds of torchvision and torchaudio importable on a CPU build of torch.

    Always returns None: vLLM's own platform detection stays as it is.
    """
    from liveserve.host.cpu import adapt

    adapt.stub_cuda_wheels()


def register() -> str | None:
    """Qualified name of the CPU omni platform, or None where it does not apply.

    It applies where vLLM's platform is the CPU and the machine has no NVIDIA GPU. Mirrors the
    built-in probes of ``vllm_omni/platforms/__init__.py``, which know no CPU.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return None
    if gpu_count() > 0:
        logger.warning(
            "LiveServe: vLLM is a CPU build but this machine has a GPU; the CPU omni platform "
            "stays off. Install liveserve[gpu] to serve on the GPU."
        )
        return None
    return PLATFORM_CLS


def gpu_count() -> int:
    """Number of NVIDIA GPUs that the driver reports; 0 without a driver."""
    from vllm.utils.import_utils import import_pynvml

    pynvml = import_pynvml()
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
