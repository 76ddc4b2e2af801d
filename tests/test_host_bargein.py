"""Barge-in on the real pipeline: nothing is left in any phase, waste is counted, blips pass."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import pytest

from duplex import SAMPLE_RATE_HZ, SILENCE, Duplex, connect, get, speech

pytestmark = [pytest.mark.host, pytest.mark.alone]

STAGES = ["thinker", "talker", "code2wav"]
BLIP = speech("wait")[: 2 * SAMPLE_RATE_HZ * 15 // 100]  # 150 ms: the VAD's start, not a word
FRAME_S = 0.08


@pytest.fixture(scope="module")
def server(live_server):
    return live_server


async def totals(url: str) -> dict:
    return (await get(url, "/liveserve/sessions"))["totals"]


async def requests_left(url: str) -> dict[str, tuple[int, int]]:
    """Requests and used KV blocks of each stage that has any."""
    report = await get(url, "/liveserve/pressure", detail=1, timeout_s=10)
    left = {}
    for engine in report["engines"]:
        snapshot = engine["snapshot"]
        if engine["requests"] or snapshot["kv_blocks_used"]:
            left[snapshot["stage"]] = (len(engine["requests"]), snapshot["kv_blocks_used"])
    return left


async def nothing_left(url: str, within_s: float) -> None:
    deadline = time.monotonic() + within_s
    while left := await requests_left(url):
        assert time.monotonic() < deadline, left
        await asyncio.sleep(0.05)


def grown(before: dict, after: dict) -> dict[str, dict[str, float]]:
    """What each stage made and wasted in between."""
    none = dict.fromkeys(("made_tokens", "wasted_tokens", "made_s", "wasted_s"), 0.0)
    old = before["stages"]
    return {
        stage: {name: value - old.get(stage, none)[name] for name, value in made.items()}
        for stage, made in after["stages"].items()
    }


async def ask(session: Duplex, tokens: int) -> int:
    """Say something and fall silent; returns where the answer's events begin."""
    mark = session.mark
    await session.send("session.update", session={"max_output_tokens": tokens})
    await session.say(speech("weather"), pace=8, silence_s=0.6)
    return mark


async def interrupted_in(phase: str, session: Duplex) -> tuple[str, float]:
    """Take an answer to ``phase`` and interrupt it. Returns its id, and how much was heard."""
    if phase in ("thinking", "text, no audio"):
        speaking = asyncio.ensure_future(ask(session, 64))
        created = await session.wait("response.created")  # announced as it is asked for
        if phase == "text, no audio":
            await session.wait("response.output_audio_transcript.delta")
        await session.send("barge_in")
        await session.wait("response.done")
        await speaking
        if session.of_type("response.output_audio.delta"):
            pytest.skip("its audio was quicker than the interruption")
        return created["response"]["id"], 0.0
    tokens = 128 if phase == "mid-playback" else 24
    response_id, mark = await session.answer(tokens=tokens)
    if phase == "complete, unheard":
        await session.wait("response.done", after=mark)
    while session.audio_s(response_id) < 2.0:
        await asyncio.sleep(0.02)
    await session.send("playback.ack", played_ms=300, response_id=response_id)
    await session.wait("playback.acknowledged", after=mark)
    await session.send("barge_in")
    return response_id, 0.3


PHASES = ["thinking", "text, no audio", "mid-playback", "complete, unheard"]


@pytest.mark.parametrize("phase", PHASES)
async def test_an_interrupted_answer_leaves_nothing_and_is_accounted(server, phase):
    before = await totals(server.url)
    async with connect(server.url) as session:
        await session.wait("session.created")
        response_id, heard_s = await interrupted_in(phase, session)
        await nothing_left(server.url, within_s=3.0)
        after = await totals(server.url)
        assert sum(after["barge_ins"].values()) == sum(before["barge_ins"].values()) + 1
        spent = grown(before, after)
        done = session.of_type("response.done")
        status = "completed" if phase == "complete, unheard" else "cancelled"
        assert [d["response"]["status"] for d in done] == [status]
        received_s = session.audio_s(response_id)
        if not heard_s:
            if phase == "text, no audio":
                assert spent["thinker"]["wasted_tokens"] > 0
            # nothing was heard: all that any stage made is waste
            for stage in spent.values():
                assert stage["wasted_tokens"] == pytest.approx(stage["made_tokens"])
                assert stage["wasted_s"] == pytest.approx(stage["made_s"])
        else:
            talker, code2wav, thinker = spent["talker"], spent["code2wav"], spent["thinker"]
            print(f"{phase}: {received_s:.2f} s received, {heard_s} s acknowledged, {spent}")
            assert code2wav["made_s"] >= received_s - 0.05
            assert talker["made_s"] >= code2wav["made_s"] - 0.05  # frames come before their audio
            assert talker["made_tokens"] >= received_s / FRAME_S - 1
            assert thinker["made_tokens"] > 0
            for stage in (talker, code2wav):
                # heard: what was acknowledged, and up to a second of playing on since
                assert heard_s - 0.01 <= stage["made_s"] - stage["wasted_s"] <= heard_s + 1.0
            assert 0 < thinker["wasted_tokens"] < thinker["made_tokens"]
        # the session goes on
        _, mark = await session.answer(tokens=4)
        done = await session.wait("response.done", after=mark)
        assert done["response"]["status"] == "completed"


