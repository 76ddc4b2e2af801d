"""`bench reload` on a CPU: what is right, where the time went, the timeline."""

from __future__ import annotations

import json

import pytest
import torch

from liveserve.bench import reload
from liveserve.bench.chrome_trace import Trace
from liveserve.bench.compute_load import SMALL, DecodeLoop, PagedModel
from liveserve.bench.reload import CASES, PARTS, Case, ReloadBench, Setting, Turn, ratios_of
from liveserve.cli import main
from liveserve.kernels.calibrate import BUILT_IN
from liveserve.kvtier.transfer_base import Kind, TransferError

ON_PATH = CASES[1]


def turn(layers, moved, *, case=ON_PATH, ended_s=None, correct=True):
    ended_s = layers[-1][1] if ended_s is None else ended_s
    return Turn(case, 10.0, ended_s, tuple(enumerate(layers)), moved, 1000, correct)


@pytest.mark.parametrize(
    ("layers", "moved", "parts"),
    [
        # Loaded whole: queue 1, transfer 4, wake-up 1, then two layers of 2.
        ([(16, 18), (18, 20)], (10, 11, 15), (1, 4, 1, 4)),
        # Layer-wise: the second layer stands still for 2 while bytes move, 1 behind them.
        ([(13, 15), (18, 19)], (10, 11, 17), (1, 4, 1, 3)),
        # Preloaded.
        ([(11, 13), (13, 14)], (2, 3, 9), (0, 0, 1, 3)),
        # Recomputed.
        ([(10, 13), (14, 15)], None, (0, 0, 1, 4)),
        # Compute hides all of it.
        ([(10, 20)], (10, 12, 15), (0, 0, 0, 10)),
        # Events that seem to overlap by the clock's error count once.
        ([(10, 13), (12, 15)], None, (0, 0, 0, 5)),
    ],
)
def test_the_critical_path_adds_up(layers, moved, parts):
    found = turn(layers, moved).parts_s()
    assert found == pytest.approx(dict(zip(PARTS, parts, strict=True)))
    assert sum(found.values()) == pytest.approx(layers[-1][1] - 10)


def test_ratios_are_formed_within_a_round():
    def of(name, total_s):
        return turn([(10, 10 + total_s)], None, case=Case(name, None))

    turns = [of("recompute", 8), of("on path", 4), of("recompute", 6), of("on path", 1)]
    ratio = ratios_of(turns)["reload_speedup"]
    assert (ratio["value"], ratio["low"], ratio["high"]) == (4.0, 2.0, 6.0)
    assert "layerwise_speedup" not in ratios_of(turns)


def small(**changes) -> Setting:
    sizes = {
        "history_tokens": 128,
        "new_tokens": 32,
        "other_tokens": 64,
        "chunk_tokens": 64,
        "repeats": 1,
        "link_gbps": 0.01,  # slow: a layer computes long before the next has come
    }
    return Setting(device="cpu", shape=SMALL, dtype=torch.float32, **(sizes | changes))


def test_every_case_gives_the_output_of_a_session_that_never_left():
    with ReloadBench(small(), BUILT_IN) as bench:
        turns = {turn.case.name: turn for turn in bench.run()}
    assert list(turns) == [case.name for case in CASES]
    assert all(turn.correct for turn in turns.values())
    for one in turns.values():
        parts = one.parts_s()
        assert min(parts.values()) >= 0
        assert sum(parts.values()) == pytest.approx(one.total_s)
    num_bytes = 8 * SMALL.layers * 2 * 16 * 4 * 128 * 2
    paced_s = num_bytes / 0.01e9
    for name, one in turns.items():
        chunks = 3 if name == "recompute" else 1
        assert [layer for layer, _ in one.layers] == [*range(SMALL.layers)] * chunks
        assert one.num_bytes == (0 if one.moved is None else num_bytes)
        if one.moved is not None:
            # A late wake-up of the link's thread is queueing.
            assert one.moved[2] - one.moved[0] > 0.9 * paced_s
    path = turns["on path"].parts_s()
    assert path["queue"] + path["transfer"] > 0.9 * paced_s
    assert turns["preloaded"].parts_s()["transfer"] == turns["preloaded"].parts_s()["queue"] == 0
    # The first layer of a load in layers runs before the last has come.
    layer_wise = turns["layer-wise"]
    assert layer_wise.layers[0][1][0] < layer_wise.moved[2]
    assert turns["on path"].layers[0][1][0] >= turns["on path"].moved[2]


