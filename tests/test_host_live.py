"""The real three-stage pipeline on a CPU with LiveServe on: what engines see, and bad clients."""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
import time
from pathlib import Path

import aiohttp
import pytest

from liveserve.profile import TO_AUDIO, TO_TEXT

from duplex import MAX_SESSIONS, SILENCE, Duplex, connect, get, post, speech

pytestmark = [pytest.mark.host, pytest.mark.alone]

STAGES = ["thinker", "talker", "code2wav"]


@pytest.fixture(scope="module")
def server(live_server):
    return live_server


async def engines(url: str) -> dict[str, dict]:
    report = await get(url, "/liveserve/pressure", detail=1, timeout_s=10)
    return {engine["snapshot"]["stage"]: engine for engine in report["engines"]}


async def views(url: str, session_id: str) -> list[dict | None]:
    """The session in the thinker's, the talker's and code2wav's views."""
    found = []
    for stage, engine in (await engines(url)).items():
        assert engine["answered"], stage
        rows = [row for row in engine["views"] if row["session_id"] == session_id]
        found.append(rows[0] if rows else None)
    return found


async def eventually(condition, timeout_s: float = 20.0, every_s: float = 0.1):
    deadline = time.monotonic() + timeout_s
    while True:
        value = await condition()
        if value or time.monotonic() > deadline:
            return value
        await asyncio.sleep(every_s)


async def nothing_left(url: str) -> bool:
    """No session, no request, no KV block in use anywhere."""
    sessions = await get(url, "/liveserve/sessions")
    state = await engines(url)
    return not sessions["sessions"] and all(
        not engine["requests"] and not engine["views"] and not engine["snapshot"]["kv_blocks_used"]
        for engine in state.values()
    )


async def test_every_stage_runs_our_scheduler_and_answers(server):
    state = await engines(server.url)
    assert list(state) == STAGES
    for engine in state.values():
        assert engine["snapshot"]["attached"]
        assert not engine["snapshot"]["stale"]
        assert engine["snapshot"]["steps_total"] > 0
        assert engine["snapshot"]["errors_total"] == 0


async def test_the_parts_of_a_turn_add_up_to_what_the_client_sees(server):
    """Split by marks of four processes, summed, and compared with the client's own clock."""
    async with connect(server.url) as session:
        for _ in range(2):
            await post(server.url, "/liveserve/profile", seconds=60)
            mark = session.mark
            await session.send("session.update", session={"max_output_tokens": 8})
            saying = asyncio.ensure_future(session.say(speech()))
            seen_s = {}
            for kind in ("input_audio_buffer.speech_stopped", "response.output_audio.delta"):
                await session.wait(kind, after=mark)
                seen_s[kind] = time.monotonic()
            await saying
            await session.wait("response.done", after=mark)
            await asyncio.sleep(0.2)
    stopped_s, heard_s = seen_s.values()

    async def all_turns():
        report = await post(server.url, "/liveserve/profile", seconds=60)
        mine = [turn for turn in report["turns"] if turn["session_id"] == session.session_id]
        return mine if len(mine) == 2 else None

    turns = await eventually(all_turns)
    assert turns
    for turn in turns:
        parts = turn["parts"]
        assert set(parts) == {*TO_AUDIO, *TO_TEXT}, turn
        assert min(parts.values()) > -0.001, turn
        for whole, names in (("to_audio_s", TO_AUDIO), ("to_text_s", TO_TEXT)):
            assert sum(parts[name] for name in names) == pytest.approx(turn[whole], abs=0.002)
    print({name: f"{1e3 * value:.0f} ms" for name, value in parts.items()})
    # The client hears of it later, by however long a busy machine lets it wait.
    for told_s, name in ((stopped_s, "speech_end_s"), (heard_s, "audio_s")):
        assert told_s - 0.5 < turns[-1][name] < told_s + 0.01


async def test_an_ack_reaches_every_engine_within_100_ms(server):
    async with connect(server.url) as session:
        response_id, mark = await session.answer(tokens=16)
        await session.wait("response.done", after=mark)
        await asyncio.sleep(0.3)  # idle
        took = []
        for played_ms in (150, 300, 450, 600, 750):
            started = time.monotonic()
            await session.send("playback.ack", played_ms=played_ms, response_id=response_id)
            while any(
                view is None or round(view["acked_s"] * 1e3) != played_ms
                for view in await views(server.url, session.session_id)
            ):
                assert time.monotonic() - started < 5, "the ack never arrived"
            took.append(time.monotonic() - started)
            await asyncio.sleep(0.2)
        for view in await views(server.url, session.session_id):
            assert view["clock_source"] == "ack"
            assert view["routed_s"] == pytest.approx(session.audio_s(response_id), abs=0.05)
        print(f"ack to all three views: median {1e3 * statistics.median(took):.0f} ms")
        assert min(took) < 0.1  # the others may have waited for the machine


