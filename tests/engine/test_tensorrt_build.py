"""Serialized TensorRT engines from a machine without a GPU, by TensorRT's own builder."""

from __future__ import annotations

from pathlib import Path

import pytest
from spikeinfer.compiler.backends.tensorrt import Target, build_engine, plan_network
from spikeinfer.errors import SpikeError

from ..numeric.tensorrt.tiny_model import CAPACITY, constants, graph

pytest.importorskip("tensorrt_rtx")
