"""The result file: complete, checked, written whole."""

import copy
import json
from pathlib import Path

import pytest

from liveserve.bench.result_file import build_result, validate_result, write_result

CASES = [{"params": {"slow_motion": 4}, "metrics": {"ttfp_p90_s": 0.5, "rtf_p50": None}}]
RATIOS = {"ttfp_p90_speedup": {"value": 1.5, "low": 1.4, "high": 1.7, "better": "higher"}}


@pytest.fixture
def result() -> dict:
    return build_result("sessions", CASES, command="liveserve bench sessions", ratios=RATIOS)


def test_round_trip(result: dict, tmp_path: Path) -> None:
    path = tmp_path / "new" / "sessions.json"
    write_result(path, result)
    assert json.loads(path.read_text()) == result
    assert [p.name for p in path.parent.iterdir()] == ["sessions.json"]


def test_says_where_and_on_what(result: dict) -> None:
    assert result["schema"] == 1
    assert result["machine"]["cores"] >= 1
    assert result["machine"]["cpu"]
    assert result["when"].endswith("Z")
    assert {"vllm", "vllm_omni", "torch", "triton"} <= result["versions"].keys()
    assert result["simulated"] is False
    assert (result["git"] is None) == (result["dirty"] is None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("machine"), "machine is missing"),
        (lambda r: r.update(schema=2), "schema is 2"),
        (lambda r: r.update(dirty="no"), "dirty has the wrong type str"),
        (lambda r: r["cases"].append({"params": {}}), r"cases\[1\] needs params and metrics"),
        (lambda r: r["ratios"].update(x={"value": 1}), "ratios.x needs value, low"),
        (lambda r: r["ratios"]["ttfp_p90_speedup"].update(better="up"), "'higher' or 'lower'"),
        (
            lambda r: r["cases"][0]["metrics"].update(ttfp_p90_s=float("nan")),
            r"cases\[0\].metrics.ttfp_p90_s: not a finite number",
        ),
    ],
)
def test_wrong_results_are_refused(result: dict, tmp_path: Path, change, message: str) -> None:
    broken = copy.deepcopy(result)
    change(broken)
    with pytest.raises(ValueError, match=message):
        validate_result(broken)
    with pytest.raises(ValueError, match=message):
        write_result(tmp_path / "r.json", broken)
    assert list(tmp_path.iterdir()) == []
