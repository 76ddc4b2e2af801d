"""Seam: our scheduler classes in the host's stage topologies.

The host refuses `scheduler_cls` in YAML and on the command line for omni stages; a registered
pipeline may set it (vllm_omni/config/pipeline_registry.py).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from liveserve.host.seam import expect

# Pipelines whose stages were run under our schedulers.
TESTED_PIPELINES = ("qwen3_omni_moe",)

_SCHEDULERS = {
    "LLM_AR": "liveserve.host.ar.LiveARScheduler",
    "LLM_GENERATION": "liveserve.host.generation.LiveGenerationScheduler",
}


# The host's chunk function and ours, see liveserve/host/chunking.py.
_HOST_CHUNKS = (
    "vllm_omni.model_executor.stage_input_processors.qwen3_omni.talker2code2wav_async_chunk"
)
_OUR_CHUNKS = "liveserve.host.chunking.talker2code2wav_async_chunk"


def observed(pipeline: Any) -> Any:
    """A copy of ``pipeline`` (a PipelineConfig) with our schedulers in the stages that use the
    host's default ones, and our chunk function where the host's is; a stage that names others
    keeps them.
    """
    return dataclasses.replace(pipeline, stages=tuple(map(_observed_stage, pipeline.stages)))


def _observed_stage(stage: Any) -> Any:
    changes = {}
    if stage.scheduler_cls is None and stage.execution_type.name in _SCHEDULERS:
        changes["scheduler_cls"] = _SCHEDULERS[stage.execution_type.name]
    if stage.async_chunk_process_next_stage_input_func == _HOST_CHUNKS:
        changes["async_chunk_process_next_stage_input_func"] = _OUR_CHUNKS
    return dataclasses.replace(stage, **changes)


def install() -> None:
    from vllm_omni.config import pipeline_registry, stage_config

    names = {member.name for member in stage_config.StageExecutionType}
    expect(names >= _SCHEDULERS.keys(), "StageExecutionType lost LLM_AR or LLM_GENERATION")
    for model_type in TESTED_PIPELINES:
        entry = pipeline_registry.OMNI_PIPELINES.get(model_type)
        expect(entry is not None, f"pipeline {model_type} is not registered")
        if getattr(entry, "liveserve", False):
            continue
        # Not through register_pipeline(): it warns of "clobbering" what we only wrap.
        pipeline_registry.OMNI_PIPELINES[model_type] = _wrap(entry)


def _wrap(entry: Any) -> Any:
    """A resolver that answers as ``entry`` (a config or a resolver) does, with our schedulers."""
    resolve = entry if callable(entry) else (lambda _hf_config: entry)

    @functools.wraps(resolve)
    def resolver(hf_config: Any) -> Any:
        pipeline = resolve(hf_config)
        return None if pipeline is None else observed(pipeline)

    resolver.liveserve = True  # type: ignore[attr-defined]
    return resolver
