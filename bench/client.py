"""One simulated user over the host's duplex websocket (``/v1/realtime?duplex=1``).

Speaks the protocol of ``vllm_omni/entrypoints/duplex`` (commands as
``engine/duplex/realtime_commands.py`` reads them). The host has a client of its own,
``vllm_omni.clients.duplex.DuplexClient``; it is not used because importing it imports vLLM, which
a load generator should not need, and because its bounded queues drop the oldest events and its
reconnects hide transport failures, both of which falsify measurements.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from liveserve.bench.player import Player
from liveserve.bench.records import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    ResponseRecord,
    SessionRecord,
)
from liveserve.bench.workload import SAMPLE_RATE_HZ, SessionPlan, TurnPlan, Utterance

MAX_MESSAGE_BYTES = 16 << 20
"""Largest server message accepted: the host's own bound on a client event is 15 MiB."""

_OUTPUT_RATE_HZ = 24_000  # the host's default; audio deltas say when it differs
_HEARTBEAT_WALL_S = 20.0  # well below the host's idle timeout of 300 s
_CLOSE_WALL_S = 5.0
_ENDPOINT_MARGIN_S = 3.0
_TEXT_DELTAS = frozenset(
    {
        "response.output_audio_transcript.delta",
        "response.audio_transcript.delta",
        "response.output_text.delta",
        "response.text.delta",
    }
)


class ListenerClock:
    """Time as the listener lives it: one listener second is ``slow_motion`` wall seconds."""

    def __init__(self, slow_motion: float = 1.0) -> None:
        self.slow_motion = slow_motion
        self._start_wall_s = time.monotonic()

    def now_s(self) -> float:
        return (time.monotonic() - self._start_wall_s) / self.slow_motion

    async def sleep_until(self, when_s: float) -> None:
        await asyncio.sleep(max(0.0, when_s - self.now_s()) * self.slow_motion)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.slow_motion)


@dataclass(frozen=True)
class ClientConfig:
    """How a user talks to the server. ``_s`` fields are listener seconds unless they say wall."""

    url: str
    model: str
    barge_in: str = "speech"
    end_of_speech: str = "vad"
    continuous_mic: bool = False
    vad_threshold: float = 0.5
    vad_silence_ms: int = 500
    timeout_s: float = 60.0
    tokens_per_answer_s: float = 0.0
    ack_interval_s: float = 0.2
    mic_chunk_s: float = 0.1


class SessionError(Exception):
    """A session cannot go on; ``kind`` is the error's kind in the report."""

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(message or kind)
        self.kind = kind


def realtime_url(url: str) -> str:
    """``http://host:port[/prefix]`` to the duplex websocket's address."""
    parts = urlsplit(url)
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    return urlunsplit(
        (scheme, parts.netloc, parts.path.rstrip("/") + "/v1/realtime", "duplex=1", "")
    )


@dataclass
class _Turn:
    """The user's side of one turn, from the first speech sample on."""

    index: int
    plan: TurnPlan
    speech_end_s: float | None = None
    endpoint_s: float | None = None
    error: str | None = None


@dataclass
class _Answer:
    record: ResponseRecord
    turn: _Turn
    response_id: str
    player: Player = field(default_factory=Player)
    digest: hashlib._Hash = field(default_factory=hashlib.sha256)
    text: list[str] = field(default_factory=list)
    ended: bool = False


