"""Seam in the duplex orchestrator: a session's history is prefilled while its user still speaks.

All of the next prompt but the speech itself is known when its user begins to speak: instructions,
earlier turns, and what was heard of the last answer. Often some of it is in no tier: instructions
are new, an answer was cut at the playback point, the window of the conversation moved on, or its
KV was evicted. `Warmer` makes the prompt as the host will, up to where the new speech goes, and
submits it to the thinker alone, as a request whose output is dropped (a warm-up). Its blocks stay
in the prefix cache with their companion rows, and the turn finds them there.

The speech is not prefilled piece by piece: Whisper-style features are scaled by the loudest moment
of the whole, and the host knows an input by the hash of all of it, so that pieces would compute
something else.

A warm-up ends when it is done, when its session's turn reaches the engine, when the user falls
silent without a turn, and when somebody else needs its room (`liveserve.host.warmup_round`).
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import itertools
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm_omni.engine.async_engine_utils import apply_omni_final_stage_metadata
from vllm_omni.engine.duplex.config import DuplexSessionState
from vllm_omni.engine.orchestrator import OrchestratorRequestState
from vllm_omni.model_executor.models.qwen3_omni.duplex.plugin import Qwen3OmniDuplexPlugin

from liveserve.events import Event, EventKind, KvSnapshot, Prefetch
from liveserve.host.seam import expect
from liveserve.host.sessions import is_warmup, warmup_id
from liveserve.plane import THINKER, InteractionPlane

# What one event does to the history has happened when this has passed: a barge-in cuts the answer.
_SETTLE_S = 0.05
# Speech that is followed by no turn for so long was none.
_SILENCE_S = 3.0
# How often it is looked whether the host prepares somebody's turn.
_POLL_S = 0.005
# Stands for the speech that is to come in a prompt's text.
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}liveserve\N{OBJECT REPLACEMENT CHARACTER}"
_SPEECH = {"type": "audio", "audio": base64.b64encode(bytes(64)).decode()}
# For what a prompt has at least: text in Latin script, and Qwen3-Omni's 12.5 tokens per second of
# speech, which the host keeps as base64 of 16 kHz floats.
_CHARS_PER_TOKEN = 4.0
_SPEECH_CHARS_PER_TOKEN = 16_000 * 4 * (4 / 3) / 12.5
# Prefixes by the endpoint are computed while no more warm-ups than this are under way.
_MAX_PREFIXES = 64
# It ends when the last whole block of its prompt is computed; this is never reached.
_MAX_TOKENS = 16

_TRIGGERS = frozenset(
    {EventKind.OPENED, EventKind.SPEECH_STARTED, EventKind.BARGE_IN, EventKind.RESUMED}
)


class Part(NamedTuple):
    """A message of a prompt: what tells it from others, and about how many tokens it has."""

    key: tuple[str, int]
    tokens: float


@dataclass
class _Session:
    """What is known of a session's warm-ups.

    Attributes:
        speaks: its user's speech is detected, so audio alone says nothing.
        heard: input has come since the last turn.
        turns: goes up with every turn and cancellation: what was begun before is not submitted.
        known: the newest prompt, or what of it was warmed up.
        warmed: what was warmed up since the last turn.
        request_id: of the warm-up that is in the engine.
    """

    speaks: bool = False
    heard: bool = False
    turns: int = 0
    wanted: bool = False
    known: list[Part] = field(default_factory=list)
    warmed: list[Part] = field(default_factory=list)
    request_id: str | None = None
    task: asyncio.Task[None] | None = None
    silence: asyncio.TimerHandle | None = None


class Warmer:
    """Decides on and submits warm-ups. Lives on the orchestrator's loop.

    Args:
        orchestrator: the host's, with one thinker at stage 0.
        plane: what is known of sessions.

    Attributes:
        counts: what became of the wishes for a warm-up: "submitted", "small" (too little can be
            missing), "same" (as was submitted already), "busy" (an answer is being made),
            "overtaken" (by its turn, or cancelled), "failed".
    """

    def __init__(self, orchestrator: Any, plane: InteractionPlane) -> None:
        self.counts: Counter[str] = Counter()
        self._orchestrator = orchestrator
        self._plane = plane
        self._sessions: dict[str, _Session] = {}
        self._numbers = itertools.count()
        self._aborts: set[asyncio.Task[None]] = set()

    @property
    def usable(self) -> bool:
        """Whether there is a thinker that runs warm-ups, and they are on."""
        return self._plane.monitor.switches.kv_prefill and self._thinker() is not None

    # ---- what happens ----------------------------------------------------------------------

    def happened(self, event: Event) -> None:
        """An event of a session, after the tracker has applied it."""
        kind, session_id = event.kind, event.session_id
        if kind is EventKind.CLOSED:
            self._closed(session_id)
            return
        one = self._sessions.get(session_id)
        if kind is EventKind.SPEECH_STOPPED and one is not None:
            loop = asyncio.get_running_loop()
            self._still(one)
            one.silence = loop.call_later(_SILENCE_S, self.drop, session_id)
        elif kind is EventKind.SPEECH_STARTED or kind is EventKind.COMMITTED:
            if one is not None:
                self._still(one)
                one.speaks = one.speaks or kind is EventKind.SPEECH_STARTED
        elif kind is EventKind.INPUT and one is not None and not (one.speaks or one.heard):
            one.heard = True  # push to talk: a turn begins with its first audio
            self.want(session_id)
        if kind in _TRIGGERS:
            self.want(session_id)

    def want(self, session_id: str) -> None:
        """The history of a session has changed, or will be needed."""
        if session_id not in self._orchestrator.session_manager.runners:
            return
        one = self._sessions.setdefault(session_id, _Session())
        if not self.usable:
            return
        one.wanted = True
        if one.task is None:
            one.task = asyncio.ensure_future(self._run(session_id, one))

    def turn(self, session_id: str) -> None:
        """The session's turn is about to be prepared: its own request computes what is missing. A
        warm-up that is in the engine goes on until that request is there too.
        """
        one = self._sessions.get(session_id)
        if one is None:
            return
        one.turns += 1
        one.wanted = one.heard = False
        one.warmed = []
        self._still(one)
        runner = self._orchestrator.session_manager.runners.get(session_id)
        if runner is not None and self.usable:
            one.known = self._parts(runner, self._prepared(runner, {}))

    def drop(self, session_id: str) -> None:
        """The user fell silent without a turn, or is gone."""
        one = self._sessions.get(session_id)
        if one is None:
            return
        one.turns += 1
        one.wanted = False
        self._still(one)
        if one.request_id is not None:
            request_id, one.request_id = one.request_id, None
            task = asyncio.ensure_future(self._abort(request_id))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    def ended(self, request_id: str) -> None:
        """The engine is done with a warm-up."""
        for one in self._sessions.values():
            if one.request_id == request_id:
                one.request_id = None

    async def compute(self, asked: Prefetch) -> bool:
        """Compute what is in no tier of a session's history or a prompt's prefix. Returns whether
        there is an engine that can.

        Raises:
            BufferError: too many prefixes wait already.
            ValueError: the prefix is too long for the model.
        """
        if not self.usable:
            return False
        if not asked.token_ids:
            self.want(asked.session_id)
            return True
        orchestrator = self._orchestrator
        if sum(map(is_warmup, orchestrator.request_states)) >= _MAX_PREFIXES:
            raise BufferError
        most = orchestrator.stage_pools[THINKER].stage_vllm_config.model_config.max_model_len
        if len(asked.token_ids) + 1 >= most:
            raise ValueError(
                f"prefetch: compute: {len(asked.token_ids)} tokens are too many, the model takes "
                f"{most} with the answer"
            )
        request_id = warmup_id(asked.session_id, next(self._numbers))
        # One token more, so that the last whole block of the prefix is computed too.
        prompt = {"prompt_token_ids": [*asked.token_ids, asked.token_ids[-1]]}
        await self._submit(request_id, await self._request(request_id, prompt))
        self.counts["submitted"] += 1
        return True

    # ---- inside ----------------------------------------------------------------------------

    def _thinker(self) -> KvSnapshot | None:
        """KV of a thinker that runs warm-ups."""
        for (stage_id, _), link in self._plane.monitor.links.items():
            kv = link.reply.snapshot.kv if stage_id == THINKER and link.reply else None
            if kv is not None and kv.warmups is not None:
                return kv
        return None

    async def _run(self, session_id: str, one: _Session) -> None:
        try:
            while one.wanted:
                one.wanted = False
                await asyncio.sleep(_SETTLE_S)
                self.counts[await self._warm(session_id, one)] += 1
        except Exception:
            self.counts["failed"] += 1
            self._plane.failed("prefill ahead of a turn")
        finally:
            one.task = None

    async def _warm(self, session_id: str, one: _Session) -> str:
        """Submit a warm-up if it is worth it; returns what came of it."""
        orchestrator, turns = self._orchestrator, one.turns
        runner = orchestrator.session_manager.runners.get(session_id)
        if runner is None:
            return "overtaken"
        if self._answers(session_id):
            return "busy"
        prepared = self._prepared(runner, _SPEECH)
        parts = self._parts(runner, prepared)
        if [part.key for part in parts] == [part.key for part in one.warmed]:
            return "same"
        if self._may_miss(one, parts) < self._plane.config.kv.prefill_min_tokens:
            return "small"
        lock = orchestrator._prompt_processing_lock
        while lock.locked():  # somebody's turn is prepared: that goes first
            await asyncio.sleep(_POLL_S)
        request_id = warmup_id(session_id, next(self._numbers))
        prompt = await self._prompt(runner, request_id, prepared)
        if one.turns != turns or not self.usable:
            return "overtaken"
        request = await self._request(request_id, prompt)
        # It must go to the engine now, whatever has happened since: the frontend's multimodal cache
        # counts on the engine having what it was made of.
        before, one.request_id = one.request_id, request_id
        await self._submit(request_id, request)
        if before is not None:
            await self._abort(before)
        if one.turns != turns or runner.session.state != DuplexSessionState.OPEN:
            await self._abort(request_id)
            return "overtaken"
        one.known = one.warmed = parts
        return "submitted"

    def _answers(self, session_id: str) -> bool:
        """Whether the thinker works on an answer of the session (its next request is registered
        long before it is submitted).
        """
        return any(
            getattr(state, "session_id", None) == session_id
            and THINKER in state.stage_submit_ts
            and THINKER not in state.finished_stage_ids
            for state in self._orchestrator.request_states.values()
        )

    def _prepared(self, runner: Any, speech: Mapping[str, Any]) -> dict[str, Any]:
        """The host's session config with the messages of the next prompt; ``speech`` stands for
        the turn's, and then its message comes last. Mirrors ModelChannel._append_via_data_plane.
        """
        session = runner.session
        history = list(session.history)
        if speech:
            history.append({"role": "user", "content": [{"type": "audio_url"}]})
        # The host remembers what it kept; here nothing is to change.
        state = SimpleNamespace(audio_history=list(runner.model_state.audio_history))
        return runner.plugin.prepare_prompt_config(
            {**session.config.as_dict(), "conversation": history}, state=state, payload=speech
        )

    def _parts(self, runner: Any, prepared: Mapping[str, Any]) -> list[Part]:
        text = runner.session.runtime_config.get("instructions") or ""
        parts = [Part(("system", hash(text)), len(text) / _CHARS_PER_TOKEN)]
        for message in prepared["qwen_messages"]:
            payload = message.get("audio_payload")
            if payload is _SPEECH:
                continue
            if payload is not None:
                audio = payload.get("audio", "")
                parts.append(Part(("speech", hash(audio)), len(audio) / _SPEECH_CHARS_PER_TOKEN))
                continue
            content = message.get("content")
            text = content if isinstance(content, str) else _texts(content)
            parts.append(Part((str(message["role"]), hash(text)), len(text) / _CHARS_PER_TOKEN))
        return parts

    def _may_miss(self, one: _Session, parts: Sequence[Part]) -> float:
        """Tokens of ``parts`` that may be in no tier: those that were in no prompt yet, and if
        something was lost from the tiers, all of them.
        """
        same = 0
        if not self._lost():
            for before, now in zip(one.known, parts, strict=False):
                if before.key != now.key:
                    break
                same += 1
        return sum(part.tokens for part in parts[same:])

    def _lost(self) -> bool:
        """Whether something that was computed may be in no tier by now."""
        kv, switches = self._thinker(), self._plane.monitor.switches
        if kv is None or not any(kv.evicted.values()):
            return kv is None
        dram = kv.dram
        keeps = dram is not None and dram.slots and not any(dram.evicted.values())
        return not (keeps and switches.kv_store and switches.kv_load)

    async def _prompt(
        self, runner: Any, request_id: str, prepared: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The next prompt up to where its speech goes."""
        messages: list[dict[str, Any]] = []
        for message in prepared["qwen_messages"]:
            if message.get("audio_payload") is _SPEECH:
                break
            messages.append(message)
        messages.append({"role": "user", "content": _MARK})
        plan = await runner.plugin.prepare_append_plan(
            request_id=request_id,
            fence=None,
            session_config={**prepared, "qwen_messages": messages},
            runtime_config=dict(runner.session.runtime_config),
            seq=0,
            turn_seq=0,
            payload={"type": "conversation"},
            final=True,
            sampling_params=None,
        )
        prompt = dict(plan.prompt)
        before, mark, _ = prompt["prompt"].partition(_MARK)
        expect(mark, "a prompt's text lacks a message that was put into it")
        prompt["prompt"] = before
        return prompt

    async def _request(self, request_id: str, prompt: dict[str, Any]) -> Any:
        """The thinker's request, prepared as the host prepares a turn's."""
        router = self._orchestrator.router
        if router is not None:
            router.ahead(request_id)  # its audio is named as on the replica that it goes to
        try:
            request = await asyncio.to_thread(
                self._orchestrator._process_turn_prompt,
                request_id,
                THINKER,
                prompt,
                _sampling(),
                resumable=False,
            )
        except BaseException:
            self._orchestrator.stage_pools[THINKER].release_binding(request_id)
            raise
        # Else the thinker would hand its rows on to a talker that does not know of it.
        request = apply_omni_final_stage_metadata(request, THINKER)
        request.external_req_id = request.request_id
        return request

    async def _submit(self, request_id: str, request: Any) -> None:
        """Mirrors `DuplexOrchestrator.submit`, for the first stage alone."""
        orchestrator = self._orchestrator
        pool = orchestrator.stage_pools[THINKER]
        now_s = time.time()
        state = OrchestratorRequestState(
            request_id,
            sampling_params_list=[_sampling() for _ in orchestrator.stage_pools],
            final_stage_id=THINKER,
            final_output_stage_ids={THINKER},
            request_timestamp=now_s,
            session_owned=True,  # so nothing of it goes to a client
        )
        state.stage_submit_ts[THINKER] = now_s
        orchestrator.request_states[request_id] = state
        try:
            await pool.submit_initial(request_id, state, request, prompt_text=None)
        except BaseException:
            orchestrator.request_states.pop(request_id, None)
            self.ended(request_id)
            raise

    async def _abort(self, request_id: str) -> None:
        try:
            if request_id in self._orchestrator.request_states:
                await self._orchestrator._cleanup_request_ids([request_id], abort=True)
        except Exception:
            self._plane.failed("cancelling a warm-up")

    def _closed(self, session_id: str) -> None:
        self.drop(session_id)
        one = self._sessions.pop(session_id, None)
        if one is not None and one.task is not None:
            one.wanted = False

    def _still(self, one: _Session) -> None:
        if one.silence is not None:
            one.silence.cancel()
            one.silence = None


