"""A duplex client for tests: every wire event by hand, nothing hidden; and a server for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import time
import wave
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import Server, running_server
from liveserve.host.cpu.deploy import deploy_path
from liveserve.host.cpu.record import RECORD_ENV

SPEECH = Path(__file__).resolve().parents[1] / "bench" / "assets"
MODEL = Path(__file__).resolve().parents[1] / ".cache" / "tiny-model"
MAX_SESSIONS = 3  # of the server that tests share
SAMPLE_RATE_HZ = 16_000
SILENCE = b"\0" * (2 * SAMPLE_RATE_HZ)  # one second


def speech(name: str = "weather") -> bytes:
    """16-bit mono PCM of a committed utterance."""
    with wave.open(str(SPEECH / f"{name}.wav")) as audio:
        return audio.readframes(audio.getnframes())


class Duplex:
    """One connection. ``seen`` holds every event in order."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []
        self.arrived = asyncio.Condition()
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for message in self.socket:
            if message.type is aiohttp.WSMsgType.TEXT:
                async with self.arrived:
                    self.seen.append(json.loads(message.data))
                    self.arrived.notify_all()
        async with self.arrived:
            self.seen.append({"type": "test.disconnected"})
            self.arrived.notify_all()

    async def send(self, event_type: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": event_type, **fields}))

    async def wait(self, *types: str, timeout_s: float = 60.0, after: int = 0) -> dict[str, Any]:
        """The first event of one of ``types`` at or behind position ``after``."""
        deadline = time.monotonic() + timeout_s
        position = after
        async with self.arrived:
            while True:
                for event in self.seen[position:]:
                    if event["type"] in types:
                        return event
                position = len(self.seen)
                left = deadline - time.monotonic()
                try:
                    await asyncio.wait_for(self.arrived.wait(), max(0.01, left))
                except (TimeoutError, asyncio.TimeoutError):
                    kinds = [event["type"] for event in self.seen[after:]]
                    raise AssertionError(f"no {types} within {timeout_s} s; got {kinds}") from None

    @property
    def mark(self) -> int:
        return len(self.seen)

    def of_type(self, event_type: str, after: int = 0) -> list[dict[str, Any]]:
        return [event for event in self.seen[after:] if event["type"] == event_type]

    async def say(self, pcm: bytes, *, pace: float = 4.0, silence_s: float = 1.0) -> None:
        """Speak ``pcm`` and fall silent, ``pace`` times faster than a person."""
        audio = pcm + SILENCE[: int(2 * SAMPLE_RATE_HZ * silence_s)]
        piece = 2 * SAMPLE_RATE_HZ // 10
        for start in range(0, len(audio), piece):
            data = base64.b64encode(audio[start : start + piece]).decode()
            await self.send("input_audio_buffer.append", audio=data)
            await asyncio.sleep(0.1 / pace)

    async def answer(self, *, tokens: int, name: str = "weather") -> tuple[str, int]:
        """Ask, and wait for the first audio; returns the response id and where it began."""
        mark = self.mark
        await self.send("session.update", session={"max_output_tokens": tokens})
        await self.say(speech(name))
        delta = await self.wait("response.output_audio.delta", "error", after=mark)
        assert delta["type"] == "response.output_audio.delta", delta
        return delta["response_id"], mark

    def audio_s(self, response_id: str) -> float:
        """Seconds of audio received for a response (16-bit, 24 kHz)."""
        deltas = self.of_type("response.output_audio.delta")
        parts = [d["delta"] for d in deltas if d["response_id"] == response_id]
        return sum(len(base64.b64decode(part)) for part in parts) / 2 / 24_000

    @property
    def session_id(self) -> str:
        return self.of_type("session.created")[0]["session"]["id"]


@contextlib.asynccontextmanager
async def connect(url: str, *, close: bool = True, **session: Any) -> AsyncIterator[Duplex]:
    """Open a duplex session with server VAD; leaves it open on the server if not ``close``."""
    options = {
        "model": "tiny",
        "modalities": ["text", "audio"],
        "turn_detection": {
            "type": "server_vad",
            "threshold": 0.5,
            "silence_duration_ms": 400,
            "create_response": True,
            "interrupt_response": True,
        },
        **session,
    }
    address = url.replace("http", "ws", 1) + "/v1/realtime?duplex=1"
    timeout = aiohttp.ClientTimeout(total=None, connect=30)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        async with http.ws_connect(address, max_msg_size=1 << 26) as socket:
            duplex = Duplex(socket)
            try:
                await duplex.send("session.update", session=options)
                yield duplex
                if close:
                    await duplex.send("session.close")
                    await duplex.wait("session.closed", "test.disconnected", timeout_s=20)
            finally:
                duplex.reader.cancel()


async def turn(session: Duplex, name: str, tokens: int) -> tuple[str, str]:
    """One turn of a session without VAD: its client ends it itself, and hears the answer to its
    end. Returns (text, digest of the audio)."""
    mark = session.mark
    await session.send("session.update", session={"max_output_tokens": tokens})
    data = base64.b64encode(speech(name)).decode()
    await session.send("input_audio_buffer.append", audio=data)
    await session.send("input_audio_buffer.commit", final=True, create_response=True)
    done = await session.wait("response.done", "error", after=mark)
    assert done["type"] == "response.done", done
    deltas = session.of_type("response.output_audio.delta", after=mark)
    audio = b"".join(base64.b64decode(delta["delta"]) for delta in deltas)
    assert audio, done
    played_ms = int(1e3 * len(audio) / 2 / 24_000)
    response_id = deltas[0]["response_id"]
    await session.send("playback.ack", played_ms=played_ms, response_id=response_id)
    heard = await session.wait("playback.acknowledged", "error", after=mark)
    assert heard["type"] == "playback.acknowledged", heard
    texts = session.of_type("response.output_audio_transcript.delta", after=mark)
    return "".join(delta["delta"] for delta in texts), hashlib.sha256(audio).hexdigest()


@contextlib.contextmanager
def live_server(folder: Path) -> Iterator[Server]:
    """LiveServe as it comes, but for few sessions, and a short grace for clients that vanish.

    What its engines compute is recorded in ``folder / "record"``. It has answered once: a server's
    first answer is slow.
    """
    ensure_tiny_model(MODEL)
    path = deploy_path("duplex", max_sessions=MAX_SESSIONS, folder=folder)
    deploy = yaml.safe_load(path.read_text())
    deploy["duplex_session"] |= {"disconnect_grace_s": 1.0, "reaper_interval_s": 0.25}
    path.write_text(yaml.safe_dump(deploy))
    flags = ["--deploy-config", str(path), "--fast-codes"]
    env = {RECORD_ENV: str(folder / "record")}
    with running_server(MODEL, folder / "server.log", flags=flags, env=env) as server:
        asyncio.run(_answer_once(server.url))
        yield server


async def _answer_once(url: str) -> None:
    async with connect(url) as session:
        await session.answer(tokens=4)
        await session.wait("response.done")


async def get(url: str, path: str, **params: Any) -> Any:
    """JSON of a GET."""
    async with aiohttp.ClientSession() as http, http.get(url + path, params=params) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def post(url: str, path: str, **params: Any) -> Any:
    """JSON of a POST without a body."""
    async with aiohttp.ClientSession() as http, http.post(url + path, params=params) as response:
        assert response.status == 200, await response.text()
        return await response.json()
