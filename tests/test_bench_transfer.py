"""`bench transfer`, `bench calibrate` and device.sh, on a CPU."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from liveserve.bench import device_summary, terminal, transfer
from liveserve.bench.transfer import ENGINE, LIMIT, Plan, counts_for, ratios_of, table_of
from liveserve.bench.transfer_lanes import (
    Arena,
    ContiguousCopy,
    CopyLane,
    EngineLane,
    EventMark,
    FragmentCopy,
    HostMark,
    Runner,
    run_together,
)
from liveserve.cli import main
from liveserve.kernels.base import Direction
from liveserve.kernels.calibrate import BUILT_IN, KIB, MIB, Rate, Table
from liveserve.kernels.reference import ReferenceCopy

LOAD, STORE = Direction
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def arena():
    made = Arena("cpu", MIB)
    yield made
    made.close()


class Lazy(ReferenceCopy):
    """Leaves out the last block."""

    def copy(self, direction, cache, pool, block_ids, slot_ids, layers=None, stream=None):
        super().copy(direction, cache, pool, block_ids[:-1], slot_ids[:-1], layers, stream)


class Careless(ReferenceCopy):
    """Copies another block as well."""

    def copy(self, direction, cache, pool, block_ids, slot_ids, layers=None, stream=None):
        super().copy(direction, cache, pool, block_ids, slot_ids, layers, stream)
        unused = (set(range(cache.num_blocks)) - set(block_ids.tolist())).pop()
        spare = (set(range(len(pool))) - set(slot_ids.tolist())).pop()
        super().copy(direction, cache, pool, [unused], [spare], layers, stream)


class Spoiling(ReferenceCopy):
    """Writes to what it reads."""

    def copy(self, direction, cache, pool, block_ids, slot_ids, layers=None, stream=None):
        super().copy(direction, cache, pool, block_ids, slot_ids, layers, stream)
        read = pool if direction is LOAD else cache.layers[0][0].view
        read[0, 0] += 1


def memmove(target: int, source: int, nbytes: int, stream: int) -> int:
    ctypes.memmove(target, source, nbytes)
    return 0


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("method", [ReferenceCopy(), FragmentCopy(memmove)])
def test_the_check_accepts_methods_that_copy_right(arena, method, direction):
    case = arena.case(4 * KIB, 96)
    assert (case.count, case.nbytes) == (96, 96 * 4 * KIB)
    case.check(method.name, direction, CopyLane(case, direction, method, 1).copy)


@pytest.mark.parametrize("direction", Direction)
def test_the_check_accepts_the_engine_and_the_limit(arena, direction):
    case = arena.case(4 * KIB, 96)
    lane = EngineLane(case, direction, 1, table=BUILT_IN)
    case.check(ENGINE, direction, lane.copy)
    lane.close()
    whole = arena.case(MIB, 1)
    lane = CopyLane(whole, direction, ContiguousCopy(), 1)
    whole.check(LIMIT, direction, lane.copy)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("method", [Lazy(), Careless(), Spoiling()], ids=lambda m: type(m).__name__)
def test_the_check_finds_methods_that_copy_wrong(arena, method, direction):
    case = arena.case(4 * KIB, 96)
    with pytest.raises(RuntimeError, match=r"reference (wrote wrong bytes|changed what it read)"):
        case.check(method.name, direction, CopyLane(case, direction, method, 1).copy)


def test_a_driver_that_refuses_is_an_error(arena):
    case = arena.case(64, 2)
    with pytest.raises(RuntimeError, match="error 700"):
        CopyLane(case, LOAD, FragmentCopy(lambda *_: 700), 1).copy(0)


def test_the_two_sets_of_a_case_share_nothing(arena):
    case = arena.case(4 * KIB, 96)
    for side, size in ((0, case.stored.shape[1]), (1, len(case.pool))):
        both = [*case.sets[0][side].tolist(), *case.sets[1][side].tolist()]
        assert sorted(both) == list(range(size))


def test_fragments_must_be_aligned(arena):
    with pytest.raises(ValueError, match="multiples of 16"):
        arena.case(100, 4)


class Steps(Runner):
    """Counts what is under way; a step may fail."""

    def __init__(self, minimum: int, ahead: int = 2, fail_at: int | None = None) -> None:
        super().__init__(minimum, ahead)
        self.issued = self.waited = self.most = 0
        self.fail_at = fail_at

    def issue(self) -> None:
        self.issued += 1
        if self.issued == self.fail_at:
            raise RuntimeError("broken step")
        self.most = max(self.most, self.issued - self.waited)

    def mark(self) -> HostMark:
        runner = self

        class Mark(HostMark):
            def wait(self) -> None:
                runner.waited += 1

        return Mark()


def test_runners_keep_a_bounded_number_under_way_and_wait_for_all():
    runner = Steps(10)
    run_together([runner])
    assert runner.most == 2
    assert runner.waited == runner.issued == len(runner.times_s) + 1
    assert len(runner.times_s) >= 10


def test_runners_go_on_until_each_has_enough():
    few, many = Steps(2), Steps(500)
    run_together([few, many])
    assert len(many.times_s) >= 500
    assert few.enough
    assert few.waited == few.issued


@pytest.mark.parametrize("fail_at", [1, 5])
def test_a_runner_that_fails_ends_the_others(fail_at):
    before = threading.active_count()
    with pytest.raises(RuntimeError, match="broken step"):
        run_together([Steps(3), Steps(10**9, fail_at=fail_at)])
    assert threading.active_count() == before


def test_event_marks_give_seconds(monkeypatch):
    class Event:
        made = 0

        def __init__(self, enable_timing, blocking):
            assert enable_timing
            assert blocking, "an event that spins would hold a core"
            Event.made += 1
            self.at_ms = 10.0 * Event.made

        def record(self, stream):
            assert stream == "stream"

        def synchronize(self):
            pass

        def elapsed_time(self, later):
            return later.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    first, second = EventMark("stream"), EventMark("stream")
    second.wait()
    assert second.since(first) == pytest.approx(0.01)


def test_counts_fit_and_are_whole_blocks():
    assert counts_for(4 * KIB, (48, 480, 4800), 128 * MIB) == [48, 480, 4800]
    assert counts_for(2 * MIB, (48, 480, 4800), 128 * MIB) == [48]
    assert counts_for(2 * MIB, (48, 480), 4 * MIB) == [2]
    assert counts_for(KIB, (100,), MIB) == [96]


def made(method, size, gbps, *, traffic="load", compute="idle", count=96, **metrics):
    params = dict(zip(Plan.__slots__, (method, traffic, compute, size, count), strict=True))
    figures = {
        "bandwidth_gbps": gbps,
        "bandwidth_low_gbps": gbps * 0.9,
        "bandwidth_high_gbps": gbps * 1.1,
        "sms": 12 if method == "triton" else 0,
    }
    if method != LIMIT:
        figures["link_fraction"] = gbps / 50.0
    return {"params": params, "metrics": figures | metrics}


CASES = [
    made(LIMIT, 128 * MIB, 50.0, count=1),
    made("batch", 16 * KIB, 6.0),
    made("triton", 16 * KIB, 40.0),
    made("triton", 16 * KIB, 45.0, count=960),
    made("batch", 16 * KIB, 6.0, count=960),
    made("batch", 2 * MIB, 47.0),
    made("triton", 2 * MIB, 48.0),
    made("cudaMemcpyAsync", 16 * KIB, 49.0, count=960),
    made(ENGINE, 16 * KIB, 35.0, count=960),
    made("triton", 16 * KIB, 44.0, compute="decode", count=960, decode_slowdown=0.02),
    made("batch", 16 * KIB, 5.0, compute="decode", count=960, decode_slowdown=0.5),
    made("triton", 16 * KIB, 40.0, traffic="both", compute="decode", count=960,
         decode_slowdown=0.03),
]  # fmt: skip


def test_ratios_are_of_the_chosen_method_at_the_largest_count_worst_first():
    found = ratios_of(CASES)
    fraction = found["link_fraction_min"]
    assert fraction["value"] == pytest.approx(45 / 50)
    assert (fraction["low"], fraction["high"]) == pytest.approx((0.81, 0.99))
    assert found["decode_slowdown"]["value"] == 0.03
    assert found["decode_slowdown"]["better"] == "lower"
    assert found["kernel_sms_max"]["value"] == 12
    assert found["engine_link_fraction_min"]["value"] == pytest.approx(35 / 50)
    assert "engine_decode_slowdown" not in found


def test_ratios_follow_the_table_that_is_given():
    bad = Table([Rate("batch", LOAD, 16 * KIB, 1, 99.0), Rate("triton", LOAD, 16 * KIB, 1, 1.0)])
    found = ratios_of(CASES, bad)
    assert found["link_fraction_min"]["value"] == pytest.approx(6 / 50)
    assert found["decode_slowdown"]["value"] == 0.5
    # The built-in table knows better.
    assert found["built_in_link_fraction_min"]["value"] == pytest.approx(45 / 50)


def test_cases_that_failed_count_for_nothing():
    broken = made("triton", 4 * KIB, 1.0)
    broken["metrics"] = {"error": "wrong bytes"}
    assert ratios_of([*CASES, broken]) == ratios_of(CASES)
    assert ratios_of([]) == {}
    columns, rows = table_of([*CASES, broken], "load", "idle")
    assert columns == ["fragment", "count", "batch", "triton", "cudaMemcpyAsync", ENGINE]
    assert rows == [
        ["4 KiB", "96", "-", "failed", "-", "-"],
        ["16 KiB", "960", "6.0", "45.0", "49.0", "35.0"],
        ["2 MiB", "96", "47.0", "48.0", "-", "-"],
        [LIMIT, "1", "50.0", "", "", ""],
    ]
    assert table_of(CASES, "load", "decode")[1] == [["16 KiB", "960", "44.0 +2%", "5.0 +50%"]]


SMALL = ["--dry-run", "--sizes", "4096", "65536", "--max-mib", "1", "--repeats", "2"]


def test_dry_run(tmp_path, capsys):
    file, plot = tmp_path / "new" / "t.json", tmp_path / "t.png"
    command = ["bench", "transfer", *SMALL, "--refcheck", "--json", str(file), "--plot", str(plot)]
    assert main(command) == 0
    result = json.loads(file.read_text())
    assert (result["simulated"], result["preset"]) == (True, "dry-run")
    assert result["machine"]["nvml"] is None
    seen = {tuple(case["params"].values()) for case in result["cases"]}
    for compute in ("idle", "decode"):
        for traffic in ("load", "store", "both"):
            assert (LIMIT, traffic, compute, MIB, 1) in seen
            for method in ("reference", ENGINE):
                for size, count in ((4 * KIB, 48), (64 * KIB, 16)):
                    assert (method, traffic, compute, size, count) in seen
    for case in result["cases"]:
        p, m = case["params"], case["metrics"]
        assert 0 < m["bandwidth_low_gbps"] <= m["bandwidth_gbps"] <= m["bandwidth_high_gbps"]
        assert m["checked"] == (p["method"] != LIMIT and p["compute"] == "idle")
        assert ("decode_slowdown" in m) == (p["compute"] == "decode")
        assert ("link_fraction" in m) == (p["method"] != LIMIT)
        if p["traffic"] == "both":
            assert m["load_gbps"] + m["store_gbps"] == pytest.approx(m["bandwidth_gbps"])
    assert {"link_fraction_min", "decode_slowdown", "engine_link_fraction_min"} <= set(
        result["ratios"]
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "not a GPU's figures" in capsys.readouterr().out


def test_the_engine_of_a_dry_run_is_as_slow_as_asked():
    bench = transfer.TransferBench.from_arguments(
        arguments(["--methods", ENGINE, "--traffic", "load", "--compute", "idle",
                   "--sizes", "65536", "--link-gbps", "0.1"])
    )  # fmt: skip
    bench.run()
    case = bench.cases[-1]
    assert case["params"]["method"] == ENGINE
    assert case["metrics"]["bandwidth_gbps"] < 0.13


def arguments(extra: list[str]):
    import argparse

    parser = argparse.ArgumentParser()
    transfer.add_arguments(parser)
    return parser.parse_args([*SMALL, *extra])


def test_a_method_that_fails_is_reported_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    def methods():
        return {"reference": Lazy(), LIMIT: ContiguousCopy()}

    monkeypatch.setattr(transfer, "copy_methods", methods)
    file = tmp_path / "t.json"
    command = ["bench", "transfer", *SMALL, "--compute", "idle", "--traffic", "load"]
    assert main([*command, "--refcheck", "--json", str(file)]) == 1
    cases = json.loads(file.read_text())["cases"]
    for case in cases:
        failed = case["params"]["method"] == "reference"
        assert ("wrote wrong bytes" in case["metrics"].get("error", "")) == failed
    assert "failed: reference, load, idle" in capsys.readouterr().err


def test_cases_beyond_the_budget_are_counted(tmp_path, capsys):
    file = tmp_path / "t.json"
    assert main(["bench", "transfer", *SMALL, "--budget-s", "1e-9", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["cases"] == []
    assert result["cases_skipped"] > 10
    assert "--budget-s is over" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--sizes", "100"], "multiples of 16 bytes and at most --max-mib, got 100"),
        (["--sizes", "2097152"], "at most --max-mib, got 2097152"),
        (["--sizes", "-16"], "--sizes must be positive, got -16"),
        (["--counts", "0"], "--counts must be positive, got 0"),
        (["--repeats", "0"], "--repeats must be positive, got 0"),
        (["--max-mib", "-1"], "--max-mib must be positive"),
        (["--link-gbps", "0"], "--link-gbps must be positive"),
        (["--budget-s", "nan"], "--budget-s must be positive"),
        (["--table", "missing.json"], "missing.json"),
        (["--max-mib", "100000000"], "--max-mib"),
    ],
)
def test_bad_input_gets_one_clear_line(extra, message, capsys):
    assert main(["bench", "transfer", *SMALL, *extra]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("liveserve bench transfer: ")
    assert message in lines[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_methods_that_cannot_run_here_are_refused(capsys):
    assert main(["bench", "transfer", *SMALL, "--methods", "triton", "reference"]) == 2
    assert "not available on this machine: triton" in capsys.readouterr().err


def test_calibrate_writes_a_table_of_both_directions(tmp_path):
    file = tmp_path / "new" / "table.json"
    assert main(["bench", "calibrate", str(file), "--dry-run", "--repeats", "1"]) == 0
    table = Table.load(file)
    assert {rate.direction for rate in table.rates} == set(Direction)
    assert "not a GPU's figures" in table.machine
    assert main(["bench", "calibrate", str(file), "--dry-run", "--repeats", "0"]) == 2


def test_tables_and_progress_without_rich(monkeypatch, capsys):
    for name in ("rich", "rich.console", "rich.table", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    terminal.print_table("title", ["a", "long name"], [["first", "1"], ["2nd", "22"]])
    with terminal.progress("copies", 20) as advance:
        for number in range(20):
            advance(f"case {number}")
    out, err = capsys.readouterr()
    assert out.splitlines() == ["title", "a      long name", "first          1", "2nd           22"]
    assert len(err.splitlines()) == 10
    assert err.splitlines()[-1] == "copies: 20/20, case 19"


def test_without_matplotlib_there_is_no_plot(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert transfer.save_plot(tmp_path / "t.png", CASES, "a GPU") is False
    assert list(tmp_path.iterdir()) == []
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_the_gpu_benches_import_little_but_torch():
    code = (
        "import sys\n"
        "for name in ('rich', 'matplotlib', 'msgspec', 'prometheus_client', 'aiohttp', 'vllm',"
        " 'triton', 'cupy', 'pynvml', 'hypothesis'): sys.modules[name] = None\n"
        "import liveserve.cli, liveserve.bench.transfer, liveserve.bench.reload\n"
        "import liveserve.bench.calibrate, liveserve.bench.device_summary"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# device.sh: first with a Python that does nothing, then for real.

FAKE_PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in
    *device_summary*) exec "$REAL_PYTHON" "$@" ;;
    *"bench $BROKEN"*) echo "went wrong"; exit 3 ;;
esac
"""
FAKE_SANITIZER = """#!/bin/sh
echo "$SANITIZER_SAYS"
exit 1
"""


