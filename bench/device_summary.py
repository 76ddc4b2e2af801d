"""The last step of ``bench/device.sh``: what ran, and how the figures stand to the targets.

``python -m liveserve.bench.device_summary FOLDER`` reads ``steps.tsv`` and the result files there,
writes ``summary.json`` and prints it. Needs nothing but Python.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = ("transfer.json", "interference.json", "reload.json")
# Ratio → (bound, whether more is better): what is asked of an H200.
TARGETS = {
    "link_fraction_min": (0.90, True),
    "engine_link_fraction_min": (0.90, True),
    "kernel_sms_max": (12, False),
    "decode_slowdown": (0.03, False),
    "engine_decode_slowdown": (0.03, False),
}


def summarize(folder: Path) -> dict[str, Any]:
    """``steps``: name → status (``ok``, ``failed``, ``skipped``), seconds, note; ``ratios``: of all
    result files, by file; ``targets``: whether each is met (none in a dry run); ``gpu``.

    Raises:
        OSError: there is no ``steps.tsv``.
        ValueError: a file is not what it should be.
    """
    steps = {}
    for line in (folder / "steps.tsv").read_text(encoding="utf-8").splitlines():
        name, status, seconds, note = line.split("\t")
        steps[name] = {"status": status, "seconds": int(seconds), "note": note}
    ratios: dict[str, dict[str, float]] = {}
    targets: dict[str, dict[str, Any]] = {}
    gpu = None
    skipped = 0
    for file in RESULTS:
        path = folder / file
        if not path.exists():
            continue
        result = json.loads(path.read_text(encoding="utf-8"))
        gpu = gpu or result["machine"]["gpu"]
        skipped += result.get("cases_skipped", 0)
        bench = path.stem
        ratios[bench] = {name: ratio["value"] for name, ratio in result["ratios"].items()}
        for name, value in ratios[bench].items() if not result["simulated"] else ():
            if name in TARGETS:
                bound, more = TARGETS[name]
                met = value >= bound if more else value <= bound
                targets[f"{bench}.{name}"] = {"value": value, "bound": bound, "met": met}
    return {
        "gpu": gpu,
        "steps": steps,
        "ratios": ratios,
        "targets": targets,
        "cases_skipped": skipped,
    }


def main(arguments: list[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m liveserve.bench.device_summary FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    try:
        summary = summarize(folder)
    except (OSError, ValueError, KeyError) as error:
        print(f"device_summary: {error}", file=sys.stderr)
        return 1
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print(f"\n{summary['gpu'] or 'no GPU: a dry run, none of its figures is a GPU figure'}")
    for name, step in summary["steps"].items():
        note = f"  {step['note']}" if step["note"] else ""
        print(f"  {step['status']:8}{step['seconds']:4} s  {name}{note}")
    for bench, values in summary["ratios"].items():
        for name, value in values.items():
            target = summary["targets"].get(f"{bench}.{name}")
            verdict = ""
            if target is not None:
                verdict = f"  target {target['bound']}: {'met' if target['met'] else 'missed'}"
            print(f"  {bench}.{name} = {value:.3f}{verdict}")
    if summary["cases_skipped"]:
        print(f"  {summary['cases_skipped']} cases not measured for want of time")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
