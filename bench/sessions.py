"""``liveserve bench sessions``: live voice sessions against a running server.

Every user has a microphone with real speech and a player that listens at 1x, acknowledges playback,
and now and then interrupts. ``--slow-motion K`` stretches the users K times (speech pace, playback,
gaps, thresholds) and divides every reported time by K, so that a small machine stands for one K
times faster.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from liveserve.bench.client import ClientConfig, ListenerClock, Session
from liveserve.bench.metrics import aggregate
from liveserve.bench.records import FAILED, ResponseRecord, SessionRecord
from liveserve.bench.report import results_table, save_plots
from liveserve.bench.result_file import build_result, write_result
from liveserve.bench.server import (
    ServerUnreachable,
    exposition,
    first_model,
    parse_prompt_tokens,
    parse_stage_tokens,
    stage_totals,
)
from liveserve.bench.workload import (
    ARRIVALS,
    ASSETS,
    SessionPlan,
    TurnPlan,
    Utterance,
    WorkloadConfig,
    arrival_times_s,
    instructions_text,
    load_utterances,
    plan_session,
)

MAX_LIVE_SESSIONS = 4096


@dataclass(frozen=True)
class SessionsConfig:
    """One run. Times are listener seconds; the field's flag has the same name with dashes."""

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    sessions: int | None = None
    turns: int = 3
    arrivals: str = "closed"
    rate: float = 1.0
    burst_shape: float = 0.25
    ramp: float = 2.0
    duration: float | None = None
    warmup: int = 1
    p_barge_in: float = 0.0
    barge_in_between: tuple[float, ...] = (0.1, 0.9)
    barge_in: str = "speech"
    end_of_speech: str = "vad"
    reply_gap: float = 1.5
    reply_gap_cv: float = 0.5
    answer_seconds: tuple[float, ...] = (10.0, 20.0, 40.0)
    tokens_per_second: float = 3.2
    instructions_chars: int = 0
    slow_motion: float = 1.0
    continuous_mic: bool = False
    vad_threshold: float = 0.5
    vad_silence_ms: int = 500
    max_gap_ms: float = 100.0
    ttfp_slo: float | None = None
    timeout: float = 60.0
    codec_frame_rate: float = 12.5
    speech: str | None = None
    seed: int = 0

    def validate(self) -> None:
        """Raises ValueError: the flag that is wrong, and what it takes."""
        parts = urlsplit(self.url)
        _require(
            parts.scheme in ("http", "https") and bool(parts.netloc),
            "url", self.url, "give the server's address, like http://127.0.0.1:8000",
        )  # fmt: skip
        _one_of("arrivals", self.arrivals, ARRIVALS)
        _one_of("barge-in", self.barge_in, ("speech", "event"))
        _one_of("end-of-speech", self.end_of_speech, ("vad", "commit"))
        if self.sessions is not None:
            _require(self.sessions >= 1, "sessions", self.sessions, "use a whole number from 1")
        _require(self.turns >= 1, "turns", self.turns, "use a whole number from 1")
        _require(self.seed >= 0, "seed", self.seed, "use a whole number from 0")
        _require(
            0 <= self.p_barge_in <= 1, "p-barge-in", self.p_barge_in, "a probability is 0 to 1"
        )
        _require(
            len(self.barge_in_between) == 2
            and 0 <= self.barge_in_between[0] <= self.barge_in_between[1] <= 1,
            "barge-in-between", self.barge_in_between,
            "give two shares of the answer in order, like 0.1,0.9",
        )  # fmt: skip
        _require(self.warmup >= 0, "warmup", self.warmup, "use a whole number from 0")
        for name in ("rate", "burst_shape", "slow_motion", "max_gap_ms", "timeout"):
            _positive(name, getattr(self, name))
        for name in ("codec_frame_rate", "duration", "ttfp_slo"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in (
            "reply_gap", "reply_gap_cv", "ramp", "tokens_per_second", "vad_silence_ms",
            "instructions_chars",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, name, value, "use a number from 0")
        _require(
            0.15 < self.vad_threshold <= 1,
            "vad-threshold", self.vad_threshold, "the host takes above 0.15, up to 1",
        )  # fmt: skip
        _require(bool(self.answer_seconds), "answer-seconds", "", "give lengths like 10,20,40")
        for value in self.answer_seconds:
            _positive("answer_seconds", value)
        _require(
            self.barge_in == "event" or self.end_of_speech == "vad",
            "barge-in", self.barge_in,
            "only the server's VAD hears a spoken barge-in: use --barge-in event, or "
            "--end-of-speech vad",
        )  # fmt: skip

    def workload(self, utterances: int) -> WorkloadConfig:
        return WorkloadConfig(
            seed=self.seed,
            turns=self.turns,
            answer_choices_s=self.answer_seconds,
            p_barge_in=self.p_barge_in,
            barge_in_between=(self.barge_in_between[0], self.barge_in_between[1]),
            reply_gap_mean_s=self.reply_gap,
            reply_gap_cv=self.reply_gap_cv,
            utterances=utterances,
        )

    def client(self) -> ClientConfig:
        return ClientConfig(
            url=self.url,
            model=self.model or "",
            barge_in=self.barge_in,
            end_of_speech=self.end_of_speech,
            continuous_mic=self.continuous_mic,
            vad_threshold=self.vad_threshold,
            vad_silence_ms=self.vad_silence_ms,
            timeout_s=self.timeout,
            tokens_per_answer_s=self.tokens_per_second,
        )

    @property
    def concurrent(self) -> int:
        return self.sessions or 4


@dataclass
class SessionsReport:
    """What a run gave. ``responses`` and ``sessions`` are in listener seconds from its start."""

    config: SessionsConfig
    responses: list[ResponseRecord]
    sessions: list[SessionRecord]
    stage_tokens: dict[str, float] = field(default_factory=dict)
    stage_made: dict[str, dict[str, float]] = field(default_factory=dict)
    stage_prompts: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def span_s(self) -> float:
        if not self.sessions:
            return 0.0
        ends = [s.end_s for s in self.sessions if s.end_s is not None]
        return max(ends, default=0.0) - min(s.start_s for s in self.sessions)

    @property
    def metrics(self) -> dict[str, object]:
        return aggregate(
            self.responses,
            self.sessions,
            span_s=self.span_s,
            max_gap_s=self.config.max_gap_ms / 1000,
            ttfp_slo_s=self.config.ttfp_slo,
            stage_tokens=self.stage_tokens,
            stage_made=self.stage_made,
            stage_prompts=self.stage_prompts,
            codec_frame_rate_hz=self.config.codec_frame_rate,
        )

    @property
    def failed(self) -> bool:
        """Some response or session ended by an error, or there was no response at all."""
        return (
            not self.responses
            or any(r.outcome == FAILED for r in self.responses)
            or any(s.error is not None for s in self.sessions)
        )

    def case(self) -> dict[str, Any]:
        """One case of a result file."""
        return {"params": asdict(self.config), "metrics": self.metrics}


Progressed = Callable[[ResponseRecord | SessionRecord], None]


async def run_sessions(
    cfg: SessionsConfig, on_progress: Progressed = lambda _record: None
) -> SessionsReport:
    """Run the users of ``cfg`` against its server, and return when the last has left.

    ``closed``: ``sessions`` users at once; each has one session, or, with ``duration``, one after
    another. ``poisson`` and ``burst``: sessions arrive at ``rate`` per listener second until
    ``sessions`` have, or until ``duration``. After ``duration`` nobody begins a session or a turn;
    turns under way are finished, so that long answers are not cut out of the figures.

    Raises:
        ValueError: a field is wrong; the text names its flag.
        ServerUnreachable: nothing serves at ``url``.
    """
    cfg.validate()
    utterances = load_utterances(Path(cfg.speech) if cfg.speech else ASSETS)
    # No total timeout: sessions last as long as their users talk.
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, connect=30)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        served = await first_model(http, cfg.url)
        cfg = replace(cfg, model=cfg.model or served)
        for _ in range(cfg.warmup):
            await _warm_up(cfg, utterances, http)
        text_before = await exposition(http, cfg.url)
        made_before = await stage_totals(http, cfg.url)
        crowd = _Crowd(cfg, utterances, http, on_progress)
        await crowd.run()
        text_after = await exposition(http, cfg.url)
        made_after = await stage_totals(http, cfg.url)
    return SessionsReport(
        cfg,
        sorted(crowd.responses, key=lambda r: (r.session, r.turn)),
        sorted(crowd.sessions, key=lambda s: s.index),
        _growth(parse_stage_tokens(text_before), parse_stage_tokens(text_after)),
        _growth_by_stage(made_before, made_after),
        _growth_by_stage(parse_prompt_tokens(text_before), parse_prompt_tokens(text_after)),
    )