async def test_a_spoken_barge_in_is_seen_by_all_three(server):
    async with connect(server.url) as session:
        response_id, _ = await session.answer(tokens=64)
        await session.send("playback.ack", played_ms=100, response_id=response_id)
        mark = session.mark
        await session.say(speech("wait"))
        done = await session.wait("response.done", after=mark)
        assert done["response"]["status"] == "cancelled"

        async def seen():
            found = await views(server.url, session.session_id)
            return all(view is not None and view["barge_ins"] == 1 for view in found)

        assert await eventually(seen)
        totals = (await get(server.url, "/liveserve/sessions"))["totals"]
        assert sum(totals["barge_ins"].values()) >= 1
        assert totals["audio_wasted_s"] > 0
    assert await eventually(lambda: nothing_left(server.url))


def prompt_lengths(server) -> list[int]:
    """Tokens of each prompt that the thinker has seen, in order."""
    lengths: dict[str, int] = {}
    record = server.log.parent / "record" / "stage0.jsonl"
    for line in record.read_text().splitlines():
        for request, rows in json.loads(line).get("rows", {}).items():
            lengths[request] = lengths.get(request, 0) + (len(rows) if len(rows) > 1 else 0)
    return list(lengths.values())


async def second_prompt(server, heard_ms: int | None) -> int:
    """Tokens of the prompt that follows an answer of 12.8 s, of which ``heard_ms`` were heard."""
    async with connect(server.url) as session:
        response_id, mark = await session.answer(tokens=40)
        if heard_ms is None:
            await session.wait("response.done", after=mark)
            heard_ms = int(1e3 * session.audio_s(response_id))
        else:
            while session.audio_s(response_id) * 1e3 < heard_ms:
                await asyncio.sleep(0.05)
        if heard_ms:
            await session.send("playback.ack", played_ms=heard_ms, response_id=response_id)
            await session.wait("playback.acknowledged", after=mark)
        await session.answer(tokens=4, name="why")
        return prompt_lengths(server)[-1]


async def test_the_history_keeps_what_was_heard(server):
    whole = await second_prompt(server, None)
    part = await second_prompt(server, 3_200)
    nothing = await second_prompt(server, 0)
    assert whole - nothing >= 37  # a token of the answer's text is a token of the prompt
    assert (part - nothing) / (whole - nothing) == pytest.approx(3.2 / 12.8, abs=0.1)


async def test_requests_are_classed_while_an_answer_is_made(server):
    """U1 before the first packet; afterwards P is the stage's lead over the listener."""
    async with connect(server.url) as session:
        await session.send("session.update", session={"max_output_tokens": 48})
        speaking = asyncio.ensure_future(session.say(speech("story")))
        seen: dict[str, set[str]] = {stage: set() for stage in STAGES}
        leads: list[float] = []
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not session.of_type("response.done"):
            for stage, engine in (await engines(server.url)).items():
                for row in engine.get("requests", []):
                    assert row["session_id"] == session.session_id
                    seen[stage].add(row["urgency"])
                    if stage == "talker" and row["buffer_s"] is not None:
                        leads.append(row["buffer_s"])
            await asyncio.sleep(0.02)
        await speaking
        assert "U1" in seen["thinker"] | seen["talker"]
        assert seen["talker"] & {"U0", "U2"}
        assert leads
        assert max(leads) > 0