@pytest.mark.parametrize("case", [case for case in CASES if case.load is Kind.ON_PATH])
def test_a_layer_that_reads_too_early_shows(case, monkeypatch):
    with ReloadBench(small(link_gbps=0.004), BUILT_IN) as bench:
        bench._prepare()
        monkeypatch.setattr(bench.engine, "order_compute", lambda *_: None)
        assert not bench.measure(case).correct


def test_layers_that_come_in_the_wrong_order_show(monkeypatch):
    """A load that is not layer-wise, waited for as if it were."""
    with ReloadBench(small(link_gbps=0.004), BUILT_IN) as bench:
        bench._prepare()
        order = bench.engine.order_compute
        monkeypatch.setattr(bench.engine, "order_compute", lambda load, n: order(load, n - 1))
        assert not bench.measure(CASES[2]).correct


def test_a_load_that_fails_is_an_error(monkeypatch):
    with ReloadBench(small(), BUILT_IN) as bench:
        bench._prepare()

        def copy(*_args, **_kwargs):
            raise RuntimeError("the driver refused")

        monkeypatch.setattr(bench.engine.link.method, "copy", copy)
        with pytest.raises(TransferError):
            bench.measure(ON_PATH)


def test_the_gpu_clock_puts_events_on_the_host_clock(monkeypatch):
    now_ms = [500.0]

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at_ms = now_ms[0]

        def synchronize(self):
            assert self.at_ms <= now_ms[0]

        def elapsed_time(self, later):
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    for name in ("range_push", "range_pop"):
        monkeypatch.setattr(torch.cuda.nvtx, name, lambda *_: None)
    monkeypatch.setattr(reload.time, "monotonic", lambda: 70.0)
    clock = reload._GpuClock("cuda:0")
    for layer in (0, 1):
        now_ms[0] += 2
        clock.begin(layer)
        now_ms[0] += 5
        clock.end(layer)
    (_, first), (_, second) = clock.read()
    assert first == pytest.approx((70.002, 70.007))
    assert second == pytest.approx((70.009, 70.014))


DRY = ["bench", "reload", "--dry-run", "--history-tokens", "128", "--new-tokens", "32",
       "--other-tokens", "64", "--chunk-tokens", "64", "--repeats", "2"]  # fmt: skip


