"""SpikeInfer: a Hugging Face checkpoint in, a small streaming engine out, proven equal to its source."""

from __future__ import annotations

from .errors import ExitCode, SpikeError

__all__ = ["ExitCode", "SpikeError"]
__version__ = "0.1.0"
