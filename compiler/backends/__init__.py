"""Backends: a placed graph becomes what an executor runs."""

from __future__ import annotations

from .emission import StoredTensor
from .onnx_backend import KERNEL_NAMES, emit_onnx, state_names

__all__ = ["KERNEL_NAMES", "StoredTensor", "emit_onnx", "state_names"]
