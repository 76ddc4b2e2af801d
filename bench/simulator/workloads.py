"""Users for the simulator: drawn from stated distributions, or read from a trace.

Every kind of workload is a `WorkloadSpec`; `build` makes the `Workload`. A session depends on the
seed and its index alone, and a probability changes nothing but what it decides: workloads that
differ in one setting have the same users otherwise. Nothing outside this package is read, except a
trace that the spec names.

Kinds, and where their figures are from ("assumed": ours, no public figure found):

``sharegpt``
    One turn per session. Log-normal lengths with the means that Kwon et al. (SOSP'23, figure 11)
    give for ShareGPT, 161 tokens asked and 338 answered, cut as vLLM's benchmark does (4 tokens at
    least, 1024 asked and 2048 in all at most). The spreads are assumed (1.6 and 1.0: medians of
    about 45 and 205 tokens).
``interaction``
    Many turns. Their number is geometric, answers log-normal around 64 tokens (20 s), utterances
    around 4 s; gaps as `liveserve.bench.overlay.VoiceModel`: log-normal around each user's own
    median. All assumed.
``video``
    ``interaction`` where a share of the turns shows a clip. A clip brings one token per 32 × 32
    pixels and two frames (Qwen3-VL's and Qwen3-Omni's vision encoders): 98 a second at 448 × 448
    and one frame a second. Clip lengths are assumed.
``long``
    Answers of 60 to 120 s, as in the paper's long example (65.9 s).
``trace``
    A file in Mooncake, interaction or Azure format, see `liveserve.bench.traces`. Azure's requests
    name no session and are one each. In Mooncake and Azure traces a prompt holds its history: a
    turn brings what is new in it.

Speech: a text token lasts 1 / 3.2 s (150 English words a minute, 1.3 tokens each) or, in Chinese,
1 / 2.9 s (4.5 characters a second, 0.65 tokens each; assumed). Spoken questions are 12.5 audio
tokens a second (Qwen3-Omni's encoder) and a template of 16 (assumed).
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from liveserve.bench.overlay import sessions_of
from liveserve.bench.simulator.model import ModelError, Session, Turn, Workload, check_workload
from liveserve.bench.traces import (
    FORMATS,
    MOONCAKE_BLOCK_TOKENS,
    TraceError,
    TraceRequest,
    read_trace,
)
from liveserve.bench.workload import ARRIVALS, arrival_times_s

KINDS = ("sharegpt", "interaction", "video", "long", "trace")
TRACE_TIMES = ("voice", "trace")

AUDIO_TOKENS_PER_S = 12.5
TEMPLATE_TOKENS = 16
ZH_TOKENS_PER_S = 2.9
_SHAREGPT_ASKED, _SHAREGPT_ANSWERED = (161.31, 1.6), (337.99, 1.0)  # mean, sigma
_SHAREGPT_MIN, _SHAREGPT_MAX_ASKED, _SHAREGPT_MAX = 4, 1024, 2048
_LONG_S = (60.0, 120.0)
_MAX_TURNS = 64
# What a trace's later turns are taken to come after, when one is written: see `write_trace`.
_FIRST_AUDIO_S = 1.0

Above0 = Annotated[float, msgspec.Meta(gt=0)]
From0 = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
From1 = Annotated[int, msgspec.Meta(ge=1)]


def _one_of(field: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ModelError(f"{field} {value!r}: use one of {', '.join(allowed)}")


class WorkloadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What to build; readable from JSON. Times are seconds, lengths text tokens.

    Attributes:
        kind: one of `KINDS`.
        sessions: how many; of a trace the first so many (None: 64, of a trace all).
        arrivals: ``closed`` (``concurrency`` users at a time, the first within ``ramp_s``),
            ``poisson`` or ``burst`` (sessions at ``rate`` per second; gamma gaps of
            ``burst_shape``, as BurstGPT found: 0.25 is a coefficient of variation of 2). None:
            closed, or a trace's own times.
        turns: mean number in a session (interaction, video).
        asked: ``spoken``, or ``typed``: no speech is heard, a question has its text's tokens.
        answer_tokens: mean of an answer (interaction, video).
        max_answer_tokens: longer answers end there, whatever the kind.
        utterance_s, max_utterance_s: median and limit.
        gap_s, gap_session_sigma, gap_sigma: median over all users; spread of the users' own
            medians around it and of their gaps around those, in log space.
        p_barge_in, barge_in_between: chance that an answer is spoken over, and which share of it
            is heard then, drawn evenly. At the last turn that user leaves.
        hangup_fraction: users who close the session in the end; the others fall silent.
        zh_fraction: sessions in Chinese.
        video_fraction, clip_s, video_tokens_per_s: of the turns; median length; see the module.
        prefix_tokens: a prompt that all sessions share.
        playback_rate, network_delay_s, jitter_s, ack_fraction: of the clients; ``ack_fraction``
            of the sessions report playback.
        trace, trace_format: its file; format None: told from its first line.
        trace_times: ``voice``: a session's first turn comes when it came, the others as users
            would have gone through them by voice; ``trace``: no turn comes earlier than it came.
        speed: a trace's times are divided by it.
    """

    kind: str
    sessions: From1 | None = None
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0
    arrivals: str | None = None
    concurrency: From1 = 8
    ramp_s: From0 = 2.0
    rate: Above0 = 1.0
    burst_shape: Above0 = 0.25
    turns: Annotated[float, msgspec.Meta(ge=1)] = 4.0
    asked: str = "spoken"
    answer_tokens: Above0 = 64.0
    answer_sigma: From0 = 0.7
    max_answer_tokens: From1 | None = None
    tokens_per_s: Above0 = 3.2
    utterance_s: Above0 = 4.0
    utterance_sigma: From0 = 0.5
    max_utterance_s: Above0 = 20.0
    gap_s: Above0 = 2.0
    gap_session_sigma: From0 = 0.6
    gap_sigma: From0 = 0.5
    p_barge_in: Share = 0.0
    barge_in_between: tuple[Share, Share] = (0.1, 0.9)
    hangup_fraction: Share = 0.8
    zh_fraction: Share = 0.0
    video_fraction: Share = 0.5
    clip_s: Above0 = 10.0
    clip_sigma: From0 = 0.5
    video_tokens_per_s: Above0 = 98.0
    prefix_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    playback_rate: Above0 = 1.0
    network_delay_s: From0 = 0.02
    jitter_s: From0 = 0.0
    ack_fraction: Share = 1.0
    trace: str | None = None
    trace_format: str | None = None
    trace_times: str = "voice"
    speed: Above0 = 1.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, KINDS)
        _one_of("asked", self.asked, ("spoken", "typed"))
        _one_of("trace_times", self.trace_times, TRACE_TIMES)
        if self.arrivals is not None:
            _one_of("arrivals", self.arrivals, ARRIVALS)
        if self.trace_format is not None:
            _one_of("trace_format", self.trace_format, FORMATS)
        low, high = self.barge_in_between
        if low > high:
            raise ModelError(f"barge_in_between {low:g}, {high:g}: put the smaller share first")
        if (self.kind == "trace") != (self.trace is not None):
            raise ModelError("trace: name the file with kind 'trace', and with no other kind")
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ModelError(f"{name} must be a finite number, got {value}")


