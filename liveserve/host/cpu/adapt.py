"""Every adaptation of the host that serving on a CPU needs, in one place.

Each one says why, checks that the host looks as expected, logs one line when it acts or cannot,
and on a mismatch leaves the host as it was. All are idempotent. Written against vLLM 0.30.0 and
vLLM-Omni 0.30.0. Nothing here runs on a machine with a GPU.

Environment variables (all optional):

``LIVESERVE_CPU_START_METHOD``
    ``fork`` or ``spawn``: how stage processes start. The host's choice is ``spawn``, where every
    stage imports everything again.
``LIVESERVE_CPU_FAST_CODES``
    ``1``: replace the talker's code predictor by a one-matmul stand-in (load tests only).
``LIVESERVE_CPU_SEED_CODES``
    An integer: make the code predictor's sampling a function of this seed and its inputs.
``LIVESERVE_CPU_WARM_CHUNKS``
    ``1``: run the vocoder once on every size of chunk before serving (load tests).
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import logging
import multiprocessing
import os
import sys
import time
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

START_METHOD_ENV = "LIVESERVE_CPU_START_METHOD"
FAST_CODES_ENV = "LIVESERVE_CPU_FAST_CODES"
SEED_CODES_ENV = "LIVESERVE_CPU_SEED_CODES"
WARM_CHUNKS_ENV = "LIVESERVE_CPU_WARM_CHUNKS"
START_METHODS = ("fork", "spawn")

logger = logging.getLogger("vllm.liveserve.cpu")


class CpuConfigError(ValueError):
    """A CPU setting has a value that cannot work; the message names it and the fix."""


def default_env() -> dict[str, str]:
    """Environment defaults for a CPU server, to be set before anything imports vllm.

    For ``os.environ.setdefault``: whatever the user set wins. Serving works without them, slower:
    engines start in a minute instead of seconds.
    """
    return {
        START_METHOD_ENV: "fork",
        # Forking is only safe while no OpenMP thread pool exists in the parent.
        "OMP_NUM_THREADS": "1",
        # The worker runs inside its stage process: one process less per stage.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # The vocoder has some 25 oneDNN kernels for each size of chunk, and fifty sizes. The cache
        # holds 1,024, and without it a step takes twice as long.
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8192",
    }


def apply() -> None:
    """Install in this process what must be there before engines start.

    For the ``vllm.general_plugins`` entry point, in every process; no-op unless vLLM's platform
    is the CPU.

    Raises:
        CpuConfigError: one of the ``LIVESERVE_CPU_*`` variables has an invalid value.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    stub_cuda_wheels()
    fast_codes_wanted()
    codes_seed()
    warm_chunks_wanted()
    set_start_method(os.environ.get(START_METHOD_ENV))


# --- imports -----------------------------------------------------------------------------------


def stub_cuda_wheels() -> None:
    """Let CUDA builds of torchvision and torchaudio import on a CPU build of torch, and hide
    torchcodec's.

    Why: PyPI has only CUDA builds of these two; vLLM requires them and transformers imports them.
    Their native libraries need libc10_cuda.so, so the import raises, though nothing that a
    voice model uses is native. A stub for the one submodule that registers or loads native
    operators is enough. Where torch has CUDA or the library loads, nothing is done.
    """
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return
    _stub(
        "torchvision",
        "_C.so",
        "torchvision._meta_registrations",
        lambda: types.ModuleType("torchvision._meta_registrations"),
    )
    _stub("torchaudio", "lib/_torchaudio.so", "torchaudio._extension", _torchaudio_extension)
    _hide("torchcodec", "libtorchcodec_image.so")


def _root(package: str) -> Path | None:
    """Folder of an installed package that nobody has imported yet."""
    if package in sys.modules:
        return None
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _hide(package: str, library: str) -> None:
    """Make ``package`` look absent if its native ``library`` is there and won't load.

    Its users take an ImportError for "not installed"; a broken library raises OSError.
    """
    root = _root(package)
    if root is None or not (root / library).exists():
        return
    try:
        ctypes.CDLL(str(root / library))
    except OSError as error:
        logger.debug("LiveServe CPU: %s is hidden (%s)", package, error)
        sys.modules[package] = None  # type: ignore[assignment]


def _stub(package: str, library: str, module: str, make: Callable[[], types.ModuleType]) -> None:
    """Put ``make()`` at ``sys.modules[module]`` if ``package``'s native ``library`` won't load."""
    root = _root(package)
    if root is None or module in sys.modules:
        return
    submodule = root.joinpath(*module.split(".")[1:])
    if not (submodule.with_suffix(".py").exists() or submodule.joinpath("__init__.py").exists()):
        logger.warning("LiveServe CPU: %s has no %s; %s stays stock", package, module, package)
        return
    if not (root / library).exists():
        return
    try:
        ctypes.CDLL(str(root / library))
    except OSError as error:
        logger.debug("LiveServe CPU: stub for %s (%s)", module, error)
        sys.modules[module] = make()


