"""What the host's configuration says of the stage that an engine runs."""

from __future__ import annotations

import math
from typing import Any

from liveserve.runtime import StageInfo

# vLLM-Omni's code2wav stages answer at this rate; the codec's config holds only the upsampling.
CODEC_SAMPLE_RATE_HZ = 24_000


def codec_frame_s(hf_config: Any) -> float | None:
    """Seconds of audio per codec frame, from the code2wav config (0.08 s for Qwen3-Omni)."""
    config = getattr(hf_config, "code2wav_config", None)
    rates = [
        *(getattr(config, "upsample_rates", None) or ()),
        *(getattr(config, "upsampling_ratios", None) or ()),
    ]
    return math.prod(rates) / CODEC_SAMPLE_RATE_HZ if rates else None


def stage_info(vllm_config: Any, kv_cache_config: Any) -> StageInfo:
    """Describe the stage; fields that a plain vLLM engine lacks get neutral values."""
    model = vllm_config.model_config
    name = getattr(model, "model_stage", None) or "llm"
    blocks = max(1, getattr(kv_cache_config, "num_blocks", 1) or 1)
    kv_bytes = sum(tensor.size for tensor in getattr(kv_cache_config, "kv_cache_tensors", ()))
    return StageInfo(
        stage_id=getattr(model, "stage_id", 0) or 0,
        name=name,
        token_s=codec_frame_s(model.hf_config) if name == "talker" else None,
        routes_audio=name == "code2wav",
        kv_block_bytes=kv_bytes // blocks,
        slots=getattr(vllm_config.scheduler_config, "max_num_seqs", 0) or 0,
    )
