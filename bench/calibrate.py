"""``liveserve bench calibrate``: this machine's table of copy methods, for the chooser.

``kernels/calibrate.py`` measures; what is written is what ``Table.load`` reads.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from liveserve.bench.terminal import progress
from liveserve.bench.transfer import CPU, DRY_RUN_NOTE, add_device_arguments, bench_device
from liveserve.kernels.calibrate import MIB, Rate, Table, default_cases, measure
from liveserve.kernels.methods import available_methods

_MAX_BYTES = 512 * MIB


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("table", type=Path, metavar="FILE", help="table to write (JSON)")
    parser.add_argument("--repeats", type=int, default=5, help="of a copy (%(default)s)")
    add_device_arguments(parser)
    parser.add_argument(
        "--budget-s", type=float, metavar="S", help="start no more cases after so many seconds"
    )


def run(args: argparse.Namespace) -> int:
    if args.repeats < 1:
        print("liveserve bench calibrate: --repeats must be 1 or more", file=sys.stderr)
        return 2
    try:
        device = bench_device(args)
    except ValueError as error:
        print(f"liveserve bench calibrate: {error}", file=sys.stderr)
        return 2
    dry = device == "cpu"
    cases = (
        default_cases(CPU.sizes, CPU.counts, CPU.max_bytes)
        if dry
        else default_cases(max_bytes=_MAX_BYTES)
    )
    # Both directions early, so that a table cut short serves both.
    cases.sort(key=lambda case: (-case[2], case[1], case[0].value))
    deadline_s = None if args.budget_s is None else time.monotonic() + args.budget_s
    rates: list[Rate] = []
    methods, left = available_methods(), len(cases)
    with progress("calibrate", len(cases)) as advance:
        for case in cases:
            if deadline_s is not None and time.monotonic() > deadline_s:
                break
            # The methods stay the same objects: a kernel is compiled once.
            rates += measure(methods, [case], device, repeats=args.repeats)
            left -= 1
            direction, size, count = case
            advance(f"{direction.value}, {count} × {size} B")
    Table(rates, machine=DRY_RUN_NOTE if dry else _machine(device)).save(_made(args.table))
    print(f"{len(rates)} rates of {len(methods)} methods in {args.table}")
    if left:
        print(f"{left} cases not measured: --budget-s is over", file=sys.stderr)
    return 0


def _machine(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
