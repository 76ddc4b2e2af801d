"""Entry point of group ``vllm.general_plugins``: loaded in API, engine and worker processes."""

from __future__ import annotations

import logging

from liveserve.config import ConfigError, LiveServeConfig, from_env, history_turns_from_env
from liveserve.host import seam, versions

logger = logging.getLogger("vllm.liveserve")


def register() -> None:
    """Install LiveServe's seams in this process. Idempotent; never raises into the host."""
    from liveserve.host.cpu import adapt

    adapt.apply()  # a CPU host needs it also without LiveServe
    if not versions.untested():  # it does nothing until it is asked for
        seam.install("the KV connector", _connector)
    try:
        config = from_env()
        turns = history_turns_from_env() if config is None else config.history_turns
    except ConfigError as exc:
        logger.error("LiveServe is off: %s", exc)
        return
    if (config is None and turns is None) or not versions.supported():
        return
    omni = versions.installed("vllm-omni") is not None
    if turns is not None and omni:
        seam.install("the window of a conversation", lambda: _window(turns))
    if config is None:
        return
    seam.install("the engine", _engine)
    if omni:
        seam.install("the stage schedulers", _pipeline)
        seam.install("duplex sessions", lambda: _duplex(config))
        seam.install("false alarms", _false_alarm)
        seam.install("the conversation's history", _history)
        seam.install("the orchestrator", _orchestrator)


def _connector() -> None:
    from liveserve.host import kv_flags

    kv_flags.install()


def _engine() -> None:
    from liveserve.host import engine

    engine.install()


def _pipeline() -> None:
    from liveserve.host import pipeline

    pipeline.install()


def _duplex(config: LiveServeConfig) -> None:
    from liveserve.host import duplex

    duplex.install(config)


def _false_alarm() -> None:
    from liveserve.host import false_alarm

    false_alarm.install()


def _history() -> None:
    from liveserve.host import history

    history.install()


def _window(turns: int) -> None:
    from liveserve.host import window

    window.install(turns)


def _orchestrator() -> None:
    from liveserve.host import orchestrator

    orchestrator.install()