def _growth(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _growth_by_stage(
    before: Mapping[str, Mapping[str, float]], after: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    return {stage: _growth(before.get(stage, {}), values) for stage, values in after.items()}


async def _warm_up(
    cfg: SessionsConfig, utterances: list[Utterance], http: aiohttp.ClientSession
) -> None:
    """One short answer in real time, in no figure: a server's first is slow (processor, caches)."""
    turn = TurnPlan(utterance=0, answer_s=1.0, barge_in_fraction=None, reply_gap_s=0.0)
    plan = SessionPlan(-1, (turn,))
    await Session(plan, utterances, cfg.client(), ListenerClock(), http).run()


class _Crowd:
    """The users of one run, on one clock."""

    def __init__(
        self,
        cfg: SessionsConfig,
        utterances: list[Utterance],
        http: aiohttp.ClientSession,
        on_progress: Progressed,
    ) -> None:
        self.responses: list[ResponseRecord] = []
        self.sessions: list[SessionRecord] = []
        self._cfg = cfg
        self._utterances = utterances
        self._http = http
        self._on_progress = on_progress
        self._clock = ListenerClock(cfg.slow_motion)
        self._deadline_s = math.inf if cfg.duration is None else cfg.duration

    async def run(self) -> None:
        if self._cfg.arrivals == "closed":
            await self._run_closed()
        else:
            await self._run_open()

    async def _run_closed(self) -> None:
        arrivals = arrival_times_s("closed", self._cfg.seed, ramp_s=self._cfg.ramp)
        users = [self._user(u, next(arrivals)) for u in range(self._cfg.concurrent)]
        await _gather_or_cancel([asyncio.create_task(user) for user in users])

    async def _user(self, user: int, start_s: float) -> None:
        index = user
        while True:
            await self._session(index, start_s)
            index += self._cfg.concurrent
            start_s = self._clock.now_s() + self._cfg.reply_gap
            if start_s >= self._deadline_s or self._cfg.duration is None:
                return

    async def _run_open(self) -> None:
        tasks: list[asyncio.Task[None]] = []
        try:
            async for index, start_s in self._arrivals():
                tasks = [task for task in tasks if not task.done() or task.exception()]
                if len(tasks) < MAX_LIVE_SESSIONS:
                    tasks.append(asyncio.create_task(self._session(index, start_s)))
        finally:
            if sys.exc_info()[0] is not None:
                for task in tasks:
                    task.cancel()
        await _gather_or_cancel(tasks)

    async def _arrivals(self) -> AsyncIterator[tuple[int, float]]:
        cfg = self._cfg
        limit = cfg.sessions or (math.inf if cfg.duration is not None else cfg.concurrent)
        times = arrival_times_s(
            cfg.arrivals, cfg.seed, rate_per_s=cfg.rate, burst_shape=cfg.burst_shape
        )
        for index, start_s in enumerate(times):
            if index >= limit or start_s >= self._deadline_s:
                return
            await self._clock.sleep_until(start_s)
            yield index, start_s

    async def _session(self, index: int, start_s: float) -> None:
        await self._clock.sleep_until(start_s)
        session = Session(
            plan_session(self._cfg.workload(len(self._utterances)), index),
            self._utterances,
            self._cfg.client(),
            self._clock,
            self._http,
            planned_start_s=start_s,
            last_turn_start_s=self._deadline_s,
            on_answer=self._on_progress,
            instructions=instructions_text(self._cfg.seed, index, self._cfg.instructions_chars),
        )
        await session.run()
        self.responses += session.responses
        self.sessions.append(session.record)
        self._on_progress(session.record)


async def _gather_or_cancel(tasks: list[asyncio.Task[None]]) -> None:
    """Wait for all; on a failure or a cancellation let every session close before it is raised."""
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


# -- command line ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``liveserve bench sessions``."""
    d = SessionsConfig()
    server = parser.add_argument_group("server")
    server.add_argument("--url", default=d.url, help="address of the server (%(default)s)")
    server.add_argument("--model", help="served model name (default: the server's first)")
    load = parser.add_argument_group("load")
    load.add_argument(
        "--sessions",
        type=int,
        metavar="N",
        help="closed: users at once (4); poisson, burst: sessions in all (4; no limit with "
        "--duration)",
    )
    load.add_argument("--turns", type=int, default=d.turns, metavar="M", help="per session (3)")
    load.add_argument("--arrivals", choices=ARRIVALS, default=d.arrivals, help="(%(default)s)")
    load.add_argument(
        "--rate", type=float, default=d.rate, help="sessions per second, poisson and burst (1)"
    )
    load.add_argument(
        "--burst-shape",
        type=float,
        default=d.burst_shape,
        help="gamma shape of burst gaps; smaller is burstier, 1 is poisson (%(default)s)",
    )
    load.add_argument(
        "--ramp", type=float, default=d.ramp, help="closed: users start within this many s (2)"
    )
    load.add_argument(
        "--duration",
        type=float,
        metavar="S",
        help="begin sessions and turns for S seconds, then finish those under way",
    )
    load.add_argument(
        "--warmup", type=int, default=d.warmup, help="short unmeasured sessions first (%(default)s)"
    )
    load.add_argument("--seed", type=int, default=d.seed, help="of every draw (%(default)s)")
    load.add_argument(
        "--slow-motion",
        type=float,
        default=d.slow_motion,
        metavar="K",
        help="stretch the users K times and divide reported times by K (%(default)s)",
    )
    users = parser.add_argument_group("users")
    users.add_argument(
        "--answer-seconds",
        type=_seconds_list,
        default=d.answer_seconds,
        metavar="A,B,…",
        help="answer lengths, drawn evenly (10,20,40)",
    )
    users.add_argument(
        "--tokens-per-second",
        type=float,
        default=d.tokens_per_second,
        metavar="R",
        help="ask for a length as max_output_tokens = R x its seconds: text tokens per second of "
        "the model's speech; 0: do not ask, lengths only place barge-ins (%(default)s)",
    )
    users.add_argument(
        "--instructions-chars",
        type=int,
        default=d.instructions_chars,
        metavar="N",
        help="every session has instructions of its own, of N characters (%(default)s)",
    )
    users.add_argument(
        "--p-barge-in", type=float, default=d.p_barge_in, help="chance to interrupt an answer (0)"
    )
    users.add_argument(
        "--barge-in-between",
        type=_seconds_list,
        default=d.barge_in_between,
        metavar="LOW,HIGH",
        help="how much of an answer is heard when it is interrupted, as shares, drawn evenly "
        "(0.1,0.9)",
    )
    users.add_argument(
        "--barge-in",
        choices=("speech", "event"),
        default=d.barge_in,
        help="interrupt by speaking, or by the barge_in event before speaking (%(default)s)",
    )
    users.add_argument(
        "--reply-gap", type=float, default=d.reply_gap, help="mean s before a reply (%(default)s)"
    )
    users.add_argument(
        "--reply-gap-cv",
        type=float,
        default=d.reply_gap_cv,
        help="its coefficient of variation, log-normal (%(default)s)",
    )
    users.add_argument(
        "--end-of-speech",
        choices=("vad", "commit"),
        default=d.end_of_speech,
        help="who ends an utterance: the server's VAD, or the client's commit (%(default)s)",
    )
    users.add_argument("--vad-threshold", type=float, default=d.vad_threshold, help="(0.5)")
    users.add_argument("--vad-silence-ms", type=int, default=d.vad_silence_ms, help="(500)")
    users.add_argument(
        "--continuous-mic",
        action="store_true",
        help="send silence all the time, not only after speech",
    )
    users.add_argument(
        "--speech", metavar="DIR", help="folder of 16 kHz mono WAVs (default: the built-in ones)"
    )
    judge = parser.add_argument_group("judgement and output")
    judge.add_argument(
        "--max-gap-ms",
        type=float,
        default=d.max_gap_ms,
        help="a longer gap breaks continuity (%(default)s)",
    )
    judge.add_argument(
        "--ttfp-slo", type=float, metavar="S", help="a useful turn's first audio comes within S"
    )
    judge.add_argument(
        "--timeout",
        type=float,
        default=d.timeout,
        metavar="S",
        help="give up on an answer after S without audio (%(default)s)",
    )
    judge.add_argument(
        "--codec-frame-rate",
        type=float,
        default=d.codec_frame_rate,
        help="talker tokens per second of audio (%(default)s, Qwen3-Omni)",
    )
    judge.add_argument("--json", metavar="FILE", help="write the result file")
    judge.add_argument("--plots", metavar="DIR", help="write the plots")
    judge.add_argument("--quiet", action="store_true", help="no progress while it runs")


def config_from(args: argparse.Namespace) -> SessionsConfig:
    """The run that the parsed flags describe, validated.

    Raises:
        ValueError: names the flag and the fix.
    """
    cfg = SessionsConfig(
        **{name: getattr(args, name) for name in SessionsConfig.__dataclass_fields__}
    )
    cfg.validate()
    return cfg


def run(args: argparse.Namespace) -> int:
    """Run, print the table, write the files. 0: all went well; 1: a response or a session failed;
    2: the flags are wrong or no server answers; 130: interrupted."""
    console = Console()
    try:
        cfg = config_from(args)
        for flag, path in (("--json", args.json), ("--plots", args.plots)):
            _check_writable(flag, path, folder=flag == "--plots")
        with _ProgressLine(cfg, enabled=not args.quiet) as progress:
            report = asyncio.run(_until_signal(run_sessions(cfg, progress.update)))
    except (ValueError, ServerUnreachable) as exc:
        print(f"liveserve bench sessions: {exc}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("liveserve bench sessions: interrupted; sessions were closed", file=sys.stderr)
        return 130
    metrics = report.metrics
    title = f"{_describe(report.config)}\n{report.span_s:.1f} s, {report.config.url}"
    console.print(results_table(metrics, title))
    if args.plots:
        for path in save_plots(
            Path(args.plots),
            report.responses,
            subtitle=_describe(report.config),
            max_gap_s=cfg.max_gap_ms / 1000,
        ):
            console.print(f"plot: {path}", soft_wrap=True)
    if args.json:
        result = build_result("sessions", [report.case()], command=_command_line())
        write_result(Path(args.json), result)
        console.print(f"result: {args.json}", soft_wrap=True)
    if not report.sessions:
        print(
            f"liveserve bench sessions: no session arrived in --duration {cfg.duration:g}: "
            "raise it or --rate",
            file=sys.stderr,
        )
    return 1 if report.failed else 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="liveserve bench sessions", description=__doc__)
    add_arguments(parser)
    return run(parser.parse_args(argv))


async def _until_signal(work: Coroutine[Any, Any, SessionsReport]) -> SessionsReport:
    """Await ``work``; the first SIGINT or SIGTERM cancels it, later ones find it closing.

    asyncio's own handler raises on a second Ctrl-C wherever the loop is, which leaves sessions open
    on the server until their resume TTL. Closing is bounded, so nobody has to press twice.

    Raises:
        KeyboardInterrupt: a signal came and every session was closed.
    """
    loop, task = asyncio.get_running_loop(), asyncio.ensure_future(work)
    signalled = False

    def stop() -> None:
        nonlocal signalled
        if not signalled:
            signalled = True
            task.cancel()

    with suppress(NotImplementedError, RuntimeError, ValueError):  # Windows, or not the main thread
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
    try:
        return await task
    except asyncio.CancelledError:
        if signalled:
            raise KeyboardInterrupt from None
        raise


def _command_line() -> str:
    module = ["python", "-m", "liveserve.bench.sessions"]
    program = ["liveserve"] if Path(sys.argv[0]).name == "liveserve" else module
    return shlex.join([*program, *sys.argv[1:]])


class _ProgressLine:
    """One live line: sessions done, answers, failures."""

    def __init__(self, cfg: SessionsConfig, *, enabled: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("sessions"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
            disable=not enabled,
        )
        known = cfg.duration is None or (cfg.arrivals != "closed" and cfg.sessions is not None)
        self._task = self._progress.add_task(
            f"{cfg.slow_motion:g}x slow motion" if cfg.slow_motion != 1 else "real time",
            total=cfg.concurrent if known else None,
            note="",
        )
        self._answers = self._failed = 0

    def update(self, record: ResponseRecord | SessionRecord) -> None:
        if isinstance(record, SessionRecord):
            self._progress.advance(self._task)
        else:
            self._answers += 1
            self._failed += record.outcome == FAILED
        note = f"{self._answers} answers" + (f", {self._failed} failed" if self._failed else "")
        self._progress.update(self._task, note=note)

    def __enter__(self) -> _ProgressLine:
        self._progress.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._progress.stop()


def _describe(cfg: SessionsConfig) -> str:
    if cfg.arrivals == "closed":
        load = f"{cfg.concurrent} users at once"
    else:
        load = f"{cfg.arrivals} arrivals at {cfg.rate:g}/s"
    return f"{load}, {cfg.turns} turns, p_bi {cfg.p_barge_in:g}, slow motion K={cfg.slow_motion:g}"


def _check_writable(flag: str, path: str | None, *, folder: bool) -> None:
    """Fail before the run, not after it."""
    if path is None:
        return
    target = Path(path)
    wrong_kind = (target.exists() and not target.is_dir()) if folder else target.is_dir()
    if wrong_kind:
        kind = "a file" if folder else "a folder"
        raise ValueError(f"{flag} {path}: is {kind}; name {'a folder' if folder else 'a file'}")
    try:
        (target if folder else target.parent).mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ValueError(f"{flag} {path}: cannot be written ({exc}); choose another place") from exc


def _seconds_list(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give seconds like 10,20,40") from None


def _require(ok: bool, name: str, value: object, fix: str) -> None:
    if not ok:
        raise ValueError(f"--{name.replace('_', '-')} {value}: {fix}")


def _positive(name: str, value: float) -> None:
    _require(math.isfinite(value) and value > 0, name, value, "use a number above 0")


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    _require(value in choices, name, value, f"choose one of {', '.join(choices)}")


if __name__ == "__main__":
    raise SystemExit(main())
