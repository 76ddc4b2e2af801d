"""Layout arithmetic, reply gaps, request ids, version gate, seams and metrics."""

from __future__ import annotations

import logging
import math
import socket
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from liveserve.bench.demo import ensure_tiny_model
from liveserve.bench.launch import free_port
from liveserve.events import Event, EventKind, PressureSnapshot
from liveserve.host import seam, versions
from liveserve.host.sessions import session_of
from liveserve.host.stages import codec_frame_s
from liveserve.kernels.layout import PagedKVLayout
from liveserve.kvtier.next_use import GapPrior, ReplyGap, next_use_s
from liveserve.metrics import Metrics
from liveserve.scheduler.views import Phase, SessionView
from liveserve.session import Totals

# Qwen3-Omni's thinker: 48 layers, 4 KV heads of 128, bf16, 16-token blocks.
THINKER = PagedKVLayout(48, 1000, 16, 4, 128, 2)


def test_layout_sizes_match_the_known_figures():
    assert THINKER.fragment_bytes == 16 * 1024
    assert THINKER.block_bytes == 3 * 1024 * 1024 // 2
    assert THINKER.total_bytes == 1000 * THINKER.block_bytes
    assert [THINKER.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4"])
def test_layout_names_the_wrong_field(value):
    with pytest.raises(ValueError, match="num_kv_heads"):
        PagedKVLayout(48, 1000, 16, value, 128, 2)


def test_reply_gap_moves_from_the_prior_to_the_users_own():
    gap = ReplyGap(GapPrior(mean_s=2.0))
    assert gap.mean_s == 2.0
    for _ in range(20):
        gap.observe(10.0)
    assert 6.0 < gap.mean_s < 10.0
    for bad in (-1.0, math.nan, math.inf):
        gap.observe(bad)
    assert 6.0 < gap.mean_s < 10.0


def test_one_users_gap_moves_the_prior_of_others_a_little():
    prior = GapPrior(mean_s=2.0)
    ReplyGap(prior).observe(12.0)
    assert 2.0 < ReplyGap(prior).mean_s < 6.0


def test_next_use_is_the_end_of_playback_plus_the_gap():
    assert next_use_s(100.0, 4.0, 2.5) == 106.5
    assert next_use_s(100.0, -4.0, -1.0) == 100.0


@pytest.mark.parametrize(
    ("request_id", "session_id"),
    [
        ("duplex-s.ZHVwbGV4LTE.e.0.r.stage0-turn1", "duplex-1"),
        ("duplex-s.ZHVwbGV4LTE.e.3.r.stage0-1f2e", "duplex-1"),
        ("chatcmpl-1", "chatcmpl-1"),
        ("duplex-s.%%%.e.0.r.x", "duplex-s.%%%.e.0.r.x"),
        ("duplex-s._w.e.0.r.x", "duplex-s._w.e.0.r.x"),  # not UTF-8
    ],
)
def test_session_of_a_request_id(request_id, session_id):
    assert session_of(request_id) == session_id


def test_session_ids_survive_the_hosts_own_encoding():
    contracts = pytest.importorskip("vllm_omni.engine.duplex.contracts")
    for session_id in ("a", "duplex-0123", "ünïcode ✓", "x" * 200):
        fence = contracts.DuplexFence(session_id, epoch=4, turn_id=2)
        request_id = contracts.duplex_ephemeral_stage_request_id(fence, stage_id=0)
        assert session_of(request_id) == session_id


def test_codec_frame_length_of_qwen3_omni():
    config = SimpleNamespace(upsample_rates=(8, 5, 4, 3), upsampling_ratios=(2, 2))
    assert codec_frame_s(SimpleNamespace(code2wav_config=config)) == pytest.approx(0.08)
    assert codec_frame_s(SimpleNamespace()) is None


def test_an_untested_host_version_stays_stock_with_one_line(monkeypatch, caplog):
    monkeypatch.setattr(versions, "installed", lambda *names: "0.31.0")
    with caplog.at_level(logging.WARNING, logger="vllm.liveserve"):
        assert not versions.supported()
    (record,) = caplog.records
    assert "vllm 0.31.0" in record.getMessage()
    assert "0.30.0" in record.getMessage()


def test_the_installed_host_is_a_tested_one():
    assert versions.supported()


def test_a_failing_seam_is_one_line_and_no_exception(caplog):
    def wrong() -> None:
        seam.expect(False, "Thing.method is gone")

    with caplog.at_level(logging.WARNING, logger="vllm.liveserve"):
        assert not seam.install("the thing", wrong)
        assert not seam.install("another", lambda: 1 / 0)  # type: ignore[arg-type]
        assert seam.install("fine", lambda: None)
    assert "the thing stays stock" in caplog.records[0].getMessage()
    assert "Thing.method is gone" in caplog.records[0].getMessage()
    assert "ZeroDivisionError" in caplog.records[1].getMessage()


def test_metrics_have_base_units_and_one_set_per_registry():
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    Metrics(registry)  # a second orchestrator in the process shares them
    metrics.event(Event(EventKind.BARGE_IN, "a", 1.0))
    snapshot = PressureSnapshot(1, "talker", True, running_by_class=[1, 2, 3], step_ms=40.0)
    for snapshot.step_ms in (40.0, 40.0, 30.0):
        metrics.reply((1, 0), snapshot, 0.004)
    view = SessionView("a", phase=Phase.THINKING)
    metrics.sessions([view], Totals(routed_s=5.0, wasted_s=1.5), 1.0)
    metrics.sessions([view], Totals(routed_s=6.0, wasted_s=1.5), 2.0)
    text = generate_latest(registry).decode()
    for line in (
        'liveserve_events_total{kind="barge_in"} 1.0',
        'liveserve_requests{replica="0",stage="talker",state="running",urgency="U2"} 3.0',
        'liveserve_step_seconds{replica="0",stage="talker"} 0.03',
        'liveserve_sessions{phase="thinking"} 1.0',
        "liveserve_audio_routed_seconds_total 6.0",
        "liveserve_audio_wasted_seconds_total 1.5",
    ):
        assert line in text


@pytest.mark.parametrize(
    ("heard_ms", "kept"),
    [(0, ""), (1000, "one"), (2999, "one two"), (3001, "one two"), (10_000, "one two three four")],
)
def test_heard_text_ends_with_a_whole_word(heard_ms, kept):
    history = pytest.importorskip("liveserve.host.history")
    text = "one two three four"  # 18 characters in 4.5 s: four a second
    cut = text[: history.heard_chars(len(text), heard_ms, 4500)].rstrip()
    assert history.whole_words(text, cut) == kept


def test_text_without_spaces_is_cut_where_it_was_heard():
    history = pytest.importorskip("liveserve.host.history")
    assert history.whole_words("你好世界", "你好") == "你好"
    assert history.whole_words("abc", "abc") == "abc"
    assert history.heard_chars(10, 500, 0) == 0


def test_a_servers_port_is_not_one_that_the_kernel_hands_out():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        assert all(10_000 <= free_port() < taken.getsockname()[1] for _ in range(20))


def test_a_port_in_use_is_not_free(monkeypatch):
    with socket.socket() as taken:
        port = free_port()
        taken.bind(("127.0.0.1", port))
        taken.listen()
        drawn = iter([port - 10_000, port - 10_000, 123])
        monkeypatch.setattr("liveserve.bench.launch.secrets.randbelow", lambda _n: next(drawn))
        assert free_port() == 10_123


def test_two_that_need_a_model_at_once_get_one_and_a_failure_leaves_none(tmp_path, monkeypatch):
    folder, writers = tmp_path / "cache" / "model", []

    def write(path):
        writers.append(len(writers))
        mine = writers[-1]
        if mine == 0:
            raise OSError("disk full")
        if mine == 1:
            ensure_tiny_model(folder)  # somebody else is quicker
        path.mkdir()
        (path / "config.json").write_text(f"{mine}")
        return path

    monkeypatch.setattr("liveserve.host.cpu.tiny_model.write_tiny_model", write)
    with pytest.raises(OSError, match="disk full"):
        ensure_tiny_model(folder)
    assert not list(folder.parent.iterdir())
    for _ in range(2):
        ensure_tiny_model(folder)
    assert writers == [0, 1, 2]
    assert (folder / "config.json").read_text() == "2"
    assert list(folder.parent.iterdir()) == [folder]
    (folder / "config.json").rename(folder / "half")
    with pytest.raises(OSError, match="not empty"):
        ensure_tiny_model(folder)
