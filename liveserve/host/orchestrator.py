"""Seam in the host's orchestrator: runs the interaction plane on its loop, reports turn requests.

`LiveOrchestration` is mixed into the host's two orchestrators; both are put where the host looks
them up by name (vllm_omni/engine/async_omni_engine.py, duplex_omni_engine.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from vllm.sampling_params import RequestOutputKind
from vllm_omni.engine import async_omni_engine, duplex_orchestrator
from vllm_omni.engine.duplex_orchestrator import DuplexOrchestrator
from vllm_omni.engine.orchestrator import Orchestrator
from vllm_omni.metrics import count_audio_frames
from vllm_omni.metrics.utils import iter_mm_outputs

from liveserve.config import from_env
from liveserve.host import seam, warmup
from liveserve.host.duplex import LiveSessionManager
from liveserve.host.engine import METHOD
from liveserve.host.replicas import ReplicaRouter
from liveserve.host.sessions import is_warmup, session_of
from liveserve.host.stages import codec_frame_s
from liveserve.monitor import EngineKey, Send
from liveserve.plane import THINKER, InteractionPlane


async def _call_engine(client: Any, payload: bytes) -> bytes:
    return bytes(await client.call_utility_async(METHOD, payload))


class LiveOrchestration:
    """Mixed in front of a host orchestrator. Every override does the host's work first or last,
    and none of its own can fail the host's.
    """

    async_chunk: bool
    stage_pools: list[Any]
    request_states: dict[str, Any]
    _shutdown_event: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.live: InteractionPlane | None = None
        self.router: ReplicaRouter | None = None
        self.warmer: warmup.Warmer | None = None
        self._routed_so_far: dict[tuple[str, int], float] = {}
        self._stages: dict[int, tuple[str, float | None]] = {}
        seam.install("the interaction plane", self._attach)
        seam.install("the choice of a replica", self._attach_router)

    def _attach(self) -> None:
        config = from_env()
        if config is None:
            return
        self.live = InteractionPlane(config, self._engines)
        manager = getattr(self, "session_manager", None)
        if isinstance(manager, LiveSessionManager):
            manager.plane = self.live

    def _attach_router(self) -> None:
        if self.live is not None and self.stage_pools:
            self.router = ReplicaRouter(self.stage_pools[THINKER], self.live)

    def _engines(self) -> dict[EngineKey, Send]:
        """The live LLM engines, by stage and replica."""
        engines: dict[EngineKey, Send] = {}
        for stage_id, pool in enumerate(self.stage_pools):
            for replica_id in pool.available_replica_ids():
                client = pool.clients[replica_id]
                if hasattr(client, "call_utility_async"):
                    engines[(stage_id, replica_id)] = functools.partial(_call_engine, client)
        return engines

    def _background_tasks(self) -> list[Any]:
        tasks = super()._background_tasks()  # type: ignore[misc]
        if self.live is not None:
            tasks.append(self.live.run(self._shutdown_event))
        return tasks

    async def _dispatch_message(self, msg: Any) -> bool:
        if getattr(msg, "type", None) == "add_request":
            self._report(self._turn_opened, msg)
        return await super()._dispatch_message(msg)  # type: ignore[misc]

    async def _route_output(
        self, stage_id: int, replica_id: int, output: Any, req_state: Any, stage_metrics: Any
    ) -> None:
        if is_warmup(output.request_id):
            await self._warmed_up(output)
            return
        # First ours: the host forgets a request with its last output.
        self._report(self._routed, stage_id, output, req_state)
        if stage_id == THINKER and self.router is not None and req_state.session_owned:
            self._try(self.router.answered, replica_id, output, req_state.request_id)
        await super()._route_output(  # type: ignore[misc]
            stage_id, replica_id, output, req_state, stage_metrics
        )

    async def _warmed_up(self, output: Any) -> None:
        """What a warm-up makes is nobody's."""
        if output.finished:
            await super()._cleanup_request_ids([output.request_id])  # type: ignore[misc]
            if self.warmer is not None:
                self.warmer.ended(output.request_id)

    async def _cleanup_request_ids(self, request_ids: list[str], **kwargs: Any) -> Any:
        self._report(self._turns_ended, tuple(request_ids), bool(kwargs.get("abort")))
        return await super()._cleanup_request_ids(request_ids, **kwargs)  # type: ignore[misc]

    async def _prewarm_async_chunk_stages(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        # The request has just left for the first stage.
        self._report(self._submitted, request_id, args[0] if args else None)
        return await super()._prewarm_async_chunk_stages(  # type: ignore[misc]
            request_id, *args, **kwargs
        )

    # ---- what is reported ------------------------------------------------------------------

    def _report(self, what: Callable[..., None], *args: Any) -> None:
        if self.live is not None:
            self._try(what, self.live, *args)

    def _try(self, what: Callable[..., None], *args: Any) -> None:
        try:
            what(*args)
        except Exception:
            if self.live is not None:
                self.live.failed(what.__name__)

    def _turn_opened(self, live: InteractionPlane, msg: Any) -> None:
        stages = msg.final_output_stage_ids or [msg.final_stage_id]
        outputs = {self.stage_pools[s].stage_client.final_output_type for s in stages}
        now_s = live.now_s()
        if live.profiler.on:
            live.profiler.speech_ended(msg.request_id, now_s - msg.preprocess_ms / 1e3)
        live.tracker.opened(msg.request_id, "turn" if "audio" in outputs else "text", now_s)
        live.tracker.committed(msg.request_id, now_s)
        live.tracker.response_created(msg.request_id, msg.request_id, now_s)
        self._submitted(live, msg.request_id)

    def _submitted(self, live: InteractionPlane, request_id: str, request: Any = None) -> None:
        if live.profiler.on:
            live.profiler.submitted(session_of(request_id), request_id)
        state = self.request_states.get(request_id)
        # Where stages are prewarmed, that tells of the request first.
        told = request is not None or not self.async_chunk
        if self.router is not None and state is not None and told:
            self.router.submitted(request_id, request, session_owned=state.session_owned)

    def _routed(self, live: InteractionPlane, stage_id: int, output: Any, req_state: Any) -> None:
        """Count what every stage made, and the audio that turn requests were sent (a duplex
        session's is counted where it leaves the session, see `liveserve.host.duplex`).
        """
        request_id = req_state.request_id
        completions = getattr(output, "outputs", None)
        if not completions or request_id not in self.request_states:
            return
        stage, token_s = self._stage(stage_id)
        is_audio = self._final_output_type(stage_id) == "audio"
        if not is_audio and stage_id and token_s is None:
            return  # neither text nor frames of a known length
        is_delta = req_state.sampling_params_list[stage_id].output_kind is RequestOutputKind.DELTA
        amount = (
            self._audio_s(stage_id, output) if is_audio else float(len(completions[0].token_ids))
        )
        if not amount:
            return
        before = self._routed_so_far.get((request_id, stage_id), 0.0)
        total = before + amount if is_delta else max(before, amount)
        self._routed_so_far[(request_id, stage_id)] = total
        new, session_id = total - before, session_of(request_id)
        if is_audio:
            live.tracker.made(session_id, stage, 0, new)
            if not req_state.session_owned:
                live.tracker.audio_routed(request_id, request_id, total, live.now_s())
        else:
            seconds = new * token_s if token_s is not None else None
            live.tracker.made(session_id, stage, int(new), seconds)

    def _final_output_type(self, stage_id: int) -> str | None:
        return getattr(self.stage_pools[stage_id].stage_client, "final_output_type", None)

    def _stage(self, stage_id: int) -> tuple[str, float | None]:
        """A stage's name, and seconds of audio per token where that is fixed (the talker)."""
        known = self._stages.get(stage_id)
        if known is None:
            config = getattr(self.stage_pools[stage_id].stage_vllm_config, "model_config", None)
            name = getattr(config, "model_stage", None) or f"stage{stage_id}"
            is_talker = name == "talker"
            token_s = codec_frame_s(getattr(config, "hf_config", None)) if is_talker else None
            known = self._stages[stage_id] = (name, token_s)
        return known

    def _audio_s(self, stage_id: int, output: Any) -> float:
        """Seconds of audio in a stage's output, counted as the host's own metrics do."""
        pool = self.stage_pools[stage_id]
        total_s = 0.0
        for mm_output in iter_mm_outputs(output):
            frames = count_audio_frames(mm_output)
            if frames:
                total_s += frames / pool._infer_audio_sample_rate(mm_output)
        return total_s

    def _turns_ended(
        self, live: InteractionPlane, request_ids: tuple[str, ...], abort: bool
    ) -> None:
        now_s = live.now_s()
        live.replicas.ended(request_ids)
        for request_id in request_ids:
            state = self.request_states.get(request_id)
            for stage_id in range(len(self.stage_pools)):
                self._routed_so_far.pop((request_id, stage_id), None)
            if state is None or state.session_owned:
                continue
            if abort:
                # The client went away: it hears nothing more.
                live.tracker.barge_in(request_id, "aborted", now_s)
                live.tracker.response_done(request_id, request_id, "cancelled", now_s)
                live.tracker.closed(request_id, "aborted", now_s)
            else:
                live.tracker.response_done(request_id, request_id, "completed", now_s)


class LiveOrchestrator(LiveOrchestration, Orchestrator):
    """The host's orchestrator for turn-based models, with the interaction plane."""


class LiveDuplexOrchestrator(LiveOrchestration, DuplexOrchestrator):
    """The host's orchestrator for duplex models, with the interaction plane."""

    def _attach(self) -> None:
        super()._attach()
        if self.live is not None:
            seam.install("prefill ahead of a turn", self._attach_warmer)

    def _attach_warmer(self) -> None:
        assert self.live is not None
        self.warmer = self.live.warmer = warmup.attach(self, self.live)

    def _process_turn_prompt(
        self, request_id: str, stage_id: int, prompt: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.router is not None and stage_id == THINKER:
            self._try(self.router.scope, request_id, prompt)
        return super()._process_turn_prompt(request_id, stage_id, prompt, *args, **kwargs)

    async def submit(self, submission: Any) -> Any:
        context = submission.context
        if context.stage_id == THINKER:
            if self.router is not None:
                self._try(self.router.ahead, context.request_id)
            if self.warmer is not None:
                self._try(self.warmer.turn, context.session_id)
        result = await super().submit(submission)
        if result.stage_id == THINKER:  # where stages are not prewarmed this is the first to know
            self._report(self._submitted, result.request_id)
        return result


def install() -> None:
    """Put both classes in the places where the host looks them up by name."""
    seam.expect(
        getattr(async_omni_engine, "Orchestrator", None) in (Orchestrator, LiveOrchestrator),
        "async_omni_engine.Orchestrator is not the host's class",
    )
    seam.expect(
        getattr(duplex_orchestrator, "DuplexOrchestrator", None)
        in (DuplexOrchestrator, LiveDuplexOrchestrator),
        "duplex_orchestrator.DuplexOrchestrator is not the host's class",
    )
    for name in (
        "_background_tasks",
        "_cleanup_request_ids",
        "_dispatch_message",
        "_prewarm_async_chunk_stages",
        "_route_output",
    ):
        seam.expect(hasattr(Orchestrator, name), f"Orchestrator.{name} is gone")
    async_omni_engine.Orchestrator = LiveOrchestrator
    duplex_orchestrator.DuplexOrchestrator = LiveDuplexOrchestrator
