"""Backends: a placed graph becomes what an executor runs."""

from __future__ import annotations

from .emission import StoredTensor
from .onnx_backend import EMITTERS, emit_onnx, state_names

__all__ = ["EMITTERS", "StoredTensor", "emit_onnx", "state_names"]
