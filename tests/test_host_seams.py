"""The seams against the installed host, without a model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm_omni")


# Importing the host takes long: one process imports it and forks a child for each case.
PROGRAM = """
import json, os, sys
import vllm_omni.entrypoints.cli.serve
from liveserve.host import plugin, versions

def report():
    plugin.register()
    plugin.register()
    from vllm.v1.engine.core import EngineCore
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES
    from vllm_omni.engine import async_omni_engine, duplex_orchestrator
    from vllm_omni.entrypoints.duplex import serving
    return [
        hasattr(EngineCore, "liveserve_exchange"),
        getattr(OMNI_PIPELINES["qwen3_omni_moe"], "liveserve", False),
        async_omni_engine.Orchestrator.__name__,
        duplex_orchestrator.DuplexOrchestrator.__name__,
        duplex_orchestrator.DuplexSessionManager.__name__,
        serving.RealtimeEnvelope.__name__,
    ]

for name, env, before in json.loads(sys.argv[1]):
    sys.stdout.flush()
    if os.fork() == 0:
        os.environ.update(env)
        exec(before)
        print("CASE", json.dumps([name, report()]), flush=True)
        os._exit(0)
    os.wait()
"""
ON = {"LIVESERVE": "on"}
CASES = [
    ("on", ON, ""),
    ("off", {"LIVESERVE": "off"}, ""),
    ("bad configuration", ON | {"LIVESERVE_CONFIG": '{"ring_capacity": -1}'}, ""),
    ("untested version", ON, "versions.installed = lambda *names: '0.99.0'"),
    (
        "broken seam",
        ON,
        "import vllm_omni.entrypoints.duplex.serving as s; s.RealtimeEnvelope = object",
    ),
]
STOCK = [
    False,
    False,
    "Orchestrator",
    "DuplexOrchestrator",
    "DuplexSessionManager",
    "RealtimeEnvelope",
]
LIVE = [
    True,
    True,
    "LiveOrchestrator",
    "LiveDuplexOrchestrator",
    "LiveSessionManager",
    "LiveEnvelope",
]


@pytest.fixture(scope="module")
def reports():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(CASES)],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert len(lines) == len(CASES), done.stderr[-3000:]
    return dict(json.loads(line[5:]) for line in lines)


def test_on_every_seam_is_taken_and_twice_is_once(reports):
    assert reports["on"] == LIVE


@pytest.mark.parametrize("case", ["off", "bad configuration", "untested version"])
def test_otherwise_the_host_is_stock(reports, case):
    assert reports[case] == STOCK


def test_one_broken_seam_leaves_the_others_working(reports):
    # that seam is all or nothing
    assert reports["broken seam"] == [*LIVE[:4], "DuplexSessionManager", "object"]


@pytest.fixture(scope="module")
def classes():
    """Host and LiveServe classes, imported only when needed: it takes seconds."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler

    from liveserve.host import ar, plain
    from liveserve.host.scheduler_mixin import LiveRound, LiveSteps

    return SimpleNamespace(
        AsyncScheduler=AsyncScheduler,
        Scheduler=Scheduler,
        OmniARScheduler=OmniARScheduler,
        LiveRound=LiveRound,
        LiveSteps=LiveSteps,
        ar=ar,
        plain=plain,
    )


def test_our_round_runs_after_omnis_queue_work_and_before_the_core_loop(classes):
    for cls in (classes.ar.LiveARScheduler, classes.ar.LiveARAsyncScheduler):
        order = cls.__mro__
        assert order.index(classes.LiveSteps) < order.index(classes.OmniARScheduler)
        assert order.index(classes.OmniARScheduler) < order.index(classes.LiveRound)
        behind = order[order.index(classes.LiveRound) + 1 :]
        assert classes.Scheduler in behind
        assert not any(cls.__module__.startswith("vllm_omni") for cls in behind)
        assert next(cls for cls in behind if "schedule" in vars(cls)) is classes.Scheduler


@pytest.mark.parametrize("is_async", [False, True])
def test_one_name_serves_sync_and_async_engines(classes, is_async):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(async_scheduling=is_async))
    for cls in (classes.ar.LiveARScheduler, classes.plain.LiveScheduler):
        made = cls.__new__(cls, config)
        assert isinstance(made, cls)
        assert isinstance(made, classes.AsyncScheduler) is is_async


def test_the_pipeline_copy_differs_in_schedulers_and_chunk_function_alone():
    import dataclasses

    from vllm_omni.model_executor.models.qwen3_omni.pipeline import QWEN3_OMNI_PIPELINE

    from liveserve.host.pipeline import observed

    ours = observed(QWEN3_OMNI_PIPELINE)
    assert [stage.scheduler_cls for stage in ours.stages] == [
        "liveserve.host.ar.LiveARScheduler",
        "liveserve.host.ar.LiveARScheduler",
        "liveserve.host.generation.LiveGenerationScheduler",
    ]
    chunks = [stage.async_chunk_process_next_stage_input_func for stage in ours.stages]
    assert chunks[1] == "liveserve.host.chunking.talker2code2wav_async_chunk"
    name = "async_chunk_process_next_stage_input_func"
    stages = tuple(
        dataclasses.replace(stage, scheduler_cls=None, **{name: getattr(host, name)})
        for stage, host in zip(ours.stages, QWEN3_OMNI_PIPELINE.stages, strict=True)
    )
    assert dataclasses.replace(ours, stages=stages) == QWEN3_OMNI_PIPELINE
    assert observed(ours) == ours  # a stage that names a scheduler keeps it
