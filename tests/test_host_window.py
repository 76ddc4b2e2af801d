"""The window of a conversation: as the host has it unless more turns are asked for."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from liveserve.config import ENV_HISTORY_TURNS, ConfigError, history_turns_from_env
from liveserve.host.cpu.adapt import stub_cuda_wheels
from liveserve.host.cpu.deploy import deploy_path

pytestmark = pytest.mark.host

SPOKEN = {"type": "audio_url"}


@pytest.fixture(scope="module")
def window():
    stub_cuda_wheels()
    from liveserve.host import window

    return window


@pytest.fixture(scope="module")
def host(window):
    """The host's own class, whatever was installed."""
    return window.WindowedPlugin.__mro__[1]


class Conversation:
    """A session's history as the engine keeps it, and what each turn's prompt was made of."""

    def __init__(self, plugin):
        self.plugin, self.messages = plugin, []
        self.state = SimpleNamespace(audio_history=[])
        self.prompts: list[list[str]] = []

    def speak(self, name: str, *, seconds: float = 0.1, deferred: bool = False) -> list[str]:
        """One spoken turn, answered; returns the inputs and answers in its prompt, in order."""
        samples = np.zeros(int(16_000 * seconds), dtype="<f4")
        payload = {"audio": base64.b64encode(samples.tobytes()).decode(), "name": name}
        if not deferred:
            self.messages.append({"role": "user", "content": [dict(SPOKEN)]})
        prompt = self.prepare(payload)
        if deferred:
            self.messages.append({"role": "user", "content": [dict(SPOKEN)]})
        self.messages.append({"role": "assistant", "content": f"re {name}"})
        return prompt

    def write(self, text: str) -> list[str]:
        self.messages.append({"role": "user", "content": text})
        prompt = self.prepare({})
        self.messages.append({"role": "assistant", "content": f"re {text}"})
        return prompt

    def prepare(self, payload: dict) -> list[str]:
        # the engine hands out copies of the messages that share their contents
        history = [dict(message) for message in self.messages]
        made = self.plugin.prepare_prompt_config(
            {"conversation": history, "other": 1}, state=self.state, payload=payload
        )
        assert made["other"] == 1
        self.prompts.append(
            [
                m["audio_payload"]["name"] if "audio_payload" in m else m["content"]
                for m in made["qwen_messages"]
            ]
        )
        return self.prompts[-1]


def turns(*names: str) -> list[str]:
    """All of ``names`` answered but the last."""
    return [part for name in names for part in (name, f"re {name}")][:-1]


def made(window, host, number: int | None) -> Conversation:
    plugin = window.WindowedPlugin(None)
    plugin.turns = number
    return Conversation(plugin)


def test_without_a_number_every_prompt_is_the_hosts(window, host):
    ours, theirs = made(window, host, None), Conversation(host(None))
    for index in range(7):
        assert ours.speak(f"{index}") == theirs.speak(f"{index}")
    assert ours.prompts[-1] == turns("3", "4", "5", "6")


@pytest.mark.parametrize("number", [4, 8])
def test_until_the_window_is_full_every_prompt_is_the_hosts(window, host, number):
    ours, theirs = made(window, host, number), Conversation(host(None))
    ours.messages.append({"role": "system", "content": "be kind"})
    theirs.messages.append({"role": "system", "content": "be kind"})
    for conversation in (ours, theirs):
        conversation.speak("a")
        conversation.write("b")
        conversation.speak("c")
    assert ours.prompts == theirs.prompts
    assert ours.prompts[-1] == ["be kind", *turns("a", "b", "c")]


def test_with_eight_turns_a_session_of_six_remembers_all(window, host):
    session = made(window, host, 8)
    for index in range(6):
        assert session.speak(f"{index}") == turns(*map(str, range(index + 1)))


def test_a_full_window_moves_by_half_so_that_prompts_keep_their_beginning(window, host):
    session = made(window, host, 8)
    for index in range(21):
        session.speak(f"{index}")
    beginnings = [prompt[0] for prompt in session.prompts]
    assert beginnings == ["0"] * 8 + ["4"] * 4 + ["8"] * 4 + ["12"] * 4 + ["16"]
    assert all(len(prompt) <= 2 * 8 - 1 for prompt in session.prompts)
    assert len(session.state.audio_history) <= 8


def test_many_messages_in_a_window_are_all_there(window, host):
    """The host looks at the newest sixteen messages only."""
    session = made(window, host, 12)
    for index in range(12):
        session.write(f"{index}")
    assert session.prompts[-1] == turns(*map(str, range(12)))


def test_input_that_is_not_in_the_history_yet_comes_last_and_counts(window, host):
    ours, theirs = made(window, host, 4), Conversation(host(None))
    for conversation in (ours, theirs):
        conversation.speak("a")
        conversation.write("b")
        conversation.speak("c", deferred=True)
    assert ours.prompts == theirs.prompts
    assert ours.prompts[-1] == [*turns("a", "b"), "re b", "c"]
    full = made(window, host, 2)
    full.speak("a")
    full.speak("b")
    assert full.speak("c", deferred=True) == ["b", "re b", "c"]