def device_sh(out: Path, *flags: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "bench" / "device.sh"), str(out), *flags]
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, check=False, cwd=out.parent
    )


def faked(tmp_path: Path, *flags: str, **env: str) -> SimpleNamespace:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("python", FAKE_PYTHON), ("compute-sanitizer", FAKE_SANITIZER)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    out = tmp_path / "a folder"
    settings = {
        "PYTHON": str(tools / "python"),
        "REAL_PYTHON": sys.executable,
        "CALLS": str(tmp_path / "calls"),
        "PATH": f"{tools}:{os.environ['PATH']}",
        "BROKEN": "nothing",
        "SANITIZER_SAYS": "Device not supported",
    }
    done = device_sh(out, *flags, **settings | env)
    summary = json.loads((out / "summary.json").read_text())
    calls = (tmp_path / "calls").read_text().splitlines()
    return SimpleNamespace(done=done, calls=calls, steps=summary["steps"])


def test_device_sh_runs_every_step_and_skips_a_checker_that_cannot_run(tmp_path):
    run = faked(tmp_path)
    assert run.done.returncode == 0, run.done.stdout + run.done.stderr
    assert list(run.steps) == [
        "kernels", "memcheck", "calibrate", "transfer", "interference", "reload"
    ]  # fmt: skip
    status = {name: step["status"] for name, step in run.steps.items()}
    assert status.pop("memcheck") == "skipped"
    assert set(status.values()) == {"ok"}
    assert not any("--dry-run" in call for call in run.calls)


