"""What a simulation is given: users, what steps cost, and the settings of the simulated system.

Pure data, all of it readable from JSON with msgspec. Times are seconds on the simulated clock (0 is
the start of the run), amounts are tokens, blocks, codec frames and bytes.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec

from liveserve.config import LiveServeConfig, Switches

NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]
AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]

THINKER, TALKER, CODE2WAV = "thinker", "talker", "code2wav"
STAGES = (THINKER, TALKER, CODE2WAV)


class ModelError(ValueError):
    """A workload, cost model or setting makes no sense; the message names the field."""


# ---- users ---------------------------------------------------------------------------------


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One question and its answer, planned before the run.

    Attributes:
        prompt_tokens: tokens that the question adds to the history (text, audio, images).
        answer_tokens: text tokens of the whole answer.
        answer_s: seconds of speech of the whole answer; 0: it is read, not heard.
        speech_s: how long the user speaks; the question is complete `CostModel.endpoint_s` later.
        encoder_tokens: of ``prompt_tokens``, those that go through the encoder (audio, images).
        reply_gap_s: silence from the end of playback (of a read answer: from its last token) to
            the next utterance.
        barge_in_s: seconds of the answer heard when the user speaks over it: the next turn's
            utterance, or, at the last turn, the user leaves. None: heard to its end.
        not_before_s: the utterance does not begin earlier (traces with times of their own).
    """

    prompt_tokens: AtLeastOne
    answer_tokens: AtLeastOne
    answer_s: NonNegative
    speech_s: NonNegative = 2.0
    encoder_tokens: Count = 0
    reply_gap_s: NonNegative = 2.0
    barge_in_s: NonNegative | None = None
    not_before_s: NonNegative | None = None