async def test_an_answer_that_is_heard_wastes_nothing(server):
    before = await totals(server.url)
    async with connect(server.url) as session:
        response_id, mark = await session.answer(tokens=8)
        await session.wait("response.done", after=mark)
        heard_ms = int(1e3 * session.audio_s(response_id))
        await session.send("playback.ack", played_ms=heard_ms, response_id=response_id)
        await session.wait("playback.acknowledged", after=mark)
    spent = grown(before, await totals(server.url))
    assert spent["thinker"]["made_tokens"] == pytest.approx(8, abs=1)
    assert spent["talker"]["made_tokens"] >= heard_ms / 1e3 / FRAME_S - 1
    for stage in STAGES:
        assert spent[stage]["made_s"] == pytest.approx(heard_ms / 1e3, abs=0.05)
        assert spent[stage]["wasted_s"] == pytest.approx(0, abs=0.01)


async def test_speech_ends_an_answer_before_its_first_audio(server):
    async with connect(server.url) as session:
        await session.send("session.update", session={"max_output_tokens": 64})
        await session.say(speech("weather"), pace=8, silence_s=0.5)
        await session.wait("input_audio_buffer.committed")
        await session.say(speech("why"), pace=100)
        delta = await session.wait("response.output_audio.delta")
        types = [event["type"] for event in session.seen[: session.seen.index(delta)]]
        assert types.count("input_audio_buffer.committed") == 2  # the first one got no audio
        answers = session.of_type("response.created")
        assert answers[-1]["response"]["id"] == delta["response_id"]
        for answer in answers[:-1]:
            done = [d["response"] for d in session.of_type("response.done")]
            assert [d["status"] for d in done if d["id"] == answer["response"]["id"]] == [
                "cancelled"
            ]


async def test_metrics_tell_waste_by_stage(server):
    import aiohttp

    async with aiohttp.ClientSession() as http, http.get(server.url + "/metrics") as response:
        text = await response.text()
    for stage in STAGES:
        assert f'liveserve_stage_made_seconds_total{{stage="{stage}"}}' in text
        assert f'liveserve_stage_wasted_seconds_total{{stage="{stage}"}}' in text
        assert f'liveserve_stage_wasted_tokens_total{{stage="{stage}"}}' in text
    report = await get(server.url, "/liveserve/pressure")
    assert all(engine["ended"]["wasted_s"] > 0 for engine in report["engines"])


# ---- false alarms ------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def listener(url: str, **options: object):
    async with connect(url, extra_body={"liveserve": {"events": True, **options}}) as session:
        await session.wait("session.created")
        yield session


def notices(session: Duplex) -> list[str]:
    return [event["state"] for event in session.of_type("liveserve.barge_in")]


async def test_a_blip_does_not_end_the_answer(server):
    before = await totals(server.url)
    async with listener(server.url) as session:
        response_id, mark = await session.answer(tokens=32)
        noise = session.mark
        await session.say(BLIP)
        await session.wait("liveserve.barge_in", after=noise)
        done = await session.wait("response.done", after=mark)
        assert done["response"]["status"] == "completed"
        await session.say(b"", silence_s=1.0)
        assert notices(session) == ["provisional", "dismissed"]
        assert not session.of_type("input_audio_buffer.speech_started", after=noise)
        assert not session.of_type("output_audio_buffer.cleared", after=noise)
        assert not session.of_type("input_audio_buffer.committed", after=noise)
        assert not session.of_type("response.created", after=noise)
        # 32 text tokens are as long as ever
        assert session.audio_s(response_id) > 9.0
        # the host's own event says what it does with the chunks
        reasons = [e["reason"] for e in session.of_type("overlap.decision", after=noise)]
        assert "server_vad_utterance_active" in reasons
        after = await totals(server.url)
        assert after["false_alarms"] == before["false_alarms"] + 1
        assert after["barge_ins"] == before["barge_ins"]
        # and a real interruption is one
        again = session.mark
        await session.say(speech("wait"))
        await session.wait("output_audio_buffer.cleared", after=again)
        assert notices(session)[2:] == ["provisional", "committed"]
        await session.wait("response.output_audio.delta", after=again)


async def test_with_zero_the_blip_interrupts_as_in_the_host(server):
    async with listener(server.url, false_alarm_ms=0) as session:
        _, mark = await session.answer(tokens=64)
        noise = session.mark
        await session.say(BLIP)
        done = await session.wait("response.done", after=mark)
        assert done["response"]["status"] == "cancelled"
        assert session.of_type("input_audio_buffer.speech_started", after=noise)
        assert not notices(session)


