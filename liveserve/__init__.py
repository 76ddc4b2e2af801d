"""LiveServe: interaction-aware serving for real-time omni-modal models."""

from liveserve.version import __version__

__all__ = ["__version__"]
