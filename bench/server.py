"""What a load generator asks the server beside the sessions: its model and its counters."""

from __future__ import annotations

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

GENERATION_TOKENS = "vllm:generation_tokens_total"
"""The host's counter, labelled by stage and replica (``vllm_omni/metrics/stat_logger.py``)."""


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


async def stage_generation_tokens(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Tokens generated so far per stage, summed over replicas; empty where there is no counter."""
    try:
        address = url.rstrip("/") + "/metrics"
        async with http.get(address, timeout=aiohttp.ClientTimeout(total=10)) as response:
            response.raise_for_status()
            return parse_stage_tokens(await response.text())
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
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
    """Per-stage sums of ``GENERATION_TOKENS`` in a Prometheus text exposition."""
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name == GENERATION_TOKENS:
                stage = sample.labels.get("stage", sample.labels.get("engine", "0"))
                totals[stage] = totals.get(stage, 0.0) + sample.value
    return totals