def _torchaudio_extension() -> types.ModuleType:
    """What the rest of torchaudio imports from ``torchaudio._extension``, without the library."""

    def fail_if_no_align(function: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*args: object, **kwargs: object) -> None:
            raise RuntimeError(f"{function.__name__} needs torchaudio's native library")

        return fail

    module = types.ModuleType("torchaudio._extension")
    module._IS_TORCHAUDIO_EXT_AVAILABLE = False  # type: ignore[attr-defined]
    module._IS_ALIGN_AVAILABLE = False  # type: ignore[attr-defined]
    module.fail_if_no_align = fail_if_no_align  # type: ignore[attr-defined]
    return module


# --- processes ---------------------------------------------------------------------------------


def set_start_method(method: str | None) -> None:
    """Start stage processes by ``method`` (None or "": leave the host's choice).

    Why: vLLM's CPU platform forces ``spawn``, so that each of three stages imports torch, vLLM
    and transformers again: a minute on two cores, against eight seconds with ``fork``.

    Raises:
        CpuConfigError: ``method`` is not one of :data:`START_METHODS`.
    """
    if not method:
        return
    if method not in START_METHODS:
        raise CpuConfigError(
            f"{START_METHOD_ENV}={method!r}: use {' or '.join(START_METHODS)}, or unset it"
        )
    from vllm_omni.engine import stage_engine_core_proc_manager as manager

    if not callable(getattr(manager, "get_mp_context", None)):
        _mismatch("stage start method", "stage_engine_core_proc_manager.get_mp_context is gone")
        return
    if method == "fork" and os.environ.get("OMP_NUM_THREADS") != "1":
        logger.warning(
            "LiveServe CPU: %s=fork needs OMP_NUM_THREADS=1 (a forked OpenMP pool hangs); "
            "stages start by the host's method",
            START_METHOD_ENV,
        )
        return
    context = multiprocessing.get_context(method)
    manager.get_mp_context = lambda: context
    logger.debug("LiveServe CPU: stage processes start by %s", method)


# --- data types --------------------------------------------------------------------------------


