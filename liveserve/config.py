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

from liveserve.scheduler.chunking import ChunkPolicy
from liveserve.scheduler.policy_config import PolicyConfig

ENV_SWITCH = "LIVESERVE"
ENV_CONFIG = "LIVESERVE_CONFIG"
# Of a host without LiveServe: the window alone, for comparisons (see `LiveServeConfig`).
ENV_HISTORY_TURNS = "LIVESERVE_HISTORY_TURNS"

# Stages that hold requests that are far ahead of the listener. A thinker is not one: a talker takes
# a text token per codec frame, so text that is seconds ahead of the speech may be the token it
# waits for. It only lets first audio pass: it holds others while a session waits for that.
PACED_STAGES = frozenset({"talker"})
YIELDING_STAGES = frozenset({"thinker"})

Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class ConfigError(ValueError):
    """A setting is wrong; the message names it and says what is allowed."""


class StageConfig(msgspec.Struct, forbid_unknown_fields=True):
    """Settings of one stage, keyed by its name in the pipeline (thinker, talker, code2wav).

    What is not given has the default of `liveserve.scheduler.policy_config.PolicyConfig`, where
    each is documented; buffers and ages are wall seconds.

    Attributes:
        pace: hold requests at this stage; not given: as the stage's kind allows.
    """

    p_safe_s: NonNegative | None = None
    p_hold_s: NonNegative | None = None
    p_release_s: NonNegative | None = None
    alpha: NonNegative | None = None
    beta: NonNegative | None = None
    kv_high_watermark: NonNegative | None = None
    age_limit_s: Positive | None = None
    pace: bool | None = None


KvPolicy = Literal["lru", "t-lru", "next-use", "log-only"]


class KvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV tier of an engine that has the ``liveserve`` connector: of an omni model the thinker.

    Attributes:
        dram_bytes: host memory for KV (and companion rows) in each worker process; 0: no tier.
        policy: who leaves DRAM first, see `liveserve.kvtier.policies`.
        gpu_policy: who leaves the GPU's free queue first; None: as ``policy``.
        safe_blocks: for "t-lru": as many last blocks of a session are cheap to recompute.
        link_gbps: on a machine without a GPU, copy as fast as a link of so many 1e9 bytes/s.
        checksums: keep the CRC-32 of what is stored and check it before it is loaded. None: on a
            CPU only; it costs about a millisecond per MiB on the link's threads.
        max_wait_ms: how long an on-path load may wait behind bytes that the link already has.
        min_load_blocks: a hit of fewer blocks is recomputed.
        load_timeout_s: a request waits for its load at most so long, then it is recomputed.
        store_ahead: under pressure, the next victims among so large a share of the GPU's blocks
            are stored before they are evicted. 0: only what a finished turn leaves is stored.
        store_queue_bytes: stores under way at once; more wait.
        ahead_tokens: a prompt of more tokens is stored as soon as its prefill is done, and does not
            keep its blocks on the GPU for that after the turn.
        preload_bytes: of preloads under way at once.
        prefill_min_tokens: less history than this that may be missing is not prefilled ahead of
            its turn.
        prefill_step_tokens: that one step prefills ahead of a turn at most (at least one block):
            by about as long as these take is a step of others stretched.
    """

    dram_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    policy: KvPolicy = "next-use"
    gpu_policy: KvPolicy | None = None
    safe_blocks: Count = 32
    link_gbps: Positive | None = None
    checksums: bool | None = None
    max_wait_ms: Positive = 1.0
    min_load_blocks: Count = 1
    load_timeout_s: Positive = 10.0
    store_ahead: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1
    store_queue_bytes: Count = 1 << 28
    ahead_tokens: Count = 256
    preload_bytes: Count = 1 << 30
    prefill_min_tokens: Count = 256
    prefill_step_tokens: Count = 256


class Switches(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mechanisms that can be flipped at run time, each for itself.

    Attributes:
        order: sort requests by urgency. Off: the host's order.
        pace: hold requests that are far ahead of the listener.
        utility: order U2 by utility and let KV pressure end a hold. Off: U2 by ready age.
        chunking: codec chunks follow the listener's buffer instead of the host's fixed sizes.
        history: an interrupted answer stays in the conversation up to where it was heard. Off:
            Qwen3-Omni keeps all of it or nothing.
        reserve: KV is reserved ahead in autoregressive omni stages. Off: the host preempts, which
            loses audio or ends the stage.
        false_alarm: speech over an answer interrupts it only once it has lasted
            ``false_alarm_ms``. Off: as soon as the VAD hears it.
        lookahead: a stage looks for its requests' next inputs right before it schedules, so that
            they run in every step. Off: in every other one.
        unheard: KV blocks of what an interrupted answer did not get to say are freed first.
        kv_store: KV is copied to DRAM. Off: nothing new enters the tier.
        kv_load: KV that is in DRAM is loaded. Off: it is recomputed.
        kv_preload: a session's KV that is in DRAM is loaded while its user still speaks. Off: when
            its request asks for it.
        kv_prefill: of a session's next prompt, what is known before its user has spoken to the end
            and is in no tier is computed while they speak. Off: when its request comes.
        kv_evict: eviction follows the configured policies. Off: the host's order, and LRU.
        replicas: of several thinkers the one that has a session's KV takes its turns, unless
            waiting there costs more than computing it again. Off: the host's choice.
    """

    order: bool = True
    pace: bool = True
    utility: bool = True
    chunking: bool = True
    history: bool = True
    reserve: bool = True
    false_alarm: bool = True
    unheard: bool = True
    lookahead: bool = True
    kv_store: bool = True
    kv_load: bool = True
    kv_preload: bool = True
    kv_prefill: bool = False
    kv_evict: bool = True
    replicas: bool = True


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
        false_alarm_ms: speech over an answer interrupts it once this much of it was voiced; less
            is a false alarm (a cough, a click, a blip of the VAD), and the answer goes on as if
            nothing had been. 0: interrupt as soon as the VAD hears speech, as the host does. A
            session may say otherwise (``extra_body.liveserve.false_alarm_ms``). The default lets
            pass what is shorter than any word that interrupts; it costs a real barge-in what it is
            longer than the VAD's own minimum (96 ms), less than a reaction time, while a false one
            costs a whole answer.
        max_events_per_s: sustained client events per connection; more are refused.
        max_event_burst: client events that one connection may send at once.
        exchange_timeout_s: an engine that takes longer to answer counts as not answering.
        switches: which mechanisms are on at the start.
        chunks: sizes of codec chunks; ``first`` and ``largest`` are the deployment's own.
        generation_step_s: a one-shot stage (the vocoder) takes only as many chunks at a time as
            it can do in about this long, so that an urgent one does not wait behind a large batch.
        kv: the KV tier.
        history_turns: turns that a duplex session remembers at most, the current one included;
            when more came, it forgets half of them at once (see `liveserve.host.window`). None:
            the host's own window.
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
    false_alarm_ms: NonNegative = 250.0
    max_events_per_s: Positive = 500.0
    max_event_burst: Count = 2000
    exchange_timeout_s: Positive = 10.0
    switches: Switches = Switches()
    chunks: ChunkPolicy = ChunkPolicy()
    generation_step_s: Positive = 0.15
    kv: KvConfig = KvConfig()
    history_turns: Count | None = None
    stages: dict[str, StageConfig] = {}

    def policy(
        self,
        stage: str,
        switches: Switches,
        chunk_time_s: float | None = None,
        *,
        tight: bool = False,
    ) -> PolicyConfig:
        """The planning policy of ``stage`` with ``switches``.

        Where the buffers at which holds end and begin are not set, they follow
        ``chunk_time_s``: the measured wall seconds from letting a request go on until the
        listener has its next chunk. ``tight``: holds begin hardly above where they end, because
            somebody waits for what they free; otherwise twice as high, so that there is something
            to live on when somebody does.

        Raises:
            ConfigError: the stage's settings contradict one another; names the field.
        """
        given = self.stages.get(stage) or StageConfig()
        changes = {k: v for k, v in msgspec.structs.asdict(given).items() if v is not None}
        paced = PACED_STAGES | YIELDING_STAGES if tight else PACED_STAGES
        pace = changes.pop("pace", stage in paced)
        base = PolicyConfig()
        safe_s = changes.get("p_safe_s", base.p_safe_s)
        wanted_s = chunk_time_s if chunk_time_s is not None else base.p_release_s
        release_s = changes.setdefault("p_release_s", max(safe_s, wanted_s))
        changes.setdefault("p_hold_s", max((1.2 if tight else 2.0) * release_s, release_s + 0.1))
        try:
            return PolicyConfig(
                **changes,
                order=switches.order,
                pace=switches.pace and pace,
                utility=switches.utility,
            )
        except ValueError as exc:
            raise ConfigError(f"LiveServe configuration, stages.{stage}: {exc}") from None


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
        config = msgspec.json.decode(text, type=LiveServeConfig)
    except msgspec.ValidationError as exc:
        raise ConfigError(
            f"LiveServe configuration ({where}): {exc}; the keys and their ranges are documented "
            "in liveserve/config.py"
        ) from None
    except msgspec.DecodeError as exc:
        raise ConfigError(f"LiveServe configuration ({where}) is not JSON: {exc}") from None
    for stage in config.stages:
        config.policy(stage, config.switches)
    return config


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


def history_turns_from_env(environ: Mapping[str, str] = os.environ) -> int | None:
    """``history_turns`` where LiveServe is off.

    Raises:
        ConfigError: it is not a whole number from 1.
    """
    text = environ.get(ENV_HISTORY_TURNS, "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{ENV_HISTORY_TURNS}={text!r}: give a number of turns from 1")
    return int(text)


def as_json(config: LiveServeConfig) -> dict[str, object]:
    """Plain JSON object of ``config``."""
    return json.loads(msgspec.json.encode(config))


def change_switches(switches: Switches, changes: bytes) -> Switches:
    """``switches`` with the JSON object ``changes`` laid over it.

    Raises:
        ConfigError: not a JSON object, an unknown switch, or a value that is not true or false.
    """
    try:
        flips = msgspec.json.decode(changes, type=dict[str, bool])
        return msgspec.convert(msgspec.structs.asdict(switches) | flips, Switches)
    except msgspec.MsgspecError as exc:
        names = ", ".join(Switches.__struct_fields__)
        raise ConfigError(f"switches: {exc}; give a JSON object of {names}") from None
