"""LiveServe's one configuration, validated, and how it reaches every process of the host.

The API process writes it to the environment (`ENV_CONFIG`); stage engines inherit it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

ENV_SWITCH = "LIVESERVE"
ENV_CONFIG = "LIVESERVE_CONFIG"

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ConfigError(ValueError):
    """A setting is wrong; the message names it and says what is allowed."""


class StageConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of one stage, keyed by its name in the pipeline (thinker, talker, code2wav).

    Attributes:
        p_safe_s: smallest playback buffer that is safe from an underrun (P_safe^s).
    """

    p_safe_s: NonNegative = 0.5


class LiveServeConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Every knob of LiveServe.

    Attributes:
        monitor: carry session events to the engines. Off leaves the engines without views.
        playback: where playback positions come from. "auto": client acks, else the wall clock;
            "wall": always the wall clock since the first routed packet.
        flush_interval_ms: events wait at most this long to travel together.
        heartbeat_ms: every engine is asked for its pressure at least this often.
        ring_capacity: events an engine holds between two scheduling rounds.
        outbox_capacity: events that wait for a busy engine before the link starts over.
        max_sessions: sessions that are tracked; older idle ones are forgotten first.
        ack_tolerance_ms: an ack may be this far ahead of the routed audio or behind an earlier
            ack before it is refused.
        max_events_per_s: sustained client events per connection; more are refused.
        max_event_burst: client events that one connection may send at once.
        exchange_timeout_s: an engine that takes longer to answer counts as not answering.
        stages: settings per stage name.
    """

    monitor: bool = True
    playback: Literal["auto", "wall"] = "auto"
    flush_interval_ms: NonNegative = 10.0
    heartbeat_ms: Positive = 500.0
    ring_capacity: Count = 4096
    outbox_capacity: Count = 2048
    max_sessions: Count = 4096
    ack_tolerance_ms: NonNegative = 250.0
    max_events_per_s: Positive = 500.0
    max_event_burst: Count = 2000
    exchange_timeout_s: Positive = 10.0
    stages: dict[str, StageConfig] = {}

    def stage(self, name: str) -> StageConfig:
        return self.stages.get(name) or StageConfig()


def parse_config(source: str) -> LiveServeConfig:
    """Read a configuration from JSON text or from a path to a JSON file.

    Raises:
        ConfigError: unreadable, not JSON, an unknown key, or a value outside its range.
    """
    text = source
    if not source.lstrip().startswith("{"):
        try:
            text = Path(source).read_text()
        except OSError as exc:
            raise ConfigError(
                f"LiveServe configuration {source!r}: {exc.strerror or exc}; "
                "give a JSON object or a readable file"
            ) from None
    return decode_config(text, where=source if text is not source else "given as JSON")


def decode_config(text: str, *, where: str) -> LiveServeConfig:
    """Decode JSON ``text``. Raises ConfigError naming the field (see `parse_config`)."""
    try:
        return msgspec.json.decode(text, type=LiveServeConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"LiveServe configuration ({where}): {exc}; the keys and their ranges are documented "
            "in liveserve/config.py"
        ) from None
    except msgspec.DecodeError as exc:
        raise ConfigError(f"LiveServe configuration ({where}) is not JSON: {exc}") from None


def export(config: LiveServeConfig, environ: dict[str, str]) -> None:
    """Switch LiveServe on in ``environ`` with ``config``, for this process and its children."""
    environ[ENV_SWITCH] = "on"
    environ[ENV_CONFIG] = msgspec.json.encode(config).decode()


def from_env(environ: Mapping[str, str] = os.environ) -> LiveServeConfig | None:
    """The configuration of this process, or None if LiveServe is off here.

    Raises:
        ConfigError: the switch or the configuration is not valid.
    """
    switch = environ.get(ENV_SWITCH, "off").strip().lower()
    if switch in {"", "0", "off", "false", "no"}:
        return None
    if switch not in {"1", "on", "true", "yes"}:
        raise ConfigError(f"{ENV_SWITCH}={switch!r} is not a switch; use on or off")
    text = environ.get(ENV_CONFIG, "").strip()
    return parse_config(text) if text else LiveServeConfig()


def as_json(config: LiveServeConfig) -> dict[str, object]:
    """Plain JSON object of ``config``."""
    return json.loads(msgspec.json.encode(config))