PRESETS: dict[str, WorkloadSpec] = {
    "sharegpt": WorkloadSpec(kind="sharegpt"),
    "sharegpt-zh": WorkloadSpec(kind="sharegpt", zh_fraction=1.0),
    "interaction": WorkloadSpec(kind="interaction"),
    "barge-in": WorkloadSpec(kind="interaction", p_barge_in=0.5),
    "video": WorkloadSpec(kind="video"),
    "long": WorkloadSpec(kind="long"),
}


def spec_of(text: str, **changes: Any) -> WorkloadSpec:
    """The spec that ``text`` names: one of `PRESETS`, a JSON file of a `WorkloadSpec`, or a trace
    (any other file). ``changes`` to its fields win; their values may be strings.

    Raises:
        ModelError: there is none, or a field is unknown or out of its range; names it.
    """
    fields: dict[str, Any] = {}
    if text in PRESETS:
        fields = msgspec.to_builtins(PRESETS[text])
    elif Path(text).suffix == ".json":
        fields = _json_fields(Path(text))
    elif Path(text).exists():
        fields = {"kind": "trace", "trace": text}
    elif "kind" not in changes:
        raise ModelError(f"workload {text!r}: use {', '.join(PRESETS)}, a .json spec, or a trace")
    try:
        return msgspec.convert(fields | changes, WorkloadSpec, strict=False)
    except msgspec.ValidationError as error:
        raise ModelError(f"workload {text or changes['kind']!r}: {error}") from None


