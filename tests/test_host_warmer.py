"""Which warm-ups are submitted, and what for: without a server, over the host's own plugin."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
import traceback
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from liveserve.config import KvConfig, LiveServeConfig, Switches
from liveserve.events import Event, EventKind, KvSnapshot, Prefetch, PressureSnapshot, Reply
from liveserve.host.cpu.adapt import stub_cuda_wheels
from liveserve.host.seam import SeamError
from liveserve.host.sessions import is_warmup, session_of
from liveserve.scheduler.warmup import WarmupReport

pytestmark = pytest.mark.host

USER = "user"
LONG = "Answer kindly. " * 100


@pytest.fixture(scope="module")
def seam():
    stub_cuda_wheels()
    from liveserve.host import warmup

    return warmup


class Processor:
    """Turns messages into text as a chat template does."""

    def apply_chat_template(self, messages: list[Any], **_: Any) -> str:
        return "".join(f"<{m['role']}>{texts(m['content'])}</>" for m in messages) + "<assistant>"


def texts(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "<audio>") for part in content)


class Pool:
    """The thinker's: notes what is sent to it."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        config = SimpleNamespace(max_model_len=1000)
        self.stage_vllm_config = SimpleNamespace(model_config=config)

    async def submit_initial(self, request_id: str, state: Any, request: Any, **_: Any) -> int:
        assert state.session_owned
        self.sent.append(request_id)
        return 0


class Session:
    """A session as the host has it: its history is made of copies that share their contents."""

    def __init__(self, state: Any, messages: list[dict[str, Any]]) -> None:
        self.state, self._messages = state, messages
        self.runtime_config = {"instructions": LONG}
        self.config = SimpleNamespace(as_dict=dict)

    @property
    def history(self) -> tuple[dict[str, Any], ...]:
        return tuple(map(dict, self._messages))


class Host:
    """A duplex orchestrator with one session, as far as a `Warmer` sees it."""

    def __init__(self, seam: Any, **kv: Any) -> None:
        from vllm_omni.engine.duplex.config import DuplexSessionState

        self.plugin = seam.Qwen3OmniDuplexPlugin(None)
        self.plugin.processor = Processor()
        self.pool = Pool()
        self.stage_pools = [self.pool, Pool(), Pool()]
        self.request_states: dict[str, Any] = {}
        self.aborted: list[str] = []
        self.prompts: list[dict[str, Any]] = []
        self._prompt_processing_lock = threading.Lock()
        self.slow_s = 0.0
        self.router = None  # one replica
        self.history: list[dict[str, Any]] = []
        self.session = Session(DuplexSessionState.OPEN, self.history)
        state = SimpleNamespace(audio_history=[])
        self.runner = SimpleNamespace(session=self.session, model_state=state, plugin=self.plugin)
        self.session_manager = SimpleNamespace(runners={USER: self.runner})
        self.kv = KvSnapshot(warmups=WarmupReport())
        link = SimpleNamespace(reply=Reply(PressureSnapshot(kv=self.kv)))
        self.plane = SimpleNamespace(
            config=LiveServeConfig(kv=KvConfig(**kv)),
            monitor=SimpleNamespace(switches=Switches(kv_prefill=True), links={(0, 0): link}),
            failed=lambda _: traceback.print_exc(),
        )
        self.warmer = seam.attach(self, self.plane)

    def _process_turn_prompt(self, request_id: str, stage_id: int, prompt: Any, *a: Any, **k: Any):
        with self._prompt_processing_lock:
            time.sleep(self.slow_s)
            self.prompts.append(prompt)
            return SimpleNamespace(request_id=request_id)

    async def _cleanup_request_ids(self, request_ids: list[str], *, abort: bool) -> None:
        assert abort
        for request_id in request_ids:
            assert self.request_states.pop(request_id)
            self.aborted.append(request_id)

    def hears(self, kind: EventKind) -> None:
        self.warmer.happened(Event(kind, USER, 0.0))

    def speaks(self, seconds: float = 1.0, answer: str | None = None) -> None:
        """A turn of the conversation, as the host keeps it."""
        samples = np.zeros(int(16_000 * seconds), dtype="<f4")
        payload = {"audio": base64.b64encode(samples.tobytes()).decode()}
        content = [{"type": "audio_url"}]
        self.history.append({"role": "user", "content": content})
        self.runner.model_state.audio_history.append(((content,), payload))
        if answer is not None:
            self.history.append({"role": "assistant", "content": answer})

    async def settles(self, wishes: int = 1) -> dict[str, int]:
        for _ in range(500):
            if sum(self.warmer.counts.values()) >= wishes:
                break
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        return dict(self.warmer.counts)


@pytest.fixture
def host(seam, monkeypatch):
    monkeypatch.setattr(seam, "apply_omni_final_stage_metadata", lambda request, stage: request)
    return Host(seam, prefill_min_tokens=100)


async def test_speech_warms_everything_up_to_where_it_goes(host):
    host.speaks(answer="Twelve.")
    host.hears(EventKind.SPEECH_STARTED)
    assert await host.settles() == {"submitted": 1}
    (prompt,) = host.prompts
    assert prompt["prompt"] == f"<system>{LONG}</><user><audio></><assistant>Twelve.</><user>"
    assert len(prompt["multi_modal_data"]["audio"]) == 1
    (name,) = host.pool.sent
    assert is_warmup(name)
    assert session_of(name) == USER
    assert len(host.runner.model_state.audio_history) == 1  # the session's own is as it was


