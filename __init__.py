"""A Hugging Face checkpoint in, a small streaming engine out, proven equal to its source."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import ExitCode, SpikeError

if TYPE_CHECKING:
    from .runtime import Completion, EnginePool, SamplingParams, SpikeEngine

__all__ = ["Completion", "EnginePool", "ExitCode", "SamplingParams", "SpikeEngine", "SpikeError"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """The runtime's names, imported when first asked for: building needs no onnxruntime session."""
    if name in ("Completion", "EnginePool", "SamplingParams", "SpikeEngine"):
        from . import runtime

        return getattr(runtime, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