async def test_clients_that_did_not_ask_get_no_events_of_ours(server):
    async with connect(server.url) as session:
        _, mark = await session.answer(tokens=16)
        await session.say(BLIP)
        await session.wait("response.done", after=mark)
        assert not session.of_type("liveserve.barge_in")


def prompt_lengths(server) -> list[int]:
    """Tokens of each prompt that the thinker has seen, in order."""
    lengths: dict[str, int] = {}
    record = server.log.parent / "record" / "stage0.jsonl"
    for line in record.read_text().splitlines():
        for request, rows in json.loads(line).get("rows", {}).items():
            lengths[request] = lengths.get(request, 0) + (len(rows) if len(rows) > 1 else 0)
    return list(lengths.values())


async def test_what_was_said_while_it_was_provisional_is_part_of_the_turn(server):
    lengths = {}
    for limit_ms in (0, 600):
        async with listener(server.url, false_alarm_ms=limit_ms) as session:
            await session.answer(tokens=64)
            mark = session.mark
            await session.say(speech("why"))
            started = await session.wait("input_audio_buffer.speech_started", after=mark)
            await session.wait("response.output_audio.delta", after=mark)
            lengths[limit_ms] = prompt_lengths(server)[-1]
            if limit_ms:
                began = session.of_type("liveserve.barge_in")[0]["audio_start_ms"]
                assert started["audio_start_ms"] == began  # when it began, not when it was clear
    assert lengths[600] == lengths[0]


async def test_a_blip_is_no_part_of_the_next_turn(server):
    lengths = {}
    for noise in (b"", BLIP):
        async with listener(server.url) as session:
            _, mark = await session.answer(tokens=16)
            await session.say(noise, silence_s=1.0)
            await session.wait("response.done", after=mark)
            assert notices(session) == (["provisional", "dismissed"] if noise else [])
            asked = session.mark
            await session.say(speech("why"))
            await session.wait("response.output_audio.delta", after=asked)
            lengths[len(noise)] = prompt_lengths(server)[-1]
    # 0.6 s of it would be 8 tokens; the VAD may hear the word a chunk earlier or later
    assert abs(lengths[len(BLIP)] - lengths[0]) <= 3


@pytest.mark.parametrize("command", ["barge_in", "response.cancel"])
async def test_an_explicit_interruption_does_not_wait(server, command):
    async with listener(server.url, false_alarm_ms=5000) as session:
        _, mark = await session.answer(tokens=64)
        await session.say(BLIP, silence_s=0.0)
        await session.wait("liveserve.barge_in", after=mark)
        sent = time.monotonic()
        await session.send(command)
        done = await session.wait("response.done", after=mark)
        assert time.monotonic() - sent < 1.0
        assert done["response"]["status"] == "cancelled"
        await session.say(speech("why"))
        assert notices(session) == ["provisional", "committed"]
        await session.wait("response.output_audio.delta", after=session.mark - 1, timeout_s=30)


async def test_a_commit_makes_provisional_speech_a_turn(server):
    async with listener(server.url, false_alarm_ms=5000) as session:
        _, mark = await session.answer(tokens=64)
        await session.say(speech("why")[: 2 * SAMPLE_RATE_HZ // 2], silence_s=0.0)
        await session.wait("liveserve.barge_in", after=mark)
        answered = session.mark
        await session.send("input_audio_buffer.commit", final=True, create_response=True)
        done = await session.wait("response.done", after=mark)
        assert done["response"]["status"] == "cancelled"
        await session.wait("input_audio_buffer.committed", after=answered)
        created = await session.wait("response.created", after=answered)
        assert created["response"]["id"] != done["response"]["id"]


async def test_a_cleared_input_is_no_interruption(server):
    async with listener(server.url, false_alarm_ms=5000) as session:
        _, mark = await session.answer(tokens=24)
        await session.say(BLIP, silence_s=0.0)
        await session.wait("liveserve.barge_in", after=mark)
        await session.send("input_audio_buffer.clear")
        await session.say(b"", silence_s=1.0)
        done = await session.wait("response.done", after=mark)
        assert done["response"]["status"] == "completed"
        assert notices(session) == ["provisional", "dismissed"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"false_alarm_ms": -1}, "invalid_false_alarm_ms"),
        ({"false_alarm_ms": "long"}, "invalid_false_alarm_ms"),
        ({"events": 1}, "invalid_events"),
    ],
)
async def test_wrong_options_are_named(server, options, code):
    async with connect(server.url) as session:
        await session.wait("session.created")
        await session.send("session.update", session={"extra_body": {"liveserve": options}})
        error = (await session.wait("error"))["error"]
        assert error["code"] == code
        assert next(iter(options)) in error["message"]


def test_the_blip_is_short():
    assert len(BLIP) / 2 / SAMPLE_RATE_HZ == pytest.approx(0.15)
    assert len(SILENCE) / 2 / SAMPLE_RATE_HZ == 1.0
