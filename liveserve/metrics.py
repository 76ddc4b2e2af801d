"""Prometheus metrics, in the host's default registry and so in its ``/metrics``.

Engines do not expose metrics of their own: their snapshots arrive in the API process, which sets
the gauges. Names follow Prometheus' rules: base units, ``_total`` for counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from liveserve.events import Event, KvSnapshot, PressureSnapshot
from liveserve.kvtier.policies import POLICIES
from liveserve.monitor import EngineKey
from liveserve.replicas import ReplicaTotals
from liveserve.scheduler.urgency import Urgency
from liveserve.scheduler.views import Phase, SessionView
from liveserve.session import StageTotals, Totals

_STAGE = ("stage", "replica")


class _Gauge(Gauge):
    """Knows its values by label and sets only what changed: engines answer many times a second."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known: dict[tuple[str, ...], _Gauge] = {}
        self._shown: float | None = None

    def labels(self, *labels: str) -> _Gauge:  # type: ignore[override]
        child = self._known.get(labels)
        if child is None:
            child = self._known[labels] = super().labels(*labels)
        return child

    def set(self, value: float) -> None:
        if value != self._shown:
            super().set(value)
            self._shown = value


class _KvGauges:
    """KV by tier ("gpu", "dram"). Engines restart with zero, so their totals are gauges too.

    Blocks by session are in ``GET /liveserve/kv``: a label per session would never go away.
    """

    def __init__(self, gauge: Callable[[str, str, tuple[str, ...]], Gauge]) -> None:
        tier = (*_STAGE, "tier")
        self.blocks = gauge("kv_tier_blocks", "KV blocks that a tier has", tier)
        self.used = gauge("kv_tier_blocks_used", "KV blocks of a tier that hold content", tier)
        self.sessions = gauge("kv_known_sessions", "Sessions whose next use is estimated", _STAGE)
        self.policy = gauge(
            "kv_eviction_policy", "1 for the policy that evicts from a tier now", (*tier, "policy")
        )
        self.asked = gauge("kv_prompt_tokens", "Tokens of admitted prompts, so far", _STAGE)
        self.hit = gauge("kv_hit_tokens", "Tokens of them found in a tier, so far", tier)
        self.evicted = gauge(
            "kv_evicted_blocks",
            "KV blocks evicted from a tier, so far",
            (*tier, "policy", "reason"),
        )
        self.regret = gauge(
            "kv_regret_blocks", "KV blocks evicted and needed again soon, so far", tier
        )
        self.errors = gauge("kv_errors", "Failures in a tier, so far", tier)
        self.copied = gauge(
            "kv_copied_blocks",
            "KV blocks copied between GPU and DRAM, by what became of it, so far",
            (*_STAGE, "result"),
        )
        self.under_way = gauge(
            "kv_copies_under_way", "KV blocks being copied now", (*_STAGE, "direction")
        )
        self.preloads = gauge(
            "kv_preloads",
            "Turns whose KV was in DRAM when their user spoke, by how their request found it "
            "(hits, late, short), and looks that were refused and loads cancelled, so far",
            (*_STAGE, "result"),
        )
        self.preloaded = gauge(
            "kv_preload_blocks",
            "KV blocks loaded ahead, and of those in vain, so far",
            (*_STAGE, "result"),
        )
        self.warmups = gauge(
            "kv_prefills",
            "Warm-ups (prefill ahead of a turn), by why they ended, so far",
            (*_STAGE, "reason"),
        )
        self.warmed = gauge(
            "kv_prefill_tokens",
            "Prompt tokens of warm-ups: found in the cache, computed, and of those used by a turn "
            "or wasted, so far",
            (*_STAGE, "result"),
        )
        self.reloads = gauge("kv_reloads", "Requests that waited for KV, so far", _STAGE)
        self.reload = gauge(
            "kv_reload_seconds", "How long the newest of them waited", (*_STAGE, "quantile")
        )

    def show(self, labels: tuple[str, str], snapshot: PressureSnapshot, kv: KvSnapshot) -> None:
        self.sessions.labels(*labels).set(kv.sessions_known)
        self.asked.labels(*labels).set(kv.prompt_tokens)
        dram = kv.dram
        from_dram = min(dram.hits * kv.block_tokens, kv.hit_tokens) if dram else 0
        self._tier(
            (*labels, "gpu"),
            blocks=snapshot.kv_blocks_total,
            used=kv.cached,
            hit=kv.hit_tokens - from_dram,
            regret=kv.regret,
            errors=kv.errors,
            evicted={tuple(name.split("/", 1)): count for name, count in kv.evicted.items()},
        )
        self._in_force((*labels, "gpu"), kv.policy)
        if (ahead := kv.preload) is not None:
            for result in ("admitted", "partial", "hits", "late", "short"):
                self.preloads.labels(*labels, result).set(getattr(ahead, result))
            self.preloads.labels(*labels, "refused").set(sum(ahead.refused.values()))
            self.preloads.labels(*labels, "cancelled").set(sum(ahead.cancelled.values()))
            self.preloaded.labels(*labels, "loaded").set(ahead.loaded_blocks)
            self.preloaded.labels(*labels, "wasted").set(ahead.wasted_blocks)
        if (warmups := kv.warmups) is not None:
            for reason, count in warmups.ended.items():
                self.warmups.labels(*labels, reason).set(count)
            for result in ("found", "computed", "used", "wasted"):
                self.warmed.labels(*labels, result).set(getattr(warmups, result))
        if dram is None:
            return
        self._tier(
            (*labels, "dram"),
            blocks=dram.slots,
            used=dram.used,
            hit=from_dram,
            regret=dram.regret,
            errors=dram.errors,
            evicted={(dram.policy, reason): count for reason, count in dram.evicted.items()},
        )
        self._in_force((*labels, "dram"), dram.policy)
        for result in ("stored", "store_failed", "refused", "loaded", "load_failed", "corrupt"):
            self.copied.labels(*labels, result).set(getattr(dram, result))
        self.copied.labels(*labels, "preloaded").set(dram.preloaded)
        self.under_way.labels(*labels, "load").set(dram.loading)
        self.under_way.labels(*labels, "store").set(dram.storing)
        self.reloads.labels(*labels).set(dram.reloads)
        for quantile, ms in (
            ("0.5", dram.reload_p50_ms),
            ("0.9", dram.reload_p90_ms),
            ("1", dram.reload_max_ms),
        ):
            self.reload.labels(*labels, quantile).set(ms / 1e3)

    def _tier(
        self,
        labels: tuple[str, str, str],
        *,
        blocks: int,
        used: int,
        hit: int,
        regret: int,
        errors: int,
        evicted: dict[tuple[str, ...], int],
    ) -> None:
        for gauge, value in (
            (self.blocks, blocks),
            (self.used, used),
            (self.hit, hit),
            (self.regret, regret),
            (self.errors, errors),
        ):
            gauge.labels(*labels).set(value)
        for why, count in evicted.items():
            self.evicted.labels(*labels, *why).set(count)

    def _in_force(self, labels: tuple[str, str, str], policy: str) -> None:
        for name in POLICIES:
            self.policy.labels(*labels, name).set(name == policy)