class Session(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user.

    Attributes:
        arrival_s: when the user begins to speak, or joins the queue of a closed loop.
        prefix: name of the prompt that all sessions with this name share ("": none).
        prefix_tokens: its length; it stands in front of the history.
        playback_rate: seconds of audio played per second.
        network_delay_s: one way between server and client.
        jitter_s: every packet is late by an exponential time of this mean on top; packets never
            overtake one another.
        acks: the client reports playback; else the server goes by its own clock.
        hangs_up: closes the session one reply gap after the last answer; else falls silent.
    """

    index: Count
    arrival_s: NonNegative
    turns: tuple[Turn, ...]
    prefix: str = ""
    prefix_tokens: Count = 0
    playback_rate: Positive = 1.0
    network_delay_s: NonNegative = 0.02
    jitter_s: NonNegative = 0.0
    acks: bool = True
    hangs_up: bool = True


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All users of a run.

    Attributes:
        concurrency: at most so many sessions at a time; a session that has arrived waits until
            one before it is over. None: sessions begin when they arrive (open loop).
        notes: where it is from: generator and its parameters, or the trace.
    """

    name: str
    sessions: tuple[Session, ...]
    concurrency: AtLeastOne | None = None
    notes: dict[str, str | int | float | bool | None] = {}

    @property
    def turns(self) -> int:
        return sum(len(session.turns) for session in self.sessions)


# ---- costs ---------------------------------------------------------------------------------


class StepCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of one step of an autoregressive stage: linear, so that a run of steps has a sum.

    Attributes:
        fixed_s: of any step.
        per_request_s: of each request that decodes.
        per_context_token_s: of each token of KV that decoding requests read.
        per_prefill_token_s: of each prompt token that is computed.
        per_prefill_pair_s: of each pair of a prompt token and a token of KV that it reads.
        per_fed_s: talker: of each request that decodes and takes a text token in the step.
    """

    fixed_s: NonNegative
    per_request_s: NonNegative = 0.0
    per_context_token_s: NonNegative = 0.0
    per_prefill_token_s: NonNegative = 0.0
    per_prefill_pair_s: NonNegative = 0.0
    per_fed_s: NonNegative = 0.0

    def seconds(
        self,
        decodes: int,
        context_tokens: float,
        prefill_tokens: int = 0,
        prefill_pairs: float = 0,
        fed: int = 0,
    ) -> float:
        """One step.

        Args:
            decodes: requests that decode one token.
            context_tokens: tokens of KV that they read, all together.
            prefill_tokens: prompt tokens computed in the step, of all requests.
            prefill_pairs: for each of those the tokens before it, all together.
            fed: of the requests that decode, those that take a text token.
        """
        return (
            self.fixed_s
            + self.per_request_s * decodes
            + self.per_context_token_s * context_tokens
            + self.per_prefill_token_s * prefill_tokens
            + self.per_prefill_pair_s * prefill_pairs
            + self.per_fed_s * fed
        )


class StageCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One autoregressive stage (thinker, talker).

    Attributes:
        replicas: engines; a session stays with one.
        max_requests: that run at a time (max_num_seqs).
        max_step_tokens: prompt and decoded tokens of a step (max_num_batched_tokens).
        kv_blocks: GPU blocks per replica.
        kv_bytes_per_token: of one token's KV, over all layers and ranks.
    """

    step: StepCost
    replicas: AtLeastOne = 1
    max_requests: AtLeastOne = 64
    max_step_tokens: AtLeastOne = 8192
    block_tokens: AtLeastOne = 16
    kv_blocks: AtLeastOne = 10_000
    kv_bytes_per_token: AtLeastOne = 98_304


class VocoderCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """code2wav: a step takes ``fixed_s`` + ``per_frame_s`` × chunks × frames of the longest, its
    left context included.
    """

    fixed_s: NonNegative
    per_frame_s: NonNegative
    replicas: AtLeastOne = 1
    max_requests: AtLeastOne = 16

    def seconds(self, chunks: int, longest_frames: int) -> float:
        return self.fixed_s + self.per_frame_s * chunks * longest_frames


class LinkCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Between a thinker replica's GPU and DRAM; each direction is a queue of its own.

    Attributes:
        gbps: 1e9 bytes per second, each direction.
        latency_s: of each job on top.
    """

    gbps: Positive = 50.0
    latency_s: NonNegative = 2e-4


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a deployment costs, step by step.

    Attributes:
        dram_bytes: of the KV pool in DRAM, per thinker replica.
        frame_rate_hz: codec frames per second of speech; the talker makes one a step.
        talker_prompt_tokens: prompt of the talker on top of the thinker's prompt tokens.
        talker_sees_prompt: the talker computes the thinker's whole prompt as well (Qwen3-Omni).
        talker_starts_after: text tokens the thinker has made when the talker's request can begin;
            afterwards frame n needs text token n, as long as there are any.
        first_chunk_frames, chunk_frames, left_context_frames: the deployment's codec chunks.
        handover_s: from the end of a step until the next stage can schedule what it made.
        deliver_s: from the end of a vocoder step until the audio leaves the server.
        endpoint_s: from the end of speech until the server takes the turn as complete.
        encode_s, encode_token_s: of one question's encoder pass: fixed, and per encoder token.
        signal_s: from a client event at the server until an engine's policies can see it.
        speech_start_s: from the first sound at the server until its VAD reports speech.
        parallel_steps: so many engines' steps run at full speed at the same time; more share the
            machine, and so do encoder, chunk handover and delivery. None: every engine has a device
            of its own.
        noise: how much steps differ from what they should take: the standard deviation of the
            logarithm of their length. It is each engine's own and lasts ``noise_s``, so that a
            slow step is followed by slow ones; the mean stays what it is.
        alternate_steps: without look-ahead (`Switches.lookahead`) a talker runs a request in every
            other step while its text still comes, as the host does with synchronous scheduling.
        max_answer_tokens: most text tokens of an answer, and ``max_answer_frames`` most codec
            frames (max_tokens of the two stages): what KV is reserved for.
        sources: per figure, where it is from and how uncertain it is.
    """

    name: str
    thinker: StageCost
    talker: StageCost
    code2wav: VocoderCost
    link: LinkCost = LinkCost()
    dram_bytes: Count = 64 << 30
    frame_rate_hz: Positive = 12.5
    talker_prompt_tokens: Count = 16
    talker_sees_prompt: bool = True
    talker_starts_after: AtLeastOne = 1
    first_chunk_frames: AtLeastOne = 4
    chunk_frames: AtLeastOne = 25
    left_context_frames: Count = 25
    handover_s: NonNegative = 0.002
    deliver_s: NonNegative = 0.002
    endpoint_s: NonNegative = 0.2
    encode_s: NonNegative = 0.0
    encode_token_s: NonNegative = 0.0
    signal_s: NonNegative = 0.01
    speech_start_s: NonNegative = 0.1
    parallel_steps: Positive | None = None
    noise: NonNegative = 0.0
    noise_s: Positive = 0.3
    alternate_steps: bool = False
    max_answer_tokens: AtLeastOne = 2048
    max_answer_frames: AtLeastOne = 8192
    sources: dict[str, str] = {}


# ---- systems -------------------------------------------------------------------------------


class System(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is simulated: the host alone, or LiveServe with each mechanism on or off.

    Attributes:
        live: LiveServe's runtime plans the rounds. Off: first come, first served.
        switches: of which `order`, `pace`, `utility`, `chunking` and `unheard` matter here.
        one_shot: the vocoder's steps are chosen (`liveserve.scheduler.one_shot`); off: all chunks
            at hand go into one step.
        offload: KV leaves for DRAM and comes back. Off: it is computed again.
        eviction: "lru" or "next-use", on both tiers.
        preload: offloaded KV comes back when the user begins to speak, where that is admitted.
    """

    name: str
    live: bool = True
    switches: Switches = Switches()
    one_shot: bool = True
    offload: bool = True
    eviction: str = "next-use"
    preload: bool = True

    def __post_init__(self) -> None:
        if self.eviction not in ("lru", "next-use"):
            raise ModelError(f"eviction must be 'lru' or 'next-use', got {self.eviction!r}")


_OFF = Switches(*[False] * len(Switches.__struct_fields__))
_STOCK = System("stock", False, _OFF, False, True, "lru", False)
_LIVE = System("liveserve")
SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        _STOCK,
        msgspec.structs.replace(_STOCK, name="stock-no-offload", offload=False),
        _LIVE,
    )
}
# What `liveserve-no-<switch>` leaves out.
SWITCHES = (
    "order", "pace", "utility", "chunking", "one_shot", "unheard", "next_use", "preload", "offload",
)  # fmt: skip


def system(name: str) -> System:
    """A system by name: one of `SYSTEMS`, or ``liveserve`` with ``-no-<switch>`` appended, once
    for each mechanism that is off (``liveserve-no-pace-no-preload``).

    Raises:
        ModelError: unknown; says what there is.
    """
    if name in SYSTEMS:
        return SYSTEMS[name]
    base, *without = name.split("-no-")
    without = [switch.replace("-", "_") for switch in without]
    if base != "liveserve" or not set(without) <= set(SWITCHES):
        raise ModelError(
            f"system {name!r} is unknown: use {', '.join(SYSTEMS)}, or liveserve-no-SWITCH with "
            f"SWITCH one of {', '.join(SWITCHES)}"
        )
    flips = {s: False for s in without if s in Switches.__struct_fields__}
    changes: dict[str, object] = {s: False for s in without if s in System.__struct_fields__}
    if "next_use" in without:
        changes["eviction"] = "lru"
    switches = msgspec.structs.replace(_LIVE.switches, **flips)
    return msgspec.structs.replace(_LIVE, name=name, switches=switches, **changes)


class SimConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to simulate.

    Attributes:
        live: LiveServe's own configuration, as `serve` takes it.
        ack_interval_s: how often clients report playback. Reports that say what was expected
            change nothing, so that real clients' shorter intervals would only take time.
        max_gap_s: longest gap of a continuous answer.
        ttfp_slo_s: useful turns have their first audio within this; None: any time.
        step_by_step: never advance several steps together (slow; for checking).
        silent_s: the server disconnects a session that has fallen silent after this long.
        until_s: the run is cut off then; what has not ended by then counts as failed.
        timeline_s: sample pools and queues this often; 0: never.
        prefix_caching: off, every turn computes its whole history.
        min_block_tokens: KV is accounted for in blocks no smaller than this, which is faster.
    """

    live: LiveServeConfig = msgspec.field(default_factory=LiveServeConfig)
    ack_interval_s: Positive = 2.5
    max_gap_s: NonNegative = 0.1
    ttfp_slo_s: Positive | None = None
    step_by_step: bool = False
    silent_s: Positive = 300.0
    until_s: Positive = 366 * 86400.0
    timeline_s: NonNegative = 0.0
    prefix_caching: bool = True
    min_block_tokens: AtLeastOne = 64


# ---- checks --------------------------------------------------------------------------------


def check_workload(workload: Workload) -> None:
    """Raises:
    ModelError: nobody comes, or a value is not finite or makes no sense; names it.
    """
    if not workload.sessions:
        raise ModelError(f"workload {workload.name!r} has no sessions")
    seen: set[int] = set()
    for session in workload.sessions:
        where = f"workload {workload.name!r}, session {session.index}"
        if session.index in seen:
            raise ModelError(f"{where}: index is used twice")
        seen.add(session.index)
        if not session.turns:
            raise ModelError(f"{where}: turns is empty")
        _finite(where, session)
        for number, turn in enumerate(session.turns):
            _finite(f"{where}, turn {number}", turn)
            if turn.encoder_tokens > turn.prompt_tokens:
                raise ModelError(
                    f"{where}, turn {number}: encoder_tokens ({turn.encoder_tokens}) is more than "
                    f"prompt_tokens ({turn.prompt_tokens})"
                )


def check_costs(costs: CostModel) -> None:
    """Raises:
    ModelError: a value is not finite, or a stage takes no time; names it.
    """
    _finite(f"cost model {costs.name!r}", costs)
    for stage in (THINKER, TALKER):
        if costs.__getattribute__(stage).step.fixed_s <= 0:
            raise ModelError(f"cost model {costs.name!r}: {stage}.step.fixed_s must be above 0")
    if costs.code2wav.fixed_s <= 0 and costs.code2wav.per_frame_s <= 0:
        raise ModelError(f"cost model {costs.name!r}: code2wav takes no time; give fixed_s")


def _finite(where: str, struct: msgspec.Struct) -> None:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            raise ModelError(f"{where}: {name} must be a finite number, 0 or more, got {value!r}")
        if isinstance(value, msgspec.Struct):
            _finite(f"{where}, {name}", value)


def read_costs(path: Path) -> CostModel:
    """A cost model from a JSON file.

    Raises:
        ModelError: unreadable, not JSON, an unknown field, or a value out of its range.
    """
    try:
        costs = msgspec.json.decode(path.read_bytes(), type=CostModel)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: no cost model: {error}") from None
    check_costs(costs)
    return costs