def build(spec: WorkloadSpec) -> Workload:
    """The workload of ``spec``; the same for the same spec (and the same trace file).

    Raises:
        ModelError: the workload makes no sense; names the field.
        TraceError: the trace cannot be used; names file, line and field.
    """
    spec = spec_of("", **msgspec.to_builtins(spec))  # its fields' ranges
    planned = _trace_sessions(spec) if spec.kind == "trace" else _drawn_sessions(spec)
    sessions = tuple(sorted(planned, key=lambda session: (session.arrival_s, session.index)))
    closed = spec.arrivals == "closed" or (spec.arrivals is None and spec.kind != "trace")
    workload = Workload(
        name=Path(spec.trace).stem if spec.trace else spec.kind,
        sessions=sessions,
        concurrency=spec.concurrency if closed else None,
        notes=_notes(spec),
    )
    check_workload(workload)
    return workload


def write_trace(workload: Workload, path: Path) -> int:
    """Write ``workload`` in interaction format and return the number of lines.

    A later turn's time depends on the server: here first audio comes after one second and the
    answer plays at once. The format knows no barge-ins and no prompt prefixes; they are lost.
    """
    lines: list[dict[str, Any]] = []
    for session in workload.sessions:
        at_s, gap_s = session.arrival_s, None
        for number, turn in enumerate(session.turns):
            at_s = max(at_s, turn.not_before_s or 0.0) + turn.speech_s
            lines.append(
                {
                    "session_id": session.index,
                    "timestamp": round(at_s, 6),
                    "turn": number,
                    "query_length": turn.prompt_tokens,
                    "response_length": turn.answer_tokens,
                    "gap": gap_s,
                }
            )
            heard_s = turn.answer_s if turn.barge_in_s is None else turn.barge_in_s
            gap_s = turn.reply_gap_s if turn.barge_in_s is None else 0.0
            at_s += _FIRST_AUDIO_S + heard_s + gap_s
    lines.sort(key=lambda line: line["timestamp"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return len(lines)


# ---- drawn ----------------------------------------------------------------------------------


class _User:
    """One session's draws. What a user is like, what is said and what is done have generators of
    their own, so that none shifts the others.
    """

    def __init__(self, spec: WorkloadSpec, index: int) -> None:
        self._spec = spec

        def generator(stream: int) -> np.random.Generator:
            return np.random.default_rng(
                np.random.SeedSequence(spec.seed, spawn_key=(2, index, stream))
            )

        self._said, self._done = generator(0), generator(1)
        traits = self._done.random(3)
        self.zh = traits[0] < spec.zh_fraction
        self.acks = traits[1] < spec.ack_fraction
        self.hangs_up = traits[2] < spec.hangup_fraction
        self._gap_s = spec.gap_s * math.exp(spec.gap_session_sigma * self._done.standard_normal())
        self.token_s = 1 / (ZH_TOKENS_PER_S if self.zh else spec.tokens_per_s)

    def turn(self, kind: str) -> Turn:
        """A turn with lengths as ``kind`` has them."""
        spec, said = self._spec, self._said
        asked_tokens, answer_tokens = None, 0
        utterance_s = spec.utterance_s * math.exp(spec.utterance_sigma * said.standard_normal())
        if kind == "sharegpt":
            asked_tokens, answer_tokens = _sharegpt(said)
            utterance_s = asked_tokens * self.token_s
        elif kind == "long":
            answer_tokens = round(said.uniform(*_LONG_S) / self.token_s)
        else:
            answer_tokens = round(_lognormal(said, spec.answer_tokens, spec.answer_sigma))
        shows, clip_s = (
            said.random(),
            spec.clip_s * math.exp(spec.clip_sigma * said.standard_normal()),
        )
        video_tokens = 0
        if kind == "video" and shows < spec.video_fraction:
            video_tokens = max(1, round(clip_s * spec.video_tokens_per_s))
        return self.of_lengths(answer_tokens, utterance_s, asked_tokens, video_tokens)

    def of_lengths(
        self,
        answer_tokens: int,
        utterance_s: float | None = None,
        asked_tokens: int | None = None,
        video_tokens: int = 0,
        prompt_tokens: int | None = None,
        gap_s: float | None = None,
        not_before_s: float | None = None,
    ) -> Turn:
        """A turn whose lengths are given; None: drawn, or derived from the others."""
        spec, done = self._spec, self._done
        # Every draw is made whether or not it is used: a probability changes nothing else.
        interrupts, share = done.random(), done.uniform(*spec.barge_in_between)
        own_gap_s = self._gap_s * math.exp(spec.gap_sigma * done.standard_normal())
        own_utterance_s = spec.utterance_s * math.exp(spec.utterance_sigma * done.standard_normal())
        speech_s = min(own_utterance_s if utterance_s is None else utterance_s,
                       spec.max_utterance_s)  # fmt: skip
        answer_tokens = max(1, min(answer_tokens, spec.max_answer_tokens or answer_tokens))
        answer_s = answer_tokens * self.token_s
        if spec.asked == "typed":
            text_tokens = asked_tokens or max(1, round(speech_s / self.token_s))
            asked, audio_tokens, speech_s = text_tokens, 0, 0.0
        else:
            audio_tokens = max(1, round(speech_s * AUDIO_TOKENS_PER_S))
            asked = audio_tokens
        if prompt_tokens is None:
            prompt_tokens = TEMPLATE_TOKENS + asked + video_tokens
        return Turn(
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            answer_s=answer_s,
            speech_s=speech_s,
            encoder_tokens=min(prompt_tokens, audio_tokens + video_tokens),
            reply_gap_s=own_gap_s if gap_s is None else gap_s,
            barge_in_s=share * answer_s if interrupts < spec.p_barge_in else None,
            not_before_s=not_before_s,
        )

    def turns(self) -> int:
        """How many turns the session has."""
        return min(_MAX_TURNS, int(self._said.geometric(1 / self._spec.turns)))

    def session(
        self,
        index: int,
        arrival_s: float,
        turns: Sequence[Turn],
        prefix: tuple[str, int] | None = None,
    ) -> Session:
        spec = self._spec
        if prefix is None:
            prefix = ("system" if spec.prefix_tokens else "", spec.prefix_tokens)
        return Session(
            index=index,
            arrival_s=arrival_s,
            turns=tuple(turns),
            prefix=prefix[0],
            prefix_tokens=prefix[1],
            playback_rate=spec.playback_rate,
            network_delay_s=spec.network_delay_s,
            jitter_s=spec.jitter_s,
            acks=bool(self.acks),
            hangs_up=bool(self.hangs_up),
        )


def _drawn_sessions(spec: WorkloadSpec) -> Iterator[Session]:
    arrivals = _arrivals(spec, spec.arrivals or "closed")
    for index in range(spec.sessions or 64):
        user = _User(spec, index)
        turns = user.turns() if spec.kind in ("interaction", "video") else 1
        yield user.session(index, next(arrivals), [user.turn(spec.kind) for _ in range(turns)])


def _arrivals(spec: WorkloadSpec, kind: str) -> Iterator[float]:
    times = arrival_times_s(
        kind, spec.seed, rate_per_s=spec.rate, burst_shape=spec.burst_shape, ramp_s=spec.ramp_s
    )
    if kind != "closed":
        yield from times
    yield from sorted(next(times) for _ in range(spec.concurrency))
    while True:  # these queue behind the first
        yield spec.ramp_s


def _lognormal(draw: np.random.Generator, mean: float, sigma: float) -> float:
    return mean * math.exp(sigma * draw.standard_normal() - sigma**2 / 2)


def _sharegpt(draw: np.random.Generator) -> tuple[int, int]:
    """Tokens asked and answered; what vLLM's benchmark would leave out is drawn again."""
    while True:
        asked = round(_lognormal(draw, *_SHAREGPT_ASKED))
        answered = round(_lognormal(draw, *_SHAREGPT_ANSWERED))
        fits = asked <= _SHAREGPT_MAX_ASKED and asked + answered <= _SHAREGPT_MAX
        if fits and min(asked, answered) >= _SHAREGPT_MIN:
            return asked, answered


# ---- traces ---------------------------------------------------------------------------------


def _trace_sessions(spec: WorkloadSpec) -> Iterator[Session]:
    assert spec.trace is not None
    path = Path(spec.trace)
    requests = read_trace(path, spec.trace_format)
    by_session = _by_session(path, requests)
    kept = list(by_session.items())[: spec.sessions]
    shared = Counter(block for _, turns in kept for block in requests[turns[0]].blocks)
    arrivals = _arrivals(spec, spec.arrivals) if spec.arrivals else None
    for index, (_, turns) in enumerate(kept):
        user = _User(spec, index)
        first = requests[turns[0]]
        prefix = _shared_prefix(first, shared)
        planned: list[Turn] = []
        history = prefix[1] if prefix else 0
        for number, which in enumerate(turns):
            request = requests[which]
            own_history = first.session is not None  # the trace's lengths are a turn's own
            new = request.input_tokens if own_history else request.input_tokens - history
            history = request.input_tokens + request.output_tokens
            later = requests[turns[number + 1]] if number + 1 < len(turns) else None
            planned.append(_trace_turn(spec, user, request, max(1, new), later))
        if arrivals is not None:
            arrival_s = next(arrivals)
        else:  # a trace's times are those of complete questions
            arrival_s = max(0.0, first.at_s / spec.speed - planned[0].speech_s)
        yield user.session(index, arrival_s, planned, prefix)


def _trace_turn(
    spec: WorkloadSpec,
    user: _User,
    request: TraceRequest,
    prompt_tokens: int,
    later: TraceRequest | None,
) -> Turn:
    """One turn: the gap to the one after it is that one's in the trace, where it has gaps."""
    gap_s = later.gap_s if later is not None else None
    turn = user.of_lengths(
        request.output_tokens, prompt_tokens=prompt_tokens, gap_s=gap_s, asked_tokens=prompt_tokens
    )
    if spec.trace_times == "voice":
        return turn
    begins_s = max(0.0, request.at_s / spec.speed - turn.speech_s)
    return msgspec.structs.replace(turn, not_before_s=begins_s, reply_gap_s=0.0)


def _by_session(path: Path, requests: Sequence[TraceRequest]) -> Mapping[int, list[int]]:
    """Indices of each session's requests, in order of their first."""
    named = requests[0].session is not None or bool(requests[0].blocks)
    try:
        owners = sessions_of(requests) if named else range(len(requests))
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from None
    turns: dict[int, list[int]] = defaultdict(list)
    for index, session in enumerate(owners):
        turns[session].append(index)
    return turns


def _shared_prefix(first: TraceRequest, shared: Counter[int]) -> tuple[str, int] | None:
    """Name and tokens of the longest beginning that another session's first prompt has as well; a
    block's id stands for all the blocks before it. The last, started block is a session's own.
    """
    if not first.blocks:
        return None
    length = 0
    for block in first.blocks[: first.input_tokens // MOONCAKE_BLOCK_TOKENS]:
        if shared[block] < 2:
            break
        length += 1
    if not length:
        return ("", 0)
    return (f"block-{first.blocks[length - 1]}", length * MOONCAKE_BLOCK_TOKENS)


# ---- helpers --------------------------------------------------------------------------------


def _notes(spec: WorkloadSpec) -> dict[str, str | int | float | bool | None]:
    """What differs from a plain spec of the same kind."""
    plain = {f.name: f.default for f in msgspec.structs.fields(WorkloadSpec)}
    changed = {
        name: value
        for name, value in msgspec.to_builtins(spec).items()
        if name == "kind" or value != msgspec.to_builtins(plain[name])
    }
    if spec.trace:
        changed["trace"] = Path(spec.trace).name
    return {k: str(v) if isinstance(v, (list, tuple)) else v for k, v in changed.items()}


def _json_fields(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ModelError(f"{path}: expected an object of workload fields")
    return fields