def test_device_sh_goes_on_after_a_step_that_fails(tmp_path):
    run = faked(tmp_path, BROKEN="calibrate", SANITIZER_SAYS="1 error")
    assert run.done.returncode == 1
    status = {name: step["status"] for name, step in run.steps.items()}
    assert status["memcheck"] == status["calibrate"] == "failed"
    assert status["transfer"] == status["reload"] == "ok"
    assert "went wrong" in run.done.stdout
    assert run.steps["calibrate"]["note"] == "exit status 3, see calibrate.log"


@pytest.mark.parametrize("flags", [[], ["--wrong"], ["second"]])
def test_device_sh_explains_itself(tmp_path, flags):
    command = ["bash", str(ROOT / "bench" / "device.sh"), *flags, *(["one"] if flags else [])]
    if flags == ["second"]:
        command.append("third")
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 2
    assert "usage: bench/device.sh OUT_DIR [--dry-run]" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_device_sh_dry_run(tmp_path):
    out = tmp_path / "out"
    done = device_sh(out, "--dry-run", PYTHON=sys.executable)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert {step["status"] for step in summary["steps"].values()} == {"ok"}
    assert len(summary["steps"]) == 6
    assert summary["steps"]["memcheck"]["note"] == "without compute-sanitizer"
    assert summary["targets"] == {}
    assert "none of its figures is a GPU figure" in done.stdout
    for name in ("transfer", "interference", "reload"):
        result = json.loads((out / f"{name}.json").read_text())
        assert result["simulated"] is True
        assert result["ratios"]
        assert (out / f"{name}.png").exists()
    assert json.loads((out / "reload.trace.json").read_text())["traceEvents"]
    assert Table.load(out / "calibration.json").rates


def test_the_summary_holds_figures_against_targets(tmp_path, capsys):
    (tmp_path / "steps.tsv").write_text("transfer\tok\t90\t\nreload\tfailed\t3\twent wrong\n")
    result = {
        "machine": {"gpu": "NVIDIA H200"},
        "simulated": False,
        "cases_skipped": 4,
        "ratios": {
            "link_fraction_min": {"value": 0.93},
            "decode_slowdown": {"value": 0.08},
            "built_in_link_fraction_min": {"value": 0.5},
        },
    }
    (tmp_path / "transfer.json").write_text(json.dumps(result))
    assert device_summary.main([str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["gpu"] == "NVIDIA H200"
    assert summary["steps"]["reload"] == {"status": "failed", "seconds": 3, "note": "went wrong"}
    met = {name: target["met"] for name, target in summary["targets"].items()}
    assert met == {"transfer.link_fraction_min": True, "transfer.decode_slowdown": False}
    out = capsys.readouterr().out
    assert "transfer.decode_slowdown = 0.080  target 0.03: missed" in out
    assert "4 cases not measured" in out
    assert device_summary.main([str(tmp_path / "none")]) == 1