def _sampling() -> SamplingParams:
    return SamplingParams(
        temperature=0.0,
        max_tokens=_MAX_TOKENS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _texts(content: object) -> str:
    """The text of a message's parts; an image counts by its encoding."""
    return "".join(map(str, content)) if isinstance(content, list) else str(content or "")


def attach(orchestrator: Any, plane: InteractionPlane) -> Warmer:
    """A `Warmer` for a duplex orchestrator of Qwen3-Omni.

    Raises:
        SeamError: the host does not look as expected.
    """
    plugin = orchestrator.plugin
    expect(isinstance(plugin, Qwen3OmniDuplexPlugin), f"the plugin is a {type(plugin).__name__}")
    parameters = inspect.signature(plugin.prepare_prompt_config).parameters
    expect(
        list(parameters) == ["config", "state", "payload"],
        "the plugin's prepare_prompt_config takes other arguments",
    )
    wanted = {
        "request_id", "fence", "session_config", "runtime_config", "seq", "turn_seq", "payload",
        "final", "sampling_params",
    }  # fmt: skip
    parameters = inspect.signature(plugin.plan_append).parameters
    expect(set(parameters) == wanted, "the plugin's plan_append takes other arguments")
    for name in ("_process_turn_prompt", "_prompt_processing_lock", "_cleanup_request_ids"):
        expect(hasattr(orchestrator, name), f"DuplexOrchestrator.{name} is gone")
    fields = OrchestratorRequestState.__dataclass_fields__
    for name in ("session_owned", "final_output_stage_ids", "finished_stage_ids"):
        expect(name in fields, f"OrchestratorRequestState.{name} is gone")
    expect(hasattr(orchestrator.session_manager, "runners"), "DuplexSessionManager.runners is gone")
    return Warmer(orchestrator, plane)
