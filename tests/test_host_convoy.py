"""Fifty requests at once over one long prefix: never slower than without the tier."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tiny_text

pytest.importorskip("vllm")

from liveserve.host import kv_flags

pytestmark = [pytest.mark.host, pytest.mark.alone]

BLOCK, PREFIX, REQUESTS = 32, 10_240, 50


def convoy(folder: Path) -> dict[str, Any]:
    """Rounds with the prefix in DRAM alone, and with the tier switched off, in turn."""
    from vllm.config import KVTransferConfig

    tiny_text.write_model(folder, positions=PREFIX + 256)
    chosen = kv_flags.transfer_config(None) | {"kv_connector_extra_config": {"dram_gb": 0.1}}
    llm = tiny_text.make(
        folder,
        tiny_text.OURS,
        kv_transfer_config=KVTransferConfig(**chosen),
        enable_prefix_caching=True,
        kv_cache_memory_bytes=1 << 26,
        max_model_len=PREFIX + 128,
        max_num_seqs=REQUESTS,
        num_gpu_blocks_override=PREFIX // BLOCK + 4 * REQUESTS,
    )
    driver = tiny_text.Driver(llm)
    runtime, manager = driver.scheduler.liveserve, driver.scheduler.connector.kv_manager
    shared = tiny_text.prompt(1, PREFIX)

    def run(tag: str, *, tier: bool, requests: int = REQUESTS) -> tuple[float, list[list[int]]]:
        switches = msgspec.structs.replace(runtime.switches, kv_load=tier, kv_store=tier)
        runtime.flip(switches)
        assert driver.scheduler.reset_prefix_cache()
        names = [f"{tag}{index}" for index in range(requests)]
        for index, name in enumerate(names):
            driver.add(name, shared + tiny_text.prompt(20 + index, 20), tiny_text.params(4))
        began_s = time.monotonic()
        driver.until(lambda: all(name in driver.finished for name in names))
        took_s = time.monotonic() - began_s
        driver.until(lambda: not driver.scheduler.has_requests())
        return took_s, [driver.tokens[name] for name in names]

    run("fill", tier=True, requests=1)
    rounds = [
        [run(f"with{index}", tier=True), run(f"without{index}", tier=False)] for index in range(2)
    ]
    manager.check()
    said = [made for pair in rounds for _, made in pair]
    return {
        "with_s": min(pair[0][0] for pair in rounds),
        "without_s": min(pair[1][0] for pair in rounds),
        "same": all(made == said[0] for made in said),
        "loaded": manager.report().loaded,
        "held": len(manager.held),
    }


def test_a_shared_prefix_is_loaded_once_and_faster_than_it_is_computed(tmp_path):
    found = tiny_text.findings(convoy, tmp_path)
    assert found["same"]
    assert found["loaded"] >= 2 * (PREFIX // BLOCK)  # in both rounds, once for all fifty
    assert found["loaded"] < 2 * (PREFIX // BLOCK) + 2 * REQUESTS * 2
    assert found["held"] == 0
    assert found["with_s"] <= found["without_s"], found
