"""Seam: codec chunks that follow the listener's buffer, in place of the host's fixed sizes.

The host's `talker2code2wav_async_chunk` (stage_input_processors/qwen3_omni.py) decides in the
talker's engine when codec frames leave for code2wav: 4 frames, then 25 each. Our copy of the
pipeline names the function here instead. It sends the same frames with the same left context; only
where the stream is cut differs. Without a runtime, or with chunking off, it is the host's.

Runs on the engine's save thread; it only reads the runtime's views.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from vllm_omni.data_entry_keys import CodesStruct, MetaStruct, OmniPayloadStruct
from vllm_omni.model_executor.stage_input_processors import qwen3_omni

from liveserve.host.sessions import session_of
from liveserve.runtime import StageRuntime, current_runtime
from liveserve.scheduler.chunking import ChunkPolicy, ChunkProgress

# Requests remembered before those that the host has forgotten are dropped.
_MAX_STREAMS = 64


@dataclass
class _Stream:
    """A request's frames, by identity: the host starts a new list for a new request or segment."""

    frames: list[torch.Tensor]
    progress: ChunkProgress


def talker2code2wav_async_chunk(
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool = False,
) -> OmniPayloadStruct | None:
    """The next chunk of codec frames, or None if they should wait.

    Same contract as the host's function: ``codes.audio`` is int64 of shape
    [groups × (left context + new frames)], ``meta.left_context_size`` counts frames.
    """
    runtime = current_runtime()
    payload = _chunk(runtime, transfer_manager, multimodal_output, request, is_finished)
    if payload is not None and runtime is not None and runtime.profile.on:
        runtime.profile.sent(request.request_id)
    return payload


def _chunk(
    runtime: StageRuntime | None,
    transfer_manager: Any,
    multimodal_output: Any,
    request: Any,
    is_finished: bool,
) -> OmniPayloadStruct | None:
    streams: dict[str, _Stream] = transfer_manager.__dict__.setdefault("_liveserve_streams", {})
    request_id = request.external_req_id
    frames = transfer_manager.code_prompt_token_ids[request_id]
    stream = streams.get(request_id)
    if stream is not None and stream.frames is not frames:
        del streams[request_id]
        stream = None
    if stream is None:
        # A stream that began under one rule ends under it: the host's counts whole chunks.
        if frames or runtime is None or not runtime.switches.chunking or not runtime.info.token_s:
            return qwen3_omni.talker2code2wav_async_chunk(
                transfer_manager, multimodal_output, request, is_finished
            )
        _forget(streams, transfer_manager)
        stream = streams[request_id] = _Stream(frames, ChunkProgress(runtime.chunk_times))
    assert runtime is not None
    frame = _new_frame(multimodal_output, request)
    payload = _next_chunk(stream, runtime, transfer_manager, frame, request, is_finished)
    if is_finished:
        streams.pop(request_id, None)
    return payload


def _next_chunk(
    stream: _Stream,
    runtime: StageRuntime,
    transfer_manager: Any,
    frame: torch.Tensor | None,
    request: Any,
    is_finished: bool,
) -> OmniPayloadStruct | None:
    progress, now_s = stream.progress, runtime.now_s()
    frame_audio_s = runtime.info.token_s or 0.0
    if frame is not None:
        stream.frames.append(frame)
        progress.made(now_s, rested=runtime.rested(request.request_id))
    elif not is_finished:
        return None
    view = runtime.view_of(session_of(request.external_req_id))
    clock = view.clock if view is not None else None
    progress.observe(clock, now_s)
    policy, left_context = _sizes(transfer_manager, runtime)
    # Frames that wait here are no use to the listener: the stage's buffer ends where they begin.
    runtime.sent_s[request.request_id] = progress.sent * frame_audio_s
    due = progress.is_due(policy, clock, frame_audio_s, now_s)
    if not progress.pending or not (due or is_finished):
        return None
    context = min(progress.sent, left_context)
    count = progress.leave(frame_audio_s, now_s)
    runtime.sent_s[request.request_id] = progress.sent * frame_audio_s
    codes = torch.cat(stream.frames[-(context + count) :], dim=0)
    return OmniPayloadStruct(
        codes=CodesStruct(audio=codes.transpose(0, 1).reshape(-1)),
        meta=MetaStruct(
            left_context_size=context, finished=torch.tensor(is_finished, dtype=torch.bool)
        ),
    )


def _new_frame(multimodal_output: Any, request: Any) -> torch.Tensor | None:
    """The step's codec frame [1, groups], unless it is empty, silent or the stop token."""
    codes = multimodal_output.get("codes") if isinstance(multimodal_output, Mapping) else None
    frame = codes.get("audio") if isinstance(codes, Mapping) else None
    if not isinstance(frame, torch.Tensor) or not frame.numel() or not bool(frame.any()):
        return None
    params = getattr(request, "sampling_params", None)
    stops = set(getattr(params, "stop_token_ids", None) or ())
    stop = getattr(params, "stop_token_id", None)
    if stop is not None:
        stops.add(stop)
    return None if int(frame[0, 0].item()) in stops else frame


def _sizes(transfer_manager: Any, runtime: StageRuntime) -> tuple[ChunkPolicy, int]:
    """Chunk sizes and left context: the deployment's own, with our smallest in between."""
    raw = getattr(transfer_manager.connector, "config", None) or {}
    extra = raw.get("extra", raw) if isinstance(raw, Mapping) else {}
    largest = int(extra.get("codec_chunk_frames", 25))
    first = int(extra.get("initial_codec_chunk_frames") or 0) or largest
    policy = runtime.config.chunks.within(first, largest)
    return runtime.sized(policy), int(extra.get("codec_left_context_frames", 25))


def _forget(streams: dict[str, _Stream], transfer_manager: Any) -> None:
    """Drop streams whose request the host has cleaned up (aborted ones never finish here)."""
    if len(streams) >= _MAX_STREAMS:
        alive = transfer_manager.code_prompt_token_ids
        for request_id in [name for name, s in streams.items() if alive.get(name) is not s.frames]:
            del streams[request_id]
