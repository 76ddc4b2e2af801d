"""All copy methods, by name."""

from __future__ import annotations

from liveserve.kernels.base import CopyMethod
from liveserve.kernels.batch_copy import BatchCopy
from liveserve.kernels.raw_copy import RawCopy
from liveserve.kernels.reference import ReferenceCopy
from liveserve.kernels.staged_copy import StagedCopy
from liveserve.kernels.triton_copy import TritonCopy


def all_methods() -> dict[str, CopyMethod]:
    """A new object of each method, whether or not this machine can run it. Among equally fast ones
    the earlier is better: it takes fewer SMs, or less memory."""
    methods: list[CopyMethod] = [
        BatchCopy(),
        BatchCopy(batched=False),
        StagedCopy(),
        RawCopy(),
        TritonCopy(),
        ReferenceCopy(),
    ]
    return {method.name: method for method in methods}


def available_methods() -> dict[str, CopyMethod]:
    """Those that this machine can run; ``reference`` always is among them."""
    return {name: method for name, method in all_methods().items() if method.available()}