def test_two_inputs_before_an_answer_are_one_payload(window, host):
    session = made(window, host, 8)
    session.speak("a")
    session.messages.append({"role": "user", "content": [dict(SPOKEN)]})
    assert session.speak("b") == turns("a", "b")
    assert session.speak("c") == turns("a", "b", "c")


def test_a_turn_is_what_the_user_says_in_a_row_and_what_is_replied(window):
    roles = ("system", "user", "user", "assistant", "assistant", "user")
    found = window.split([{"role": role} for role in roles])
    assert [[message["role"] for message in turn] for turn in found] == [
        ["system"],
        ["user", "user", "assistant", "assistant"],
        ["user"],
    ]


def test_an_interrupted_turn_stays_a_boundary(window, host):
    ours, theirs = made(window, host, 4), Conversation(host(None))
    for conversation in (ours, theirs):
        conversation.speak("a")
        conversation.messages[-1]["content"] = ""
        conversation.speak("b")
    assert ours.prompts == theirs.prompts


def test_long_speech_shortens_the_window_but_the_current_input_stays(window, host):
    session = made(window, host, 2)
    session.speak("a")
    assert session.speak("b", seconds=60) == ["b"]
    assert session.speak("c") == ["c"]
    assert session.speak("d") == turns("c", "d")
    size = window.BYTES_PER_TURN
    assert window.window_start([size] * 6, 6) == 0
    assert window.window_start([2 * size] * 6, 6) == 3
    assert window.window_start([size, size, 9 * size], 4) == 2
    assert window.window_start([9 * size, 9 * size], 4) == 1
    assert window.window_start([1] * 7, 6) == 3
    assert window.window_start([1], 1) == 0
    assert window.window_start([1, 1], 1) == 1


async def test_a_thinker_that_takes_fewer_inputs_sets_the_window(window, host, monkeypatch, caplog):
    async def prepared(self, config, *, model_config):
        return {"prepared": True}

    monkeypatch.setattr(host, "prepare_runtime_config", prepared)
    limits = SimpleNamespace(get_limit_per_prompt=lambda kind: {"audio": 5}[kind])
    plugin = window.WindowedPlugin(None)
    plugin.turns = 8
    for _ in range(2):
        made = await plugin.prepare_runtime_config(
            None, model_config=SimpleNamespace(multimodal_config=limits)
        )
    assert made == {"prepared": True}
    assert plugin.turns == 5
    assert [r.message.count("limit_mm_per_prompt.audio") for r in caplog.records] == [1]


INSTALLED = """
import vllm
import json, os
from liveserve.host import plugin
found = []
for environ in json.loads(os.environ["TRIED"]):
    os.environ |= environ
    plugin.register()
    from vllm_omni.model_executor.models.qwen3_omni.duplex import plugin as host
    kind = host.Qwen3OmniDuplexPlugin
    found.append([kind.__name__, getattr(kind, "turns", None)])
print("FOUND", json.dumps(found))
"""


def test_it_is_installed_only_where_it_was_asked_for():
    environ = {k: v for k, v in os.environ.items() if not k.startswith("LIVESERVE")}
    tried = [
        {"LIVESERVE": "off"},
        {"LIVESERVE": "on"},
        {"LIVESERVE": "off", ENV_HISTORY_TURNS: "9"},
        {"LIVESERVE": "on", "LIVESERVE_CONFIG": json.dumps({"history_turns": 8})},
    ]
    done = subprocess.run(
        [sys.executable, "-c", INSTALLED],
        env=environ | {"TRIED": json.dumps(tried)},
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(x[6:]) for x in done.stdout.splitlines() if x.startswith("FOUND ")]
    stock = ["Qwen3OmniDuplexPlugin", None]
    assert found == [[stock, stock, ["WindowedPlugin", 9], ["WindowedPlugin", 8]]], done.stderr


def test_an_unexpected_host_keeps_its_window(window, host, monkeypatch):
    from liveserve.host.seam import SeamError

    monkeypatch.setattr(host, "prepare_prompt_config", lambda self, everything: None)
    monkeypatch.setattr(window.host, "Qwen3OmniDuplexPlugin", host)
    with pytest.raises(SeamError, match="prepare_prompt_config"):
        window.install(8)
    assert window.host.Qwen3OmniDuplexPlugin is host


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many"])
def test_a_wrong_number_is_named(text):
    with pytest.raises(ConfigError, match="give a number of turns from 1"):
        history_turns_from_env({ENV_HISTORY_TURNS: text})


@pytest.mark.parametrize(("number", "inputs"), [(None, 4), (2, 4), (8, 8)])
def test_the_cpu_deploy_file_takes_as_many_inputs(tmp_path, number, inputs):
    path = deploy_path("duplex", history_turns=number, server_vad=False, folder=tmp_path)
    assert f"audio: {inputs}\n" in path.read_text()