async def test_the_hosts_window_drops_what_the_turn_will_not_have(host):
    for number in range(5):
        host.speaks(answer=f"Answer {number}.")
    host.hears(EventKind.SPEECH_STARTED)
    await host.settles()
    text = host.prompts[0]["prompt"]
    assert text.count("<audio>") == 3  # and the one to come
    assert "Answer 1." not in text
    assert "Answer 4." in text
    assert len(host.runner.model_state.audio_history) == 5


async def test_the_same_again_and_too_little_are_not_worth_it(host):
    host.hears(EventKind.OPENED)
    assert await host.settles(1) == {"submitted": 1}
    host.hears(EventKind.SPEECH_STARTED)
    assert await host.settles(2) == {"submitted": 1, "same": 1}
    host.speaks()
    host.warmer.turn(USER)  # all of that is in a prompt now
    host.history.append({"role": "assistant", "content": "Short."})
    host.hears(EventKind.SPEECH_STARTED)
    assert await host.settles(3) == {"submitted": 1, "same": 1, "small": 1}
    host.kv.evicted = {"lru/recency": 3}  # what was computed may be gone
    host.hears(EventKind.BARGE_IN)
    assert (await host.settles(4))["submitted"] == 2


async def test_a_turn_in_the_meantime_wins_but_what_was_made_reaches_the_engine(host):
    """The frontend's multimodal cache counts on it."""
    host.slow_s = 0.2
    host.hears(EventKind.SPEECH_STARTED)
    for _ in range(500):
        if host._prompt_processing_lock.locked():
            break
        await asyncio.sleep(0.005)
    host.warmer.turn(USER)
    assert await host.settles() == {"overtaken": 1}
    assert host.pool.sent == host.aborted != []
    assert host.request_states == {}


async def test_before_anything_is_made_a_turn_costs_nothing(host):
    host.hears(EventKind.SPEECH_STARTED)
    host.warmer.turn(USER)
    await asyncio.sleep(0.2)
    assert host.pool.sent == []


async def test_a_turn_that_is_prepared_goes_first(host):
    with host._prompt_processing_lock:
        host.hears(EventKind.SPEECH_STARTED)
        await asyncio.sleep(0.2)
        assert host.prompts == []
    assert await host.settles() == {"submitted": 1}


@pytest.mark.parametrize("end", [EventKind.CLOSED, EventKind.SPEECH_STOPPED])
async def test_silence_without_a_turn_and_a_client_that_leaves_cancel_it(
    host, seam, monkeypatch, end
):
    monkeypatch.setattr(seam, "_SILENCE_S", 0.05)
    host.hears(EventKind.SPEECH_STARTED)
    await host.settles()
    assert host.aborted == []
    host.hears(end)
    await asyncio.sleep(0.2)
    assert host.aborted == host.pool.sent != []


async def test_a_commit_after_the_speech_keeps_it(host, seam, monkeypatch):
    monkeypatch.setattr(seam, "_SILENCE_S", 0.05)
    host.hears(EventKind.SPEECH_STARTED)
    await host.settles()
    host.hears(EventKind.SPEECH_STOPPED)
    host.hears(EventKind.COMMITTED)
    await asyncio.sleep(0.2)
    assert host.aborted == []


async def test_while_an_answer_is_made_there_is_none(host):
    host.request_states["turn"] = SimpleNamespace(
        session_id=USER, stage_submit_ts={0: 1.0}, finished_stage_ids=set()
    )
    host.hears(EventKind.SPEECH_STARTED)
    assert await host.settles() == {"busy": 1}


async def test_push_to_talk_begins_with_the_first_audio_of_a_turn(host):
    host.plane.monitor.switches = Switches(kv_prefill=False)
    host.hears(EventKind.OPENED)
    host.plane.monitor.switches = Switches(kv_prefill=True)
    host.hears(EventKind.INPUT)
    host.hears(EventKind.INPUT)
    assert await host.settles() == {"submitted": 1}
    await asyncio.sleep(0.2)
    assert sum(host.warmer.counts.values()) == 1


async def test_a_new_history_takes_the_place_of_the_old_one(host):
    host.hears(EventKind.SPEECH_STARTED)
    await host.settles()
    host.speaks(answer="Cut he")
    host.kv.evicted = {"lru/recency": 1}
    host.hears(EventKind.BARGE_IN)
    await host.settles(2)
    assert len(host.pool.sent) == 2
    assert host.aborted == host.pool.sent[:1]


async def test_off_or_without_an_engine_that_can_nothing_is_submitted(host):
    host.plane.monitor.switches = Switches(kv_prefill=False)
    host.hears(EventKind.SPEECH_STARTED)
    host.plane.monitor.switches = Switches(kv_prefill=True)
    host.kv.warmups = None
    host.hears(EventKind.SPEECH_STARTED)
    assert not await host.warmer.compute(Prefetch("prefix", 1.0, [1, 2]))
    await asyncio.sleep(0.2)
    assert host.pool.sent == []


async def test_a_prefix_is_computed_once_it_fits(host):
    assert await host.warmer.compute(Prefetch("prefix", 1.0, [5, 6, 7], compute=True))
    assert host.prompts == [{"prompt_token_ids": [5, 6, 7, 7]}]
    with pytest.raises(ValueError, match="1000"):
        await host.warmer.compute(Prefetch("prefix", 1.0, [1] * 999, compute=True))


def test_another_host_is_refused(seam, monkeypatch):
    host = Host(seam)
    monkeypatch.setattr(host, "plugin", object())
    with pytest.raises(SeamError, match="plugin is a object"):
        seam.attach(host, host.plane)
    host = Host(seam)
    monkeypatch.delattr(Host, "_process_turn_prompt")
    with pytest.raises(SeamError, match="_process_turn_prompt is gone"):
        seam.attach(host, host.plane)