class _TorchForDtype:
    """The ``torch`` module with ``bfloat16`` meaning another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.bfloat16 = dtype

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def follow_talker_dtype(dtype: torch.dtype) -> None:
    """Make the Qwen3-Omni talker build its inputs in the stage's ``dtype``.

    Why: qwen3_omni.py writes ``torch.bfloat16`` where it means the model's dtype, and a float32
    talker then fails on a mixed matmul. bfloat16 is slow on CPUs without AMX or AVX512-BF16.
    Acts on this process only, where one stage runs.
    """
    import torch

    if dtype == torch.bfloat16:
        return
    from vllm_omni.model_executor.models.qwen3_omni import qwen3_omni as model

    current = getattr(model, "torch", None)
    if isinstance(current, _TorchForDtype):
        current.bfloat16 = dtype
        return
    if current is not torch or "dtype=torch.bfloat16" not in inspect.getsource(model):
        _mismatch("talker dtype", "qwen3_omni.py has no torch.bfloat16 left to follow")
        return
    model.torch = _TorchForDtype(dtype)


# --- vocoder -----------------------------------------------------------------------------------


def warm_chunks_wanted() -> bool:
    """Whether ``LIVESERVE_CPU_WARM_CHUNKS`` asks for it.

    Raises:
        CpuConfigError: the value is not 0, 1 or empty.
    """
    return _switched(WARM_CHUNKS_ENV, "use 1 to run every size of chunk before serving, 0 not to")


def warm_vocoder(model: Any) -> None:
    """Run the vocoder of ``model``, if it has one, on every size of chunk, as the environment asks.

    Why: oneDNN compiles kernels for each new size, for longer than the chunk then takes. On a GPU
    the host has captured graphs for all sizes before it serves.
    """
    import torch

    vocoder = getattr(model, "code2wav", None)
    if not (vocoder and warm_chunks_wanted()):
        return
    if not hasattr(model, "_get_codec_frame_config") or not hasattr(vocoder, "config"):
        _mismatch("vocoder warm-up", "the model tells no chunk sizes")
        return
    largest = sum(model._get_codec_frame_config())
    began_s = time.monotonic()
    with torch.inference_mode():
        for frames in range(1, largest + 1):
            vocoder(torch.zeros(1, vocoder.config.num_quantizers, frames, dtype=torch.long))
    took_s = time.monotonic() - began_s
    logger.info("LiveServe CPU: vocoder ran chunks of 1 to %d frames in %.1f s", largest, took_s)


# --- code predictor ----------------------------------------------------------------------------


def fast_codes_wanted() -> bool:
    """Whether ``LIVESERVE_CPU_FAST_CODES`` asks for the stand-in.

    Raises:
        CpuConfigError: the value is not 0, 1 or empty.
    """
    return _switched(FAST_CODES_ENV, "use 1 for the stand-in, 0 for the model")


def _switched(name: str, fix: str) -> bool:
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise CpuConfigError(f"{name}={value!r}: {fix}")
    return value == "1"


def codes_seed() -> int | None:
    """The seed in ``LIVESERVE_CPU_SEED_CODES``, or None when it is not set.

    Raises:
        CpuConfigError: the value is not a non-negative integer.
    """
    value = os.environ.get(SEED_CODES_ENV, "")
    if not value:
        return None
    if not value.isascii() or not value.isdigit():
        raise CpuConfigError(f"{SEED_CODES_ENV}={value!r}: use a non-negative integer, or unset it")
    return int(value)


def install_code_predictor(model: Any) -> None:
    """Replace or seed the talker's code predictor, as the environment asks (default: neither).

    Why: the stock predictor draws from the global generator, so the same request sounds
    different each time; and it is two thirds of a talker step on a CPU, which load tests
    may not want to pay.
    """
    predictor = getattr(getattr(model, "talker", None), "code_predictor", None)
    seed, fast = codes_seed(), fast_codes_wanted()
    if predictor is None or (seed is None and not fast):
        return
    parameters = inspect.signature(predictor.forward).parameters
    expected = ("layer0_code", "layer0_embed", "last_talker_hidden")
    if tuple(parameters)[:3] != expected or "generators" not in parameters:
        _mismatch("code predictor", f"{type(predictor).__name__}.forward takes {list(parameters)}")
        return
    if fast:
        if not (hasattr(predictor, "lm_head") and hasattr(predictor.model, "codec_embedding")):
            _mismatch("fast codes", "the code predictor has no lm_head or codec_embedding")
            return
        predictor.forward = fast_codes(predictor)
        logger.warning("LiveServe CPU: one-matmul stand-in for the code predictor (tests only)")
    if seed is not None:
        predictor.forward = seeded(predictor.forward, seed)
        logger.info("LiveServe CPU: code predictor seeded with %d", seed)


def fast_codes(predictor: Any) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A forward for ``CodePredictorWrapper`` with one matmul for all residual codes.

    Each residual code is sampled from ``lm_head[g] @ (talker hidden + embedding of code 0)``,
    independently of the other residual codes: sensible for random weights only. Inputs and
    outputs are those of ``CodePredictorWrapper.forward`` with ``return_proj_buf``:
    codes ``[batch, groups, 1]`` int64 and embeddings ``[batch, 1 + groups, hidden]``.
    """
    import torch

    heads = torch.stack([head.weight for head in predictor.lm_head]).detach()  # [G-1, V, H]
    embeds = torch.stack([e.weight for e in predictor.model.codec_embedding]).detach()
    groups = torch.arange(heads.shape[0])

    @torch.inference_mode()
    def forward(
        layer0_code: torch.Tensor,
        layer0_embed: torch.Tensor,
        last_talker_hidden: torch.Tensor,
        *,
        generators: Sequence[torch.Generator] | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = int(layer0_code.shape[0])
        hidden = last_talker_hidden.reshape(batch, 1, -1).to(heads.dtype)
        embed0 = layer0_embed.reshape(batch, 1, -1).to(heads.dtype)
        logits = torch.einsum("bh,gvh->bgv", (hidden + embed0)[:, 0], heads).float()
        noise = torch.empty_like(logits)
        if generators is None:
            noise.exponential_()
        else:
            for row, generator in zip(noise, generators, strict=True):
                row.exponential_(generator=generator)
        codes = (logits - noise.log_()).argmax(-1)
        all_codes = torch.cat([layer0_code.reshape(batch, -1)[:, :1], codes], 1).unsqueeze(-1)
        return all_codes, torch.cat([hidden, embed0, embeds[groups, codes]], 1)

    return forward


def seeded(
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor]], seed: int
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """``forward`` with its noise drawn per row from ``(seed, layer-0 code of the row)``.

    The noise does not depend on the neighbours in the batch, on earlier calls or on float
    rounding, so a row's codes change only if its logits do.
    """
    import torch

    def seeded_forward(
        layer0_code: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = layer0_code.reshape(layer0_code.shape[0], -1)[:, 0].tolist()
        # Codes fit in 16 bits; manual_seed takes 63.
        kwargs["generators"] = [
            torch.Generator().manual_seed(((seed << 16) ^ int(code)) & (2**63 - 1))
            for code in first
        ]
        return forward(layer0_code, *args, **kwargs)

    return seeded_forward


def _mismatch(what: str, found: str) -> None:
    logger.warning("LiveServe CPU: %s not adapted, the host stays stock: %s", what, found)