class Metrics:
    """One set of collectors. A second set in the same registry shares the first one's."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._registry = registry
        self.events = self._counter("events", "Session events seen", ("kind",))
        self.rejected = self._counter(
            "rejected_client_events", "Client events refused with a protocol error", ("code",)
        )
        self.plane_errors = self._counter(
            "plane_errors", "Exceptions LiveServe caught in the API process"
        )
        self.audio = {
            name: self._counter(f"audio_{name}_seconds", f"Seconds of audio {what}")
            for name, what in (
                ("routed", "handed to clients"),
                ("heard", "played by listeners, of responses that ended"),
                ("wasted", "handed to clients and never heard"),
            )
        }
        self.stages = {
            name: self._counter(f"stage_{name}", text, ("stage",))
            for name, text in (
                ("made_tokens", "Tokens a stage made for responses that ended"),
                ("wasted_tokens", "Tokens of those whose speech nobody heard"),
                ("made_seconds", "Seconds of speech a stage made for responses that ended"),
                ("wasted_seconds", "Seconds of those that nobody heard"),
            )
        }
        self.false_alarms = self._counter(
            "false_alarms", "Times that speech over an answer was too short to interrupt it"
        )
        self.choices = self._counter(
            "replica_choices", "Sessions' turns by why a thinker took them", ("why",)
        )
        self.moves = self._counter(
            "replica_moves", "Sessions' turns that another thinker took than the one before"
        )
        self.live = self._gauge("sessions", "Live sessions", ("phase",))
        self.requests = self._gauge(
            "requests", "Requests in an engine", (*_STAGE, "state", "urgency")
        )
        self.kv_used = self._gauge("kv_blocks_used", "KV cache blocks in use", _STAGE)
        self.kv_total = self._gauge("kv_blocks", "KV cache blocks in all", _STAGE)
        self.unheard = self._gauge(
            "unheard_kv_blocks",
            "KV cache blocks freed first because a barge-in left them unheard, so far",
            _STAGE,
        )
        self.token_rate = self._gauge(
            "generation_tokens_per_second", "Tokens an engine makes per second", _STAGE
        )
        self.step = self._gauge("step_seconds", "Moving average of a model step", _STAGE)
        self.round = self._gauge(
            "round_seconds", "Moving average of LiveServe's part of a scheduling round", _STAGE
        )
        self.queue = self._gauge("link_queue_bytes", "Bytes waiting for the KV link", _STAGE)
        self.stale = self._gauge("views_stale", "1 while an engine's views are unreliable", _STAGE)
        self.lost = self._gauge("events_lost", "Events an engine missed so far", _STAGE)
        self.errors = self._gauge("errors", "Exceptions LiveServe caught in an engine", _STAGE)
        self.kv = _KvGauges(self._gauge)
        self.exchange = self._get(
            Histogram,
            "exchange_seconds",
            "Time for an engine to take events and answer",
            _STAGE,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )
        self._counted = Totals()
        self._counted_replicas = ReplicaTotals()

    def event(self, event: Event) -> None:
        self.events.labels(event.kind.name.lower()).inc()

    def reply(self, key: EngineKey, snapshot: PressureSnapshot, took_s: float) -> None:
        """Show an engine's newest snapshot."""
        labels = (snapshot.stage or str(key[0]), str(key[1]))
        self.exchange.labels(*labels).observe(took_s)
        for state, counts in (
            ("running", snapshot.running_by_class),
            ("waiting", snapshot.waiting_by_class),
        ):
            for urgency, count in zip(Urgency, counts, strict=True):
                self.requests.labels(*labels, state, urgency.name).set(count)
        for gauge, value in (
            (self.kv_used, snapshot.kv_blocks_used),
            (self.kv_total, snapshot.kv_blocks_total),
            (self.unheard, snapshot.unheard_blocks_total),
            (self.token_rate, snapshot.tokens_per_s),
            (self.step, snapshot.step_ms / 1e3),
            (self.round, snapshot.round_us / 1e6),
            (self.queue, snapshot.link_queue_bytes),
            (self.stale, snapshot.stale),
            (self.lost, snapshot.events_lost),
            (self.errors, snapshot.errors_total),
        ):
            gauge.labels(*labels).set(value)
        if snapshot.kv is not None:
            self.kv.show(labels, snapshot, snapshot.kv)

    def replicas(self, totals: ReplicaTotals) -> None:
        """Show how turns were given to replicas."""
        counted = self._counted_replicas
        for why, count in (totals.choices - counted.choices).items():
            self.choices.labels(why).inc(count)
        self.moves.inc(totals.moved - counted.moved)
        counted.choices, counted.moved = totals.choices.copy(), totals.moved

    def sessions(self, views: Iterable[SessionView], totals: Totals, now_s: float) -> None:
        """Show the sessions by phase and the audio totals."""
        phases = dict.fromkeys(Phase, 0)
        for view in views:
            phases[view.phase_at(now_s)] += 1
        for phase, count in phases.items():
            self.live.labels(phase.name.lower()).set(count)
        for name, counter in self.audio.items():
            grown = getattr(totals, f"{name}_s") - getattr(self._counted, f"{name}_s")
            if grown > 0:
                counter.inc(grown)
                setattr(self._counted, f"{name}_s", getattr(totals, f"{name}_s"))
        self.false_alarms.inc(totals.false_alarms - self._counted.false_alarms)
        self._counted.false_alarms = totals.false_alarms
        for stage, made in totals.stages.items():
            counted = self._counted.stages.get(stage, StageTotals())
            for name, counter in self.stages.items():
                field = name.replace("seconds", "s")
                counter.labels(stage).inc(getattr(made, field) - getattr(counted, field))
            self._counted.stages[stage] = replace(made)

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._get(Counter, name, text, labels)

    def _gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return self._get(_Gauge, name, text, labels, multiprocess_mode="mostrecent")

    def _get(self, kind: type, name: str, text: str, labels: tuple[str, ...], **options):  # type: ignore[no-untyped-def]
        full = f"liveserve_{name}"
        known = getattr(self._registry, "_names_to_collectors", {}).get(full)
        if known is not None:
            return known
        return kind(full, text, labels, registry=self._registry, **options)
