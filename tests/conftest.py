"""Shared settings. Tests that run the host's engines are marked ``host``; tests that fail if
something else keeps the processor busy, ``alone``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=100
)
settings.load_profile("default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last come those that share a server, so that it runs beside no others; then the one that
    kills it."""
    items.sort(key=lambda item: "live_server" in getattr(item, "fixturenames", ()))
    items.sort(key=lambda item: "kills_server" in item.keywords)


@pytest.fixture(scope="session")
def live_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The server of :func:`duplex.live_server`, once for all modules."""
    import duplex  # kernels' tests run where its imports are not installed

    with duplex.live_server(tmp_path_factory.mktemp("live")) as server:
        yield server
