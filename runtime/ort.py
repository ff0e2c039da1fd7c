"""Opening rank0.engine with ONNX Runtime: options, our kernels, and what its errors mean."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnxruntime as ort

from ..errors import SpikeError

FATAL_ONLY = 4  # of ORT's log levels; its errors are raised, and reported once


def open_session(
    model: Path,
    ops_library: Path | None,
    threads: int,
    spins: bool = True,
    optimise: bool = True,
) -> Any:
    """An `onnxruntime.InferenceSession` over the model.

    Args:
        model: the ONNX file; its external data lies beside it.
        ops_library: shared library with the domain ``spike``; None when the graph has no such ops.
        threads: of the pool that kernels share, the caller's included.
        spins: whether threads go on looking for work a while after a run; the next one begins
            sooner then, but other sessions miss their cores.
        optimise: whether ONNX Runtime looks for something to fuse, which takes time.

    Raises:
        SpikeError: SPK614, ONNX Runtime refused it.
    """
    options = session_options(threads, spins)
    if not optimise:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        if ops_library is not None:
            options.register_custom_ops_library(str(ops_library))
        return ort.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's exceptions share no base class of their own
        raise SpikeError(
            "SPK614",
            "engine",
            f"ONNX Runtime {ort.__version__} can't load {model}: {sentence(error)}",
            "Run `spike verify` on the engine; if it is whole, build it again with this version.",
        ) from error


def sentence(error: Exception) -> str:
    """The words of one of ONNX Runtime's errors, without its prefix, ended by a full stop."""
    words = re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", str(error))
    return f"{' '.join(words.split()).rstrip('.')}."


def session_options(threads: int, spins: bool) -> Any:
    """Options for many short steps of changing shape on a graph that was optimised when built."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = FATAL_ONLY
    # A memory pattern is planned anew for every shape, and steps have many.
    options.enable_mem_pattern = False
    if not spins:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def require_names(session: Any, inputs: set[str], outputs: set[str], model: Path) -> None:
    """Check that the graph has the interface that config.json announces.

    Raises:
        SpikeError: SPK614, naming what differs.
    """
    found_in = {value.name for value in session.get_inputs()}
    found_out = {value.name for value in session.get_outputs()}
    differing = sorted((found_in ^ inputs) | (outputs - found_out))
    if differing:
        raise SpikeError(
            "SPK614",
            "engine",
            f"{model} and its config.json disagree about {', '.join(differing)}.",
            "The directory mixes two engines; build it again.",
        )