class Session:
    """One user, one websocket: speaks, listens at 1x, acknowledges playback, barges in."""

    def __init__(
        self,
        plan: SessionPlan,
        utterances: list[Utterance],
        cfg: ClientConfig,
        clock: ListenerClock,
        http: aiohttp.ClientSession,
        *,
        planned_start_s: float = 0.0,
        last_turn_start_s: float = float("inf"),
        on_answer: Callable[[ResponseRecord], None] = lambda _record: None,
        instructions: str = "",
    ) -> None:
        self._plan = plan
        self._instructions = instructions
        self._utterances = utterances
        self._cfg = cfg
        self._clock = clock
        self._http = http
        self._last_turn_start_s = last_turn_start_s
        self._on_answer = on_answer
        self.record = SessionRecord(
            plan.index, planned_start_s, clock.now_s(), turns_planned=len(plan.turns)
        )
        self._answers: dict[str, _Answer] = {}
        self._answer: _Answer | None = None  # the newest
        self._turn: _Turn | None = None
        self._interrupting: _Answer | None = None
        self._created = False
        self._closed: str | None = None
        self._changed = asyncio.Event()
        self._talking = False
        self._event_seq = self._event_seq_acked = 0
        self._last_send_wall_s = 0.0
        self._ws: aiohttp.ClientWebSocketResponse | None = None

    @property
    def responses(self) -> list[ResponseRecord]:
        return [answer.record for answer in self._answers.values()]

    async def run(self) -> None:
        """Live the session to its end. Failures end in ``record``, never in an exception."""
        try:
            async with self._http.ws_connect(
                realtime_url(self._cfg.url), max_msg_size=MAX_MESSAGE_BYTES
            ) as ws:
                self._ws = ws
                await self._run_connected(ws)
        except SessionError as exc:
            self._fail(exc.kind)
        except (aiohttp.ClientError, OSError) as exc:
            self._fail(f"connect_{type(exc).__name__}")
        finally:
            self.record.end_s = self._clock.now_s()
            self._settle()

    # -- the user -----------------------------------------------------------------------------

    async def _run_connected(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        tasks = [asyncio.create_task(self._read(ws))]
        try:
            await self._open()
            tasks.append(asyncio.create_task(self._acknowledge()))
            if self._cfg.continuous_mic:
                tasks.append(asyncio.create_task(self._open_microphone()))
            await self._live()
        finally:
            for task in tasks[1:]:
                task.cancel()
            # A dropped socket would keep the session, and its slot, until the server's resume TTL.
            with suppress(SessionError, asyncio.TimeoutError):
                await self._send({"type": "session.close"})
                await asyncio.wait_for(self._until_closed(), _CLOSE_WALL_S)
            tasks[0].cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception) and not isinstance(result, SessionError):
                    raise result

    async def _open(self) -> None:
        vad = {
            "type": "server_vad",
            "threshold": self._cfg.vad_threshold,
            "silence_duration_ms": self._cfg.vad_silence_ms,
            "create_response": True,
            "interrupt_response": True,
        }
        session: dict[str, object] = {
            "model": self._cfg.model,
            "modalities": ["text", "audio"],
            "input_audio_format": "pcm16",
            "output_audio_format": "pcm16",
            "turn_detection": vad if self._cfg.end_of_speech == "vad" else None,
        }
        if self._instructions:
            session["instructions"] = self._instructions
        if self._clock.slow_motion != 1:
            # A stock server ignores it; LiveServe extrapolates playback at this rate.
            rate = 1 / self._clock.slow_motion
            session["extra_body"] = {"liveserve": {"playback_rate": rate}}
        await self._send({"type": "session.update", "session": session})
        if not await self._wait(lambda: self._created, self._cfg.timeout_s):
            raise SessionError("session_timeout")

    async def _live(self) -> None:
        for index, plan in enumerate(self._plan.turns):
            if self._interrupting is None and index:
                await self._clock.sleep(self._plan.turns[index - 1].reply_gap_s)
            if self._clock.now_s() > self._last_turn_start_s and self._interrupting is None:
                return
            turn = _Turn(index, plan)
            await self._ask(turn)
            self._interrupting = None
            await self._hear(turn)

    async def _ask(self, turn: _Turn) -> None:
        """Say the turn's utterance and let the server find its end."""
        if self._cfg.tokens_per_answer_s:
            tokens = max(1, round(turn.plan.answer_s * self._cfg.tokens_per_answer_s))
            await self._send({"type": "session.update", "session": {"max_output_tokens": tokens}})
        self._turn = turn
        self._talking = True
        try:
            await self._say(self._utterances[turn.plan.utterance].pcm)
        finally:
            self._talking = False
        turn.speech_end_s = self._clock.now_s()
        if self._cfg.end_of_speech == "commit":
            await self._send(
                {"type": "input_audio_buffer.commit", "final": True, "create_response": True}
            )
            turn.endpoint_s = self._clock.now_s()
            return
        limit_s = self._cfg.vad_silence_ms / 1000 + _ENDPOINT_MARGIN_S
        if not self._cfg.continuous_mic:
            silence = bytes(2 * SAMPLE_RATE_HZ * round(limit_s * 1000) // 1000)
            await self._say(silence, until=lambda: turn.endpoint_s is not None)
        if not await self._wait(lambda: turn.endpoint_s is not None, limit_s):
            raise SessionError("no_endpoint", "the server's VAD did not hear the end of the speech")

    async def _hear(self, turn: _Turn) -> None:
        """Listen to the answer: to its end, or until the planned barge-in."""
        clock, timeout_s = self._clock, self._cfg.timeout_s

        def answer() -> _Answer | None:
            current = self._answer
            return current if current is not None and current.turn is turn else None

        def settled() -> bool:
            current = answer()
            return turn.error is not None or (
                current is not None and (current.player.started_s is not None or current.ended)
            )

        await self._wait(settled, timeout_s)
        current = answer()
        if current is None:
            self._end(self._unanswered(turn), FAILED, turn.error or "timeout_first_audio")
            return
        if current.player.started_s is None:
            self._end(current, FAILED, turn.error or "timeout_first_audio")
            return
        player, target_s = current.player, current.record.planned_barge_in_s
        while not current.ended:
            now_s = clock.now_s()
            if turn.error is not None:
                self._end(current, FAILED, turn.error)
            elif player.drained(now_s):
                player.stop(now_s)
                await self._ack(current)
                self._end(current, COMPLETED)
            elif target_s is not None and player.position_s(now_s) >= target_s:
                current.record.barge_in_s = now_s
                self._interrupting = current
                if self._cfg.barge_in == "event" or turn.index == len(self._plan.turns) - 1:
                    await self._send({"type": "barge_in"})
                    player.stop(clock.now_s())
                    await self._ack(current)
                    self._end(current, INTERRUPTED)
                return
            elif not player.complete and now_s > player.reaches_s(player.routed_s) + timeout_s:
                self._end(current, FAILED, "timeout_stalled")
            else:
                heard_s = player.routed_s if target_s is None else target_s
                wake_s = max(player.reaches_s(heard_s), now_s + 0.005)
                if not player.complete and wake_s <= now_s + 0.005:
                    wake_s = now_s + timeout_s  # starved: the next event wakes
                await self._wait(lambda: False, wake_s - now_s, once=True)

    # -- microphone -----------------------------------------------------------------------------

    async def _say(self, pcm: bytes, until: Callable[[], bool] = lambda: False) -> None:
        """Send ``pcm`` in chunks, each when its last sample has been spoken."""
        start_s = self._clock.now_s()
        step = 2 * round(SAMPLE_RATE_HZ * self._cfg.mic_chunk_s)
        for offset in range(0, len(pcm), step):
            chunk = pcm[offset : offset + step]
            await self._clock.sleep_until(start_s + (offset + len(chunk)) / (2 * SAMPLE_RATE_HZ))
            if until():
                return
            await self._send_audio(chunk)

    async def _open_microphone(self) -> None:
        """Silence whenever the user does not speak, as an open microphone sends it."""
        silence = bytes(2 * round(SAMPLE_RATE_HZ * self._cfg.mic_chunk_s))
        while True:
            if self._talking:
                await self._clock.sleep(self._cfg.mic_chunk_s)
            else:
                await self._say(silence, until=lambda: self._talking)

    # -- wire -----------------------------------------------------------------------------------

    async def _send(self, event: dict[str, object]) -> None:
        if self._closed is not None or self._ws is None:
            raise SessionError(self._closed or "connection_lost")
        self._last_send_wall_s = time.monotonic()
        try:
            await self._ws.send_str(json.dumps(event))
        except (aiohttp.ClientError, ConnectionError) as exc:
            self._closed = "connection_lost"
            self._changed.set()
            raise SessionError(self._closed, str(exc)) from exc

    async def _send_audio(self, pcm: bytes) -> None:
        await self._send(
            {
                "type": "input_audio_buffer.append",
                "audio": base64.b64encode(pcm).decode(),
                "format": "pcm16",
                "sample_rate_hz": SAMPLE_RATE_HZ,
            }
        )

    async def _ack(self, answer: _Answer) -> None:
        played_ms = round(1000 * answer.player.position_s(self._clock.now_s()))
        await self._send(
            {"type": "playback.ack", "played_ms": played_ms, "response_id": answer.response_id}
        )

    async def _acknowledge(self) -> None:
        """Report playback, release the server's replay journal, keep the line open."""
        while True:
            await self._clock.sleep(self._cfg.ack_interval_s)
            answer = self._answer
            if answer is not None and answer.player.playing and not answer.ended:
                await self._ack(answer)
            if self._event_seq > self._event_seq_acked:
                self._event_seq_acked = self._event_seq
                await self._send(
                    {"type": "session.event_ack", "server_event_seq": self._event_seq_acked}
                )
            if time.monotonic() - self._last_send_wall_s > _HEARTBEAT_WALL_S:
                await self._send({"type": "session.heartbeat"})

    async def _read(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        async for message in ws:
            if message.type is not aiohttp.WSMsgType.TEXT:
                continue
            try:
                event = json.loads(message.data)
                if not isinstance(event, dict):
                    raise ValueError("not an object")
                await self._on_event(event, self._clock.now_s())
            except ValueError:
                self._count("bad_server_event")
            except SessionError:
                break
            self._changed.set()
        # Not reached when the session ends as it should: the reader is cancelled then.
        self._closed = self._closed or "connection_lost"
        self._changed.set()

    async def _on_event(self, event: dict, now_s: float) -> None:
        kind = event.get("type")
        seq = event.get("server_event_seq")
        if isinstance(seq, int):
            self._event_seq = seq
        if kind == "session.created":
            self._created = True
        elif kind in ("session.closed", "session.expired"):
            self._closed = str(event.get("reason") or kind)
        elif kind == "error":
            self._on_error(event)
        elif kind == "input_audio_buffer.speech_started":
            await self._on_speech_started(now_s)
        elif kind == "input_audio_buffer.speech_stopped":
            if self._turn is not None and self._turn.endpoint_s is None:
                self._turn.endpoint_s = now_s
        elif kind == "response.created":
            self._on_response_created(event, now_s)
        elif isinstance(kind, str) and kind.startswith("response."):
            answer = self._answers.get(_response_id(event))
            if answer is not None:
                await self._on_response_event(kind, event, answer, now_s)

    def _on_error(self, event: dict) -> None:
        error = event.get("error")
        error = error if isinstance(error, dict) else {}
        code = str(error.get("code") or "error")
        if not self._created:
            self._closed = code
            return
        self._count(code)
        if error.get("type") in ("server_error", "rate_limit_error") and self._turn is not None:
            self._turn.error = code

    async def _on_speech_started(self, now_s: float) -> None:
        answer = self._answer
        if answer is None or answer.ended:
            return
        answer.player.stop(now_s)
        if answer is self._interrupting:
            self._end(answer, INTERRUPTED)
        elif answer.player.started_s is None:
            self._end(answer, FAILED, "premature_endpoint")
        else:
            self._end(answer, FAILED, "unwanted_interruption")
        if answer.player.started_s is not None:
            # What was heard decides what the conversation keeps of this answer.
            await self._ack(answer)

    def _on_response_created(self, event: dict, now_s: float) -> None:
        key, turn = _response_id(event), self._turn
        if turn is None or not key or key in self._answers:
            return
        if self._answer is not None and not self._answer.ended:
            self._answer.player.stop(now_s)
            self._end(self._answer, FAILED, "superseded")
        self._answer = self._answers[key] = _Answer(self._new_record(turn), turn, key)
        self._answer.record.created_s = now_s

    async def _on_response_event(
        self, kind: str, event: dict, answer: _Answer, now_s: float
    ) -> None:
        record = answer.record
        if kind in ("response.output_audio.delta", "response.audio.delta"):
            data = base64.b64decode(event.get("delta") or event.get("audio") or "")
            if not data:
                return
            rate_hz = event.get("sample_rate_hz") or _OUTPUT_RATE_HZ
            answer.player.push(now_s, len(data) / (2 * rate_hz))
            answer.digest.update(data)
            record.arrivals.append((now_s, answer.player.routed_s))
            record.last_audio_s = now_s
            if record.first_audio_s is None:
                record.first_audio_s = now_s
        elif kind in _TEXT_DELTAS and event.get("delta"):
            answer.text.append(str(event["delta"]))
            record.text_deltas += 1
            if record.first_text_s is None:
                record.first_text_s = now_s
        elif kind == "response.done":
            record.done_s = now_s
            response = event.get("response")
            status = response.get("status") if isinstance(response, dict) else None
            if status == "completed" and answer.player.routed_s:
                answer.player.finish()
            elif status == "completed":
                self._end(answer, FAILED, "no_audio")
            elif answer is self._interrupting and status == "cancelled":
                answer.player.stop(now_s)
                self._end(answer, INTERRUPTED)
            elif not answer.ended:
                answer.player.stop(now_s)
                self._end(answer, FAILED, f"response_{status}")

    # -- bookkeeping ----------------------------------------------------------------------------

    async def _wait(
        self, predicate: Callable[[], bool], timeout_s: float, *, once: bool = False
    ) -> bool:
        """Wait until ``predicate`` holds after some event; ``once``: return at the next event.

        Raises:
            SessionError: the session was closed from the other side meanwhile.
        """
        deadline_s = self._clock.now_s() + timeout_s
        while not predicate():
            if self._closed is not None:
                raise SessionError(self._closed)
            left_s = deadline_s - self._clock.now_s()
            if left_s <= 0:
                return False
            self._changed.clear()
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left_s * self._clock.slow_motion)
            if once:
                return predicate()
        return True

    async def _until_closed(self) -> None:
        while self._closed is None:
            self._changed.clear()
            await self._changed.wait()

    def _new_record(self, turn: _Turn) -> ResponseRecord:
        fraction = turn.plan.barge_in_fraction
        return ResponseRecord(
            session=self._plan.index,
            turn=turn.index,
            planned_answer_s=turn.plan.answer_s,
            planned_barge_in_s=None if fraction is None else fraction * turn.plan.answer_s,
            utterance=self._utterances[turn.plan.utterance].name,
        )

    def _unanswered(self, turn: _Turn) -> _Answer:
        """Stands for the answer that a turn never got."""
        key = f"unanswered-{turn.index}"
        self._answers[key] = _Answer(self._new_record(turn), turn, key)
        return self._answers[key]

    def _end(self, answer: _Answer, outcome: str, error: str | None = None) -> None:
        if answer.ended:
            return
        answer.ended = True
        answer.record.outcome, answer.record.error = outcome, error
        if error is not None:
            self._count(error)
        self._fill(answer)
        self._on_answer(answer.record)

    def _count(self, kind: str) -> None:
        self.record.errors[kind] += 1

    def _fail(self, kind: str) -> None:
        self.record.error = kind
        self._count(kind)
        turn = self._turn
        if turn is not None and not any(a.turn is turn for a in self._answers.values()):
            self._unanswered(turn)

    def _settle(self) -> None:
        for answer in self._answers.values():
            answer.player.stop(self._clock.now_s())
            if not answer.ended:
                answer.ended = True
                answer.record.error = self.record.error or "session_ended"
                self._on_answer(answer.record)
            self._fill(answer)  # again: audio that came after a barge-in counts as routed
            self.record.turns_done += answer.record.outcome != FAILED

    def _fill(self, answer: _Answer) -> None:
        """What the turn and the player know, into the record."""
        record, player = answer.record, answer.player
        now_s = self._clock.now_s()
        record.speech_end_s = answer.turn.speech_end_s
        record.endpoint_s = answer.turn.endpoint_s
        record.stopped_s = player.stopped_s if player.started_s is not None else None
        record.routed_s = player.routed_s
        record.heard_s = player.position_s(now_s)
        record.gaps = player.gaps
        record.playback = player.timeline(now_s)
        record.text = "".join(answer.text)
        record.audio_sha256 = answer.digest.hexdigest() if player.routed_s else ""


def _response_id(event: dict) -> str:
    """``response_id``, or ``response.id`` where only the nested one is there."""
    response = event.get("response")
    nested = response.get("id") if isinstance(response, dict) else None
    return str(event.get("response_id") or nested or "")
