"""Seam, only where asked for: duplex sessions remember more turns than the host's window holds.

Qwen3-Omni's duplex plugin keeps four spoken inputs in a prompt, the current one included, and from
the fifth turn on drops the oldest at every turn (`history_limit` in
vllm_omni/model_executor/models/qwen3_omni/duplex/plugin.py). So the conversation's beginning moves
with every turn, and no prefix cache and no KV tier finds anything of it again. Here the window has
``history_turns`` turns, and when they are exceeded it moves on by half of them at once, so that the
prompt's beginning stays the same for many turns.

The host's own function still turns messages into a prompt: it is given one turn at a time, which
never fills its window.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from vllm_omni.model_executor.models.qwen3_omni.duplex import plugin as host
from vllm_omni.model_executor.models.qwen3_omni.duplex.session import QwenDuplexSessionState

from liveserve.host.seam import expect

logger = logging.getLogger("vllm.liveserve")

# The host takes 8 MiB of base64 for its four spoken inputs.
BYTES_PER_TURN = 2 << 20

_HostPlugin = host.Qwen3OmniDuplexPlugin


class WindowedPlugin(_HostPlugin):  # type: ignore[misc, valid-type]
    """The host's plugin with a window of ``turns`` turns; None: the host's own window."""

    turns: int | None = None

    async def prepare_runtime_config(self, config: Any, *, model_config: Any) -> Any:
        """Mirrors the host; the first session shows how many spoken inputs the thinker takes."""
        made = await super().prepare_runtime_config(config, model_config=model_config)
        limits = getattr(model_config, "multimodal_config", None)
        if self.turns is not None and limits is not None:
            allowed = limits.get_limit_per_prompt("audio")
            if allowed < self.turns:
                logger.warning(
                    "LiveServe: a prompt of the thinker takes %d spoken inputs, so that is the "
                    "history; for %d turns set limit_mm_per_prompt.audio of stage 0 in the deploy "
                    "config.",
                    allowed,
                    self.turns,
                )
                self.turns = allowed
        return made

    def prepare_prompt_config(
        self, config: Mapping[str, Any], *, state: Any, payload: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Mirrors the host's function of this name; adds ``qwen_messages`` to ``config``."""
        turns = split(config.get("conversation", []))
        if self.turns is None or not turns:
            return super().prepare_prompt_config(config, state=state, payload=payload)
        if payload.get("audio") and turns[-1][-1].get("role") != "user":
            turns.append([])  # input that is not in the history: the host adds it
        audio = [_spoken(turn, state.audio_history) for turn in turns]
        sizes = [sum(_size(value) for _, value in entries) for entries in audio]
        sizes[-1] = _size(payload) or sizes[-1]
        messages: list[Any] = []
        kept: list[Any] = []
        for index in range(window_start(sizes, self.turns), len(turns)):
            alone = SimpleNamespace(audio_history=audio[index])
            made = super().prepare_prompt_config(
                {**config, "conversation": turns[index]},
                state=alone,
                payload=payload if index == len(turns) - 1 else {},
            )
            messages += made["qwen_messages"]
            kept += alone.audio_history
        state.audio_history = kept
        return {**config, "qwen_messages": messages}


def split(history: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Turns: consecutive user messages and the replies to them; a system message stands alone.
    Mirrors the grouping in the host's ``prepare_prompt_config``.
    """
    turns: list[list[Mapping[str, Any]]] = []
    for message in history:
        role = message.get("role")
        if (
            not turns
            or role == "system"
            or (role == "user" and turns[-1][-1].get("role") != "user")
        ):
            turns.append([])
        turns[-1].append(message)
    return turns


def window_start(sizes_bytes: Sequence[int], turns: int) -> int:
    """Index of the first turn that is kept, of turns with so many bytes of speech each.

    At most ``turns`` are kept, with at most `BYTES_PER_TURN` each on average, and always the last.
    The window moves in steps of half its size.
    """
    step = max(1, turns // 2)
    first = 0
    while first < len(sizes_bytes) - 1 and (
        len(sizes_bytes) - first > turns or sum(sizes_bytes[first:]) > BYTES_PER_TURN * turns
    ):
        first += step
    return min(first, len(sizes_bytes) - 1)


def _spoken(turn: Sequence[Mapping[str, Any]], history: Sequence[Any]) -> list[Any]:
    """Entries of the session's audio history that belong to messages of ``turn``."""
    contents = {id(message.get("content")) for message in turn}
    return [entry for entry in history if any(id(key) in contents for key in entry[0])]


def _size(payload: Mapping[str, Any]) -> int:
    return len(payload.get("audio", ""))


def install(turns: int) -> None:
    """Put the class where the host's engine looks the plugin up, with a window of ``turns``."""
    expect(
        host.Qwen3OmniDuplexPlugin in (_HostPlugin, WindowedPlugin),
        "duplex.plugin.Qwen3OmniDuplexPlugin is not the host's class",
    )
    parameters = list(inspect.signature(_HostPlugin.prepare_prompt_config).parameters)
    expect(
        parameters == ["self", "config", "state", "payload"],
        "Qwen3OmniDuplexPlugin.prepare_prompt_config takes other arguments",
    )
    expect(
        "audio_history" in QwenDuplexSessionState.__dataclass_fields__,
        "QwenDuplexSessionState.audio_history is gone",
    )
    WindowedPlugin.turns = turns
    host.Qwen3OmniDuplexPlugin = WindowedPlugin  # type: ignore[misc]