def test_dry_run_writes_result_plot_and_timeline(tmp_path, capsys):
    files = [tmp_path / "new" / name for name in ("r.json", "r.png", "trace.json")]
    flags = zip(("--json", "--plot", "--trace"), map(str, files), strict=True)
    assert main([*DRY, *(word for pair in flags for word in pair)]) == 0
    result = json.loads(files[0].read_text())
    assert (result["simulated"], result["preset"]) == (True, "dry-run")
    assert [case["params"]["case"] for case in result["cases"]] == [case.name for case in CASES]
    for case in result["cases"]:
        metrics = case["metrics"]
        assert metrics["correct"] is True
        assert 0 < metrics["total_low_s"] <= metrics["total_s"] <= metrics["total_high_s"]
        assert ("move_s" in metrics) == (case["params"]["case"] != "recompute")
        if "move_s" in metrics:
            assert 0 <= metrics["hidden_fraction"] <= 1
    assert set(result["ratios"]) == {
        "reload_speedup", "layerwise_speedup", "preload_speedup", "busy_layerwise_speedup"
    }  # fmt: skip
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "not a GPU's figures" in capsys.readouterr().out

    events = json.loads(files[2].read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert set(names.values()) == {case.name for case in CASES}
    spans = [event for event in events if event["ph"] == "X"]
    assert all(span["ts"] >= 0 and span["dur"] >= 0 for span in spans)
    for pid, name in names.items():
        mine = [span for span in spans if span["pid"] == pid]
        layers = [span for span in mine if span["cat"] == "compute"]
        (whole,) = (span for span in mine if span["cat"] == "turn")
        assert len(layers) == SMALL.layers * (3 if name == "recompute" else 1)
        assert whole["ts"] <= layers[0]["ts"]
        end = whole["ts"] + whole["dur"]
        assert layers[-1]["ts"] + layers[-1]["dur"] == pytest.approx(end, abs=0.01)
        # µs against the result's ms of the same turn.
        parts = sum(whole["args"][f"{part}_ms"] for part in PARTS)
        assert whole["dur"] == pytest.approx(1e3 * parts, abs=0.1)
        assert any(span["name"] == "transfer" for span in mine) == (name != "recompute")


def test_wrong_output_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr(reload.torch, "allclose", lambda *_, **__: False)
    assert main(DRY) == 1
    assert "wrong output in: layer-wise, layer-wise, busy, on path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--history-tokens", "100"], "--history-tokens must be a positive multiple of 16, got"),
        (["--new-tokens", "0"], "--new-tokens must be a positive multiple of 16"),
        (["--other-tokens", "-16"], "--other-tokens"),
        (["--chunk-tokens", "8"], "--chunk-tokens"),
        (["--layers", "0"], "--layers and --repeats must be 1 or more"),
        (["--repeats", "0"], "--layers and --repeats must be 1 or more"),
        (["--link-gbps", "-1"], "--link-gbps must be positive"),
        (["--link-gbps", "0"], "--link-gbps must be positive"),
        (["--table", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_gets_one_clear_line(extra, message, capsys):
    assert main([*DRY, *extra]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("liveserve bench reload: ")
    assert message in lines[0]


def test_traces_are_in_microseconds_from_the_first_span_on(tmp_path):
    trace = Trace()
    trace.span("a", "load", "second", 100.002, 100.0025, bytes=7)
    trace.span("a", "compute", "first", 100.0, 100.001)
    trace.span("b", "load", "third", 100.0, 100.0)
    path = tmp_path / "new" / "trace.json"
    trace.write(path)
    spans = [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    times = {span["name"]: (span["ts"], span["dur"]) for span in spans}
    assert times == {"second": (2000.0, 500.0), "first": (0.0, 1000.0), "third": (0.0, 0.0)}
    assert spans[0]["args"] == {"bytes": 7}
    assert spans[0]["pid"] == spans[1]["pid"] != spans[2]["pid"]
    assert len({span["tid"] for span in spans}) == 3
    with pytest.raises(ValueError, match="ends before it starts"):
        trace.span("a", "load", "back", 2.0, 1.0)
    assert Trace().events() == []


def test_the_paged_model_takes_whole_blocks_only():
    cache = [torch.zeros(2, 4, 16, SMALL.kv_heads, SMALL.head_dim) for _ in range(SMALL.layers)]
    model = PagedModel(SMALL, cache, device="cpu", dtype=torch.float32)
    with pytest.raises(ValueError, match="multiples of 16"):
        model.prefill(torch.zeros(20, SMALL.hidden), torch.arange(4), start=0, chunk=16)


def test_the_paged_model_depends_on_its_history_and_writes_its_own_blocks():
    torch.manual_seed(0)
    cache = [torch.zeros(2, 4, 16, SMALL.kv_heads, SMALL.head_dim) for _ in range(SMALL.layers)]
    model = PagedModel(SMALL, cache, device="cpu", dtype=torch.float32)
    blocks, x = torch.tensor([2, 0]), torch.randn(32, SMALL.hidden)
    first = model.prefill(x, blocks, start=0, chunk=16)
    assert all(layer[:, [2, 0]].any() and not layer[:, [1, 3]].any() for layer in cache)
    again = model.prefill(x[16:], blocks, start=16, chunk=16)
    assert torch.equal(first, again)
    cache[0][:, 2] += 1
    assert not torch.allclose(first, model.prefill(x[16:], blocks, start=16, chunk=16))


def test_a_decode_step_is_finite():
    loop = DecodeLoop(SMALL, batch=2, context=32, device="cpu", dtype=torch.float32)
    assert loop._step().isfinite().all()