async def test_chat_with_audio_is_a_session_by_the_wall_clock(server):
    body = {
        "model": server.name,
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "modalities": ["text", "audio"],
        "stream": True,
        "max_tokens": 12,
    }
    async with aiohttp.ClientSession() as http:
        async with http.post(server.url + "/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            text = await response.text()
    assert '"audio"' in text
    sessions = (await get(server.url, "/liveserve/sessions"))["sessions"]
    (row,) = [s for s in sessions if s["session_id"].startswith("chatcmpl")]
    assert row["phase"] == "speaking"
    assert row["clock_source"] == "wall"
    assert row["routed_s"] == pytest.approx(audio_seconds(text), abs=0.05)
    # gone once it was played
    assert await eventually(lambda: nothing_left(server.url), timeout_s=30)


def audio_seconds(stream: str) -> float:
    """Seconds of audio in a chat completion's event stream."""
    import base64
    import io

    import soundfile

    total_s = 0.0
    for line in stream.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.get("choices", []):
            data = choice["delta"].get("content")
            if event.get("modality") == "audio" and data:
                samples, rate_hz = soundfile.read(io.BytesIO(base64.b64decode(data)))
                total_s += len(samples) / rate_hz
    return total_s


async def test_metrics_are_in_the_hosts_exposition(server):
    async with aiohttp.ClientSession() as http:
        async with http.get(server.url + "/metrics") as response:
            text = await response.text()
    for stage in STAGES:
        assert f'liveserve_step_seconds{{replica="0",stage="{stage}"}}' in text
    assert "liveserve_audio_routed_seconds_total" in text
    assert "vllm:" in text


async def test_switches_flip_without_a_restart(server):
    async def stages_with(**expected):
        state = await engines(server.url)
        found = [engine["snapshot"]["switches"] for engine in state.values()]
        return all(expected.items() <= switches.items() for switches in found)

    async with aiohttp.ClientSession() as http:
        address = server.url + "/liveserve/switches"
        before = await get(server.url, "/liveserve/switches")
        assert [name for name, on in before.items() if not on] == ["kv_prefill"]
        async with http.post(address, json={"pace": False, "order": False}) as response:
            assert response.status == 200
        assert await eventually(lambda: stages_with(pace=False, order=False, chunking=True))
        for bad, names in (({"warp": True}, "warp"), ({"pace": 3}, "bool"), ([1], "object")):
            async with http.post(address, json=bad) as response:
                assert response.status == 400
                assert names in await response.text()
        async with connect(server.url) as session:
            _, mark = await session.answer(tokens=6)
            await session.wait("response.done", after=mark)
        async with http.post(address, json=before) as response:
            assert await response.json() == before
        assert await eventually(lambda: stages_with(pace=True, order=True))


# ---- bad input ---------------------------------------------------------------------------------


async def expect_error(session: Duplex, mark: int, code: str) -> dict:
    event = await session.wait("error", "test.disconnected", after=mark, timeout_s=20)
    assert event["type"] == "error", "the connection was dropped"
    error = event["error"]
    assert error["code"] == code, error
    assert error["message"]
    return error


async def test_impossible_acks_get_an_error_and_change_nothing(server):
    async with connect(server.url) as victim, connect(server.url) as session:
        other_id, _ = await victim.answer(tokens=16)
        response_id, answer_mark = await session.answer(tokens=16)
        await session.wait("response.done", after=answer_mark)
        await session.send("playback.ack", played_ms=900, response_id=response_id)
        await session.wait("playback.acknowledged")
        before = await views(server.url, victim.session_id)
        for fields, code in (
            ({"played_ms": -5}, "playback_ack_invalid"),
            ({"played_ms": 10_000_000}, "playback_ack_ahead"),
            ({"played_ms": 10}, "playback_ack_backwards"),
            ({"played_ms": 950, "committed_ms": -3}, "playback_ack_invalid"),
            ({"played_ms": 950, "committed_ms": 10**12}, "playback_ack_ahead"),
            ({"played_ms": float("nan")}, "bad_event"),
            ({"played_ms": float("inf")}, "bad_event"),
            ({"played_ms": "soon"}, "bad_event"),
            ({"played_ms": 400, "response_id": other_id}, "playback_item_not_found"),
        ):
            mark = session.mark
            await session.send("playback.ack", **({"response_id": response_id} | fields))
            await expect_error(session, mark, code)
        for view in await views(server.url, session.session_id):
            assert view["acked_s"] == pytest.approx(0.9)
        after = await views(server.url, victim.session_id)
        assert [v["acked_s"] for v in after] == [v["acked_s"] for v in before]
        await session.send("playback.ack", played_ms=1000, response_id=response_id)
        mark = session.mark
        await session.wait("playback.acknowledged", after=mark - 1)


async def test_malformed_events_get_an_error_and_the_session_goes_on(server):
    async with connect(server.url) as session:
        await session.wait("session.created")
        for raw, code in (
            ("{not json", "invalid_json"),
            ("[1, 2]", "bad_event"),
            ('{"type": 7}', "bad_event"),
            ('{"type": "no.such.event", "event_id": "e1"}', "unknown_event"),
            ('{"type": "input_audio_buffer.append", "audio": "%%%"}', None),
            ('{"type": "input_audio_buffer.append", "audio": "AAA=", "sample_rate_hz": NaN}', None),
            ('{"type": "conversation.item.truncate", "item_id": "x", "audio_end_ms": NaN}', None),
        ):
            mark = session.mark
            await session.socket.send_str(raw)
            reply = await session.wait("error", "test.disconnected", after=mark, timeout_s=20)
            assert reply["type"] == "error", raw
            assert code is None or reply["error"]["code"] == code, raw
        mark = session.mark
        await session.send(
            "session.update", session={"extra_body": {"liveserve": {"playback_rate": -2}}}
        )
        await expect_error(session, mark, "invalid_playback_rate")
        _, mark = await session.answer(tokens=6)
        await session.wait("response.done", after=mark)


async def test_a_flood_hurts_only_its_sender(server):
    rss = sum(rss_bytes(pid) for pid in server.pids())
    async with connect(server.url) as neighbour, connect(server.url) as flooder:
        await flooder.wait("session.created")
        for _ in range(10_000):
            await flooder.send("playback.ack", played_ms=1)
        answer = asyncio.ensure_future(neighbour.answer(tokens=8))
        error = await flooder.wait("error", timeout_s=30)
        assert error["error"]["code"] in {"rate_limited", "playback_item_not_found"}

        async def limited():
            return any(e["error"]["code"] == "rate_limited" for e in flooder.of_type("error"))

        assert await eventually(limited, timeout_s=30)
        _, mark = await answer
        await neighbour.wait("response.done", after=mark)
        for engine in (await engines(server.url)).values():
            assert engine["snapshot"]["events_lost"] == 0
            assert engine["snapshot"]["errors_total"] == 0
        await asyncio.sleep(3)  # the allowance grows back
        mark = flooder.mark
        await flooder.send("session.heartbeat")
        await flooder.wait("session.heartbeat_ack", after=mark)
    grown = sum(rss_bytes(pid) for pid in server.pids()) - rss
    assert grown < 200e6, f"memory grew by {grown / 1e6:.0f} MB"


def rss_bytes(pid: int) -> int:
    try:
        return 4096 * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


# ---- nothing leaks -----------------------------------------------------------------------------


async def test_one_session_too_many_is_refused_and_frees_nothing_it_should_not(server):
    async with connect(server.url) as a, connect(server.url) as b, connect(server.url) as c:
        for session in (a, b, c):
            await session.wait("session.created")
        async with connect(server.url, close=False) as extra:
            refused = await extra.wait("error", "test.disconnected", timeout_s=20)
            assert refused["type"] == "error"
            assert not extra.of_type("session.created")
        assert len((await get(server.url, "/liveserve/sessions"))["sessions"]) == MAX_SESSIONS
    assert await eventually(lambda: nothing_left(server.url))
    async with connect(server.url) as again:
        _, mark = await again.answer(tokens=6)
        await again.wait("response.done", after=mark)


async def test_a_client_that_vanishes_mid_answer_leaves_nothing(server):
    async with connect(server.url, close=False) as session:
        await session.answer(tokens=128)
    assert await eventually(lambda: nothing_left(server.url), timeout_s=30)
    async with connect(server.url) as again:
        _, mark = await again.answer(tokens=6)
        await again.wait("response.done", after=mark)


async def test_the_openai_client_drives_a_conversation(server):
    openai = pytest.importorskip("openai")
    import base64

    client = openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none")
    async with client.realtime.connect(
        model=server.name, extra_query={"duplex": "1"}
    ) as connection:
        detection = {"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 400}
        await connection.session.update(
            session={
                "type": "realtime",
                "output_modalities": ["audio"],
                "max_output_tokens": 12,
                "audio": {"input": {"turn_detection": detection}},
            }
        )
        audio = speech("weather") + SILENCE
        for start in range(0, len(audio), 3200):
            chunk = base64.b64encode(audio[start : start + 3200]).decode()
            await connection.input_audio_buffer.append(audio=chunk)
            await asyncio.sleep(0.02)
        got: list[str] = []
        heard = 0
        async with asyncio.timeout(60):
            async for event in connection:
                got.append(event.type)
                assert event.type != "error", event
                if event.type == "response.output_audio.delta":
                    heard += len(base64.b64decode(event.delta))
                if event.type == "response.done":
                    break
    assert {"session.created", "session.updated", "response.created"} <= set(got)
    assert heard > 24_000  # half a second of 16-bit 24 kHz


# ---- last: the server dies ---------------------------------------------------------------------


@pytest.mark.kills_server
async def test_a_killed_server_leaves_no_process_behind(server):
    pids = server.pids()
    assert len(pids) >= 4
    async with connect(server.url, close=False) as session:
        await session.answer(tokens=64)
        server.kill(signal.SIGKILL)
        await session.wait("test.disconnected", timeout_s=20)
    server.process.wait(10)

    async def gone():
        return not any(alive(pid) for pid in pids)

    assert await eventually(gone, timeout_s=20), [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
