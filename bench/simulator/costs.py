"""What deployments cost: presets from public figures, files, and how sure each figure is.

A preset lists its figures by their path in `CostModel`, each with its source and a *spread*: the
factor within which the truth is believed to lie, up or down. Both end up in ``CostModel.sources``
("…; within 1.3x"), so that a saved model says where it is from, and `varied` can try what a result
is worth under that doubt. Figures without a spread are settings of the deployment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from liveserve.bench.result_file import write_whole
from liveserve.bench.simulator.model import CostModel, ModelError, check_costs, read_costs

_SPREAD = re.compile(r"; within (\d+(?:\.\d+)?)x$")


class Figure(NamedTuple):
    """One figure of a preset: ``spread`` 1 is exact, a choice of the deployment or a definition."""

    value: float
    source: str
    spread: float = 1.0


# ---- Qwen3-Omni-30B-A3B, thinker DP=4, talker DP=4 with a vocoder each, on 8 H200 --------------

# vLLM-Omni's own benchmark of 2026-08 (vllm-project/vllm-omni#6201): H100, one thinker, two
# talkers each sharing its GPU with a vocoder, 2500 tokens asked and 900 answered.
_PERF = "vllm-omni#6201 (H100, c=8/16/24/32)"

_QWEN3: dict[str, Figure] = {
    "thinker.step.fixed_s": Figure(
        5.5e-3,
        "TPOT of one stream: 4.5 ms (vllm-omni#2997), 7.0 ms median (#3695, nearest the paper's "
        "version)",
        1.35,
    ),
    "thinker.step.per_request_s": Figure(
        1.5e-4,
        f"mean TPOT 7.70/10.65/12.74/15.16 ms, {_PERF}: 0.31 ms a request, less the KV it reads, "
        "scaled by the H200's 1.43x bandwidth",
        1.6,
    ),
    "thinker.step.per_context_token_s": Figure(
        2.9e-8, "96 KiB a token at 70 % of 4.8 TB/s", 1.3
    ),
    "thinker.step.per_prefill_token_s": Figure(
        2.5e-5,
        "40,000 tokens/s: 3.3e9 active parameters at a quarter of 989 TFLOP/s; agrees with TTFT "
        "135 ms at 2500 tokens less 40 ms of preprocessing (vllm-omni#4289, c=1)",
        1.8,
    ),
    "thinker.step.per_prefill_pair_s": Figure(
        1.4e-9, "48 layers x 32 heads x 128 x 4 FLOP at 55 % of 989 TFLOP/s", 1.6
    ),
    "thinker.replicas": Figure(4, "the paper's deployment"),
    "thinker.max_requests": Figure(64, "deploy/qwen3_omni_moe.yaml of vLLM-Omni 0.30"),
    "thinker.max_step_tokens": Figure(32768, "deploy/qwen3_omni_moe.yaml"),
    "thinker.block_tokens": Figure(16, "vLLM's default"),
    "thinker.kv_blocks": Figure(
        37_000, "141 GB x 0.9, less 64 GB of weights and encoders and 5 GB of activations", 1.15
    ),
    "thinker.kv_bytes_per_token": Figure(98_304, "48 layers x 2 x 4 KV heads x 128 x 2 bytes"),
    "talker.step.fixed_s": Figure(
        9.2e-3,
        "with one request 9.95 ms: the paper makes 65.9 s of audio in 8.2 s on an H200; 8.7 ms "
        "(RTF 0.109, vllm-omni#6201, H100); sglang-omni#1018 has 7.5 ms on an H200",
        1.25,
    ),
    "talker.step.per_request_s": Figure(
        7.5e-4,
        f"RTF 0.169/0.209/0.240/0.279, {_PERF}, 4/8/12/16 requests a talker: 0.73 ms each, with "
        "the vocoder on the same GPU in it; sglang-omni#1018 has under 0.1 ms without",
        2.0,
    ),
    "talker.step.per_context_token_s": Figure(6e-9, "20 KiB a token at 70 % of 4.8 TB/s", 2.0),
    "talker.step.per_prefill_token_s": Figure(
        4e-6, "0.3e9 active parameters, by the thinker's rate; launch-bound", 2.5
    ),
    "talker.step.per_prefill_pair_s": Figure(3e-10, "20 layers x 16 heads, by the thinker's", 2.0),
    "talker.replicas": Figure(4, "the paper's deployment"),
    "talker.max_requests": Figure(64, "deploy/qwen3_omni_moe.yaml"),
    "talker.max_step_tokens": Figure(32768, "deploy/qwen3_omni_moe.yaml"),
    "talker.block_tokens": Figure(16, "vLLM's default"),
    "talker.kv_blocks": Figure(229_000, "141 GB x 0.6, less 8 GB of weights", 1.3),
    "talker.kv_bytes_per_token": Figure(20_480, "20 layers x 2 x 2 KV heads x 128 x 2 bytes"),
    "code2wav.fixed_s": Figure(
        6.4e-3,
        "9 ms for one chunk: eager as in the paper's version (graphs came with vllm-omni#3732); "
        "11 ms eager in sglang-omni#1675 (Qwen3-TTS), a few ms with graphs",
        2.0,
    ),
    "code2wav.per_frame_s": Figure(
        5.2e-5,
        "2, 4, 8 chunks in a step gain 1.55x, 2.0x, 2.64x (sglang-omni#1018): 29 % of a step of "
        "50 frames is each chunk's own",
        2.0,
    ),
    "code2wav.replicas": Figure(4, "one beside each talker"),
    "code2wav.max_requests": Figure(64, "deploy/qwen3_omni_moe.yaml"),
    "link.gbps": Figure(52.0, "39-52 GB/s by pages of 64 KiB (vLLM#42212), 55.6 at most", 1.2),
    "link.latency_s": Figure(2e-4, "assumed", 2.0),
    "dram_bytes": Figure(256 << 30, "half of the paper's 2 TiB, over four thinkers", 1.0),
    "frame_rate_hz": Figure(12.5, "Qwen3-Omni's codec"),
    "talker_prompt_tokens": Figure(16, "speech and speaker tokens of the talker's prompt", 1.0),
    "talker_sees_prompt": Figure(True, "Qwen3-Omni's talker reads the thinker's whole prompt"),
    "noise_s": Figure(0.3, "no figure found; without noise it says nothing"),
    "talker_starts_after": Figure(1, "async_chunk of vLLM-Omni: from the first token on"),
    "first_chunk_frames": Figure(4, "deploy/qwen3_omni_moe.yaml"),
    "chunk_frames": Figure(25, "deploy/qwen3_omni_moe.yaml"),
    "left_context_frames": Figure(25, "deploy/qwen3_omni_moe.yaml"),
    "handover_s": Figure(
        0.02,
        "of the 195 ms from first text to first audio at c=8 (vllm-omni#6201) the steps explain "
        "about 105: the other 90 are two handovers and the delivery",
        2.0,
    ),
    "deliver_s": Figure(0.05, "see handover_s", 2.0),
    "endpoint_s": Figure(0.5, "server VAD's silence_duration_ms, vLLM-Omni's default"),
    "encode_s": Figure(
        0.04, "TTFT 135 ms at 2500 tokens (vllm-omni#4289, c=1) less a prefill of 63 ms and "
        "queues", 2.0,
    ),
    "encode_token_s": Figure(
        2e-5, "the encoders have about as many FLOP a token as the thinker", 2.5
    ),
    "speech_start_s": Figure(0.1, "two to three windows of 32 ms of the server's VAD", 1.5),
    "max_answer_tokens": Figure(2048, "deploy/qwen3_omni_moe.yaml"),
    "max_answer_frames": Figure(4096, "deploy/qwen3_omni_moe.yaml"),
    "signal_s": Figure(0.015, "flush interval of 10 ms and half a step", 1.5),
}  # fmt: skip

# ---- Ming-flash-omni 2.0, thinker TP=2 DP=2, talker DP=4, on 8 H200 ---------------------------

_MING_BENCH = "sglang-omni's cookbook, ming_omni.md"

_MING: dict[str, Figure] = {
    "thinker.step.fixed_s": Figure(
        8.5e-3,
        f"GSM8K in 1.63/2.06/3.26 s at c=1/4/16 on 4 H100 ({_MING_BENCH}), at 200 tokens an "
        "answer (assumed) 7.7 ms + 0.54 a request; TP=2 on H200 instead of TP=4 on H100",
        1.6,
    ),
    "thinker.step.per_request_s": Figure(5.5e-4, "as thinker.step.fixed_s", 1.6),
    "thinker.step.per_context_token_s": Figure(
        1e-8, "32 KiB a token and rank at 70 % of 4.8 TB/s", 1.5
    ),
    "thinker.step.per_prefill_token_s": Figure(
        3.1e-5, "6.1e9 active parameters by Qwen3-Omni's rate, two GPUs at 80 %", 2.0
    ),
    "thinker.step.per_prefill_pair_s": Figure(
        4.8e-10, "32 layers x 32 heads x 128 x 4 FLOP at 55 % of 2 x 989 TFLOP/s", 1.8
    ),
    "thinker.replicas": Figure(2, "the paper's deployment"),
    "thinker.max_requests": Figure(
        64, "as Qwen3-Omni; vLLM-Omni 0.30's deploy file has 1, with which nothing is batched"
    ),
    "thinker.max_step_tokens": Figure(32768, "deploy/ming_flash_omni.yaml"),
    "thinker.block_tokens": Figure(16, "vLLM's default"),
    "thinker.kv_blocks": Figure(
        38_000, "2 x 141 GB x 0.9, less 206 GB of weights and 8 GB of activations", 1.3
    ),
    "thinker.kv_bytes_per_token": Figure(
        65_536, "Ling-flash-2.0: 32 layers x 2 x 4 KV heads x 128 x 2 bytes, both ranks"
    ),
    "talker.step.fixed_s": Figure(
        1e-3,
        f"9.7 audio-s/s streaming on an H200, no more with more requests ({_MING_BENCH}): 8.2 ms "
        "a frame of 1/12.5 s, nearly all of it each request's own",
        2.0,
    ),
    "talker.step.per_request_s": Figure(7.2e-3, "as talker.step.fixed_s", 1.5),
    "talker.step.per_prefill_token_s": Figure(4e-6, "0.5e9 parameters, as Qwen3-Omni's", 2.5),
    "talker.replicas": Figure(4, "the paper's deployment"),
    "talker.max_requests": Figure(4, "vllm-omni#4284; released versions have 1"),
    "talker.max_step_tokens": Figure(32768, "as the thinker"),
    "talker.block_tokens": Figure(16, "vLLM's default"),
    "talker.kv_blocks": Figure(100_000, "never short: 12 KiB a token", 1.0),
    "talker.kv_bytes_per_token": Figure(12_288, "24 layers x 2 x 2 KV heads x 64 x 2 bytes"),
    "code2wav.fixed_s": Figure(3e-3, "AudioVAE; most of it is in the talker's figure", 3.0),
    "code2wav.per_frame_s": Figure(1e-4, "as code2wav.fixed_s", 3.0),
    "code2wav.replicas": Figure(4, "one beside each talker"),
    "code2wav.max_requests": Figure(4, "as the talker"),
    "link.gbps": _QWEN3["link.gbps"],
    "link.latency_s": _QWEN3["link.latency_s"],
    "dram_bytes": Figure(512 << 30, "half of the paper's 2 TiB, over two thinkers"),
    "frame_rate_hz": Figure(12.5, "a unit of account: the talker makes continuous latents"),
    "talker_prompt_tokens": Figure(64, "speaker prompt and text, assumed"),
    "talker_sees_prompt": Figure(False, "the talker reads the answer's text"),
    "noise_s": _QWEN3["noise_s"],
    "talker_starts_after": Figure(8, "a segment of text, assumed"),
    "first_chunk_frames": Figure(4, f"about 20 chunks for 6.3 s ({_MING_BENCH})"),
    "chunk_frames": Figure(4, f"about 20 chunks for 6.3 s ({_MING_BENCH})"),
    "left_context_frames": Figure(0, "the VAE keeps its state"),
    "handover_s": _QWEN3["handover_s"],
    "deliver_s": Figure(
        0.05,
        f"as Qwen3-Omni; first audio after 236 ms at c=1 ({_MING_BENCH})",
        2.0,
    ),
    "endpoint_s": _QWEN3["endpoint_s"],
    "encode_s": Figure(0.04, "as Qwen3-Omni", 2.0),
    "encode_token_s": Figure(3e-5, "as Qwen3-Omni, a larger vision tower", 2.5),
    "speech_start_s": _QWEN3["speech_start_s"],
    "max_answer_tokens": Figure(2048, "deploy/ming_flash_omni.yaml"),
    "max_answer_frames": Figure(8192, "no limit of its own"),
    "signal_s": _QWEN3["signal_s"],
}


def costs_of(figures: Mapping[str, Figure], name: str) -> CostModel:
    """The cost model of ``figures``, with their sources.

    Raises:
        ModelError: a path names no figure, or a value makes no sense.
    """
    sources = {path: _described(figure) for path, figure in figures.items()}
    fields: dict[str, Any] = {"name": name, "sources": sources}
    for path, figure in figures.items():
        _set(fields, path, figure.value)
    return _converted(fields, f"cost model {name!r}")


def _described(figure: Figure) -> str:
    return figure.source + (f"; within {figure.spread:g}x" if figure.spread > 1 else "")


def _set(fields: dict[str, Any], path: str, value: Any) -> None:
    *above, last = path.split(".")
    for part in above:
        fields = fields.setdefault(part, {})
        if not isinstance(fields, dict):
            raise ModelError(f"cost model: {path} is no figure")
    fields[last] = value


def _converted(fields: Mapping[str, Any], where: str) -> CostModel:
    try:
        costs = msgspec.convert(fields, CostModel, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"{where}: {error}") from None
    check_costs(costs)
    return costs


_FOLDER = Path(__file__).parent / "presets"
_FIGURES = {"qwen3-omni-h200": _QWEN3, "ming-flash-omni-h200": _MING}
PRESETS = (*_FIGURES, "cpu-tiny")


def load_costs(name: str, changes: Mapping[str, Any] | None = None) -> CostModel:
    """A cost model: one of `PRESETS`, or a JSON file that `save_costs` or ``liveserve calibrate``
    wrote; then ``changes`` by their paths (``{"thinker.replicas": 8}``; strings are converted).

    Raises:
        ModelError: there is none, or a figure is unknown or makes no sense; names it.
    """
    if name in _FIGURES:
        costs = costs_of(_FIGURES[name], name)
    elif name in PRESETS:
        costs = read_costs(_FOLDER / f"{name}.json")
    elif name.endswith(".json"):
        costs = read_costs(Path(name))
    else:
        raise ModelError(f"cost model {name!r}: use {', '.join(PRESETS)}, or a .json file")
    if not changes:
        return costs
    fields = msgspec.to_builtins(costs)
    for path, value in changes.items():
        _set(fields, path, value)
        fields["sources"][path] = "set by hand"
    return _converted(fields, f"cost model {name!r}")


def save_costs(path: Path, costs: CostModel) -> None:
    """Write ``costs`` as JSON, in one step.

    Raises:
        ModelError: a figure makes no sense; nothing is written.
    """
    check_costs(costs)
    write_whole(path, msgspec.json.format(msgspec.json.encode(costs), indent=1).decode() + "\n")


def spreads(costs: CostModel) -> dict[str, float]:
    """The factor within which each uncertain figure is believed to lie, by its path."""
    found = {path: _SPREAD.search(source) for path, source in costs.sources.items()}
    return {path: float(match[1]) for path, match in found.items() if match is not None}


def varied(costs: CostModel, seed: int) -> CostModel:
    """``costs`` with every uncertain figure drawn anew, log-uniformly within its spread: what a
    result is worth is seen by simulating some of these.
    """
    draw = np.random.default_rng(seed)
    fields = msgspec.to_builtins(costs)
    for path, spread in spreads(costs).items():
        value: Any = fields
        for part in path.split("."):
            value = value[part]
        new = value * math.exp(draw.uniform(-1, 1) * math.log(spread))
        _set(fields, path, max(1, round(new)) if isinstance(value, int) else new)
    return _converted(fields, f"cost model {costs.name!r}, varied")
