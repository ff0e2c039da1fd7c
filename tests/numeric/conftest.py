"""Sessions of one op each, a chain of one link, for the tests of kernels/ops."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, save_model
from onnx.external_data_helper import set_external_data
from spikeinfer.compiler.backends.chains import chain_node
from spikeinfer.kernels import _kernels, best_tier, cpu_features, ops_library

EXACT_MEMORY = bool(os.environ.get("SPIKE_EXACT_MEMORY"))
"""Give weights as memory, not as a mapped file: what lies behind a file's end is not seen to be
read (make test-asan)."""

TIERS = ("scalar", "avx2", "avx512", "avx512_bf16")

OpSession = Callable[..., ort.InferenceSession]

ELEMENT_TYPES = {
    "f32": TensorProto.FLOAT,
    "u8": TensorProto.UINT8,
    "i32": TensorProto.INT32,
    "i64": TensorProto.INT64,
}


@pytest.fixture(scope="session")
def tiers() -> tuple[str, ...]:
    """Those that this CPU has, whatever is in use."""
    best = best_tier(f.name for f in cpu_features() if f.present)
    return TIERS[: TIERS.index(best) + 1]


def _weights(folder: Path, weights: Mapping[str, np.ndarray]) -> list[TensorProto]:
    """External-data initialisers in one file, page aligned as in an engine directory."""
    tensors = []
    with (folder / "rank0.weights").open("wb") as file:
        for name, data in weights.items():
            file.write(b"\0" * (-file.tell() % 4096))
            tensor = TensorProto(
                name=name, data_type=TensorProto.UINT8, dims=data.shape, raw_data=b""
            )
            set_external_data(tensor, "rank0.weights", offset=file.tell(), length=data.nbytes)
            tensor.ClearField("raw_data")
            tensors.append(tensor)
            file.write(data.tobytes())
    return tensors


def _in_exact_memory(
    options: ort.SessionOptions, weights: Mapping[str, np.ndarray]
) -> list[ort.OrtValue]:
    """Weights in memory of their size to the byte; they have to live as long as the session."""
    values = []
    for name, data in weights.items():
        lines = _kernels.cache_lines(data.nbytes)
        lines[:] = data.reshape(-1).view(np.uint8)
        values.append(ort.OrtValue.ortvalue_from_numpy(lines.reshape(data.shape)))
        options.add_initializer(name, values[-1])
    return values


@pytest.fixture
def op_session(tmp_path: Path) -> OpSession:
    """Makes a session that runs one node: op_session(op, {input: type}, {output: type}, ...)."""

    def make(
        op: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, str],
        *,
        weights: Mapping[str, np.ndarray] | None = None,
        order: Sequence[str] | None = None,
        threads: int = 2,
        **attributes: object,
    ) -> ort.InferenceSession:
        names = list(order) if order is not None else [*inputs, *(weights or {})]
        link = helper.make_node(op, names, list(outputs), domain="spike", **attributes)
        node = chain_node([link], list(outputs), f"the_{op}")
        graph = helper.make_graph(
            [node],
            op,
            [helper.make_tensor_value_info(n, ELEMENT_TYPES[t], None) for n, t in inputs.items()],
            [helper.make_tensor_value_info(n, ELEMENT_TYPES[t], None) for n, t in outputs.items()],
            _weights(tmp_path, weights or {}),
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("spike", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        path = tmp_path / "rank0.engine"
        save_model(model, path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 4  # the tests of errors are loud enough
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False  # one malloc per tensor
        kept = _in_exact_memory(options, weights or {}) if EXACT_MEMORY else []
        options.register_custom_ops_library(str(ops_library()))
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        session.kept_for_it = kept
        return session

    return make
