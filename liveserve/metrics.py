"""Prometheus metrics, in the host's default registry and so in its ``/metrics``.

Engines do not expose metrics of their own: their snapshots arrive in the API process, which sets
the gauges. Names follow Prometheus' rules: base units, ``_total`` for counters.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from liveserve.events import Event, PressureSnapshot
from liveserve.monitor import EngineKey
from liveserve.scheduler.urgency import Urgency
from liveserve.scheduler.views import Phase, SessionView
from liveserve.session import StageTotals, Totals

_STAGE = ("stage", "replica")


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
        self.exchange = self._get(
            Histogram,
            "exchange_seconds",
            "Time for an engine to take events and answer",
            _STAGE,
            buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10),
        )
        self._counted = Totals()

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
        return self._get(Gauge, name, text, labels, multiprocess_mode="mostrecent")

    def _get(self, kind: type, name: str, text: str, labels: tuple[str, ...], **options):  # type: ignore[no-untyped-def]
        full = f"liveserve_{name}"
        known = getattr(self._registry, "_names_to_collectors", {}).get(full)
        if known is not None:
            return known
        return kind(full, text, labels, registry=self._registry, **options)
