"""What a load generator asks the server beside the sessions: its model and its counters."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

GENERATION_TOKENS = "vllm:generation_tokens_total"
"""The host's counter, labelled by stage and replica (``vllm_omni/metrics/stat_logger.py``)."""
PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
"""The host's counter of prompt tokens, by where their KV came from."""


class ServerUnreachable(Exception):
    """No server answers at the address, or it is not one that serves models."""


async def first_model(http: aiohttp.ClientSession, url: str) -> str:
    """Name of the first model that the server at ``url`` lists.

    Raises:
        ServerUnreachable: with one line that says what to do.
    """
    address = url.rstrip("/") + "/v1/models"
    try:
        async with http.get(address, timeout=aiohttp.ClientTimeout(total=10)) as response:
            response.raise_for_status()
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError) as exc:
        raise ServerUnreachable(
            f"--url {url}: no model server answers at {address} ({type(exc).__name__}: {exc}); "
            "start one with 'liveserve serve MODEL', or correct --url"
        ) from exc


async def exposition(http: aiohttp.ClientSession, url: str) -> str:
    """The server's Prometheus metrics as text; empty where it gives none."""
    try:
        address = url.rstrip("/") + "/metrics"
        async with http.get(address, timeout=aiohttp.ClientTimeout(total=10)) as response:
            response.raise_for_status()
            return await response.text()
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return ""


def kv_totals(url: str) -> dict[str, Any]:
    """``GET /liveserve/kv`` of the thinker; empty where there is none."""
    try:
        with urllib.request.urlopen(url.rstrip("/") + "/liveserve/kv", timeout=10) as response:
            engines = json.load(response)["engines"]
        return dict(engines[0].get("kv") or {})
    except (OSError, ValueError, LookupError, TypeError):
        return {}


async def stage_totals(http: aiohttp.ClientSession, url: str) -> dict[str, dict[str, float]]:
    """What each stage of a LiveServe server made and wasted in responses that ended, so far; empty
    for any other server.
    """
    try:
        address = url.rstrip("/") + "/liveserve/sessions"
        async with http.get(address, timeout=aiohttp.ClientTimeout(total=10)) as response:
            response.raise_for_status()
            return dict((await response.json())["totals"]["stages"])
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError, LookupError, TypeError):
        return {}


def parse_stage_tokens(exposition: str) -> dict[str, float]:
    """Tokens that each stage generated so far, summed over replicas, in a Prometheus text."""
    return {
        stage: sum(by_source.values())
        for stage, by_source in _by_stage(exposition, GENERATION_TOKENS).items()
    }


def parse_prompt_tokens(exposition: str) -> dict[str, dict[str, float]]:
    """Prompt tokens of each stage so far, by where their KV came from: ``local_compute`` was
    prefilled, ``local_cache_hit`` found in the prefix cache, ``external_kv_transfer`` loaded by a
    connector. Counted when the first token is out.
    """
    return _by_stage(exposition, PROMPT_TOKENS)


def _by_stage(exposition: str, name: str) -> dict[str, dict[str, float]]:
    totals: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == name:
                stage = sample.labels.get("stage", sample.labels.get("engine", "0"))
                sums = totals.setdefault(stage, {})
                source = sample.labels.get("source", "")
                sums[source] = sums.get(source, 0.0) + sample.value
    return totals
