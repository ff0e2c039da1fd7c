"""TensorRT engines built on a machine without a GPU: seconds, peak memory and size of each build.

    python benchmarks/tensorrt_build.py                     # small shapes and the cached models
    python benchmarks/tensorrt_build.py qwen2.5-0.5b --sm sm89

A model is a checkpoint directory, or the name of a shape with random weights. A build is traced,
placed, planned, emitted, checked against its graph and serialized in a process of its own, for each
architecture and for f16 and int4 (symmetric blocks of 32; embedding and head stay f16).
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from spikeinfer.compiler.assembly.pipeline import NOT_FOR_TENSORRT
from spikeinfer.compiler.backends.tensorrt import (
    INT4_BLOCK,
    INT4_FORMAT,
    Int4Matrix,
    Target,
    build_engine,
    memory_report,
    plan_network,
)
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.frontend.import_model import import_model
from spikeinfer.compiler.frontend.lower import lower
from spikeinfer.compiler.frontend.trace import trace
from spikeinfer.compiler.ir import Constant, Graph, constant_tensor
from spikeinfer.passes.assign_precision import AssignPrecision
from spikeinfer.passes.assign_storage import AssignStorage
from spikeinfer.passes.base import Pass
from spikeinfer.passes.manager import Phase, run_pipeline
from spikeinfer.passes.pipeline import configure, default_pipeline
from transformers import AutoConfig, AutoModelForCausalLM

MODELS = Path(".cache/models")
SMALL = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"model_type": "qwen3", **SMALL},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 64},
    "phi3": {"model_type": "phi3", **SMALL, "sliding_window": 64},
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}  # fmt: skip
CHECKPOINTS = ("SmolLM2-135M-Instruct", "gemma-3-270m")
ARCHITECTURES = ("sm86", "sm89", "sm120")
Parameters = Callable[[str], torch.Tensor]


@dataclass(frozen=True)
class Row:
    """One build. Seconds: trace and passes; plan, network and check; TensorRT's builder."""

    model: str
    weights: str
    sm: str
    graph: float
    network: float
    engine: float
    peak: int
    size: int
    planned: int

    @property
    def total(self) -> float:
        """Seconds of the whole build."""
        return self.graph + self.network + self.engine


def random_parameters(shapes: Mapping[str, tuple[int, ...]]) -> Parameters:
    """Weights by name: pieces of one random buffer; vectors are near 1, as norms are."""
    spread = 4096
    longest = max(int(np.prod(shape)) for shape in shapes.values())
    buffer = torch.randn(longest + spread, generator=torch.Generator().manual_seed(0)) * 0.02

    def parameter(name: str) -> torch.Tensor:
        shape = shapes[name]
        start = zlib.crc32(name.encode()) % spread
        piece = buffer[start : start + int(np.prod(shape))].reshape(shape)
        return piece + 1.0 if len(shape) == 1 else piece

    return parameter


def traced(model: str, longest: int) -> tuple[Graph, Parameters]:
    """The traced graph of a shape or a checkpoint, and its weights."""
    if model not in SHAPES:
        path = MODELS / model if (MODELS / model).exists() else Path(model)
        checkpoint = Checkpoint.open(path)
        return import_model(checkpoint, max_positions=longest), checkpoint.load
    config = dict(SHAPES[model])
    kind = config.pop("model_type")
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **config), attn_implementation="eager", dtype=torch.float32
        ).eval()
    graph = lower(trace(meta, max_positions=longest), str, kind)
    return graph, random_parameters({n: tuple(t.shape) for n, t in meta.state_dict().items()})


def placed(graph: Graph, parameters: Parameters, weights: str, longest: int) -> None:
    """Runs the passes of this backend, in place."""

    def policy(matrices: Sequence[Constant]) -> dict[str, str]:
        return {
            c.name: INT4_FORMAT if weights == "int4" and _blocks(c) else "f16" for c in matrices
        }

    def with_options(step: Pass) -> Pass:
        if isinstance(step, AssignStorage):
            return replace(step, policy=policy, kv_format="f16")
        if isinstance(step, AssignPrecision):
            return replace(
                step, dtype="float16", parameters=parameters, longest=longest, round_outputs=True
            )
        return step

    phases = configure(default_pipeline(), without=NOT_FOR_TENSORRT)
    run_pipeline(graph, [Phase(p.name, tuple(map(with_options, p.passes))) for p in phases])


def _blocks(const: Constant) -> bool:
    rows = const.shape[-1]
    fits = isinstance(rows, int) and rows % INT4_BLOCK == 0
    return fits and const.role not in ("token_embd", "output")


def nearest_blocks(matrix: npt.NDArray[np.float32]) -> Int4Matrix:
    """Every value to the nearest of its block's 15."""
    n, k = matrix.shape
    parts = matrix.reshape(n, k // INT4_BLOCK, INT4_BLOCK)
    largest = np.abs(parts).max(-1)
    scales = np.maximum(largest / 7, 1e-6).astype(np.float16)
    flat = np.rint(parts / scales[..., None].astype(np.float32)).clip(-7, 7).astype(np.int8)
    nibbles = flat.reshape(n, k).view(np.uint8) & 15
    return Int4Matrix(nibbles[:, 0::2] | nibbles[:, 1::2] << 4, scales)


def build(model: str, weights: str, sm: str, longest: int, batch: int, chunk: int) -> Row:
    """One build, in this process."""
    began = time.perf_counter()
    graph, parameters = traced(model, longest)
    placed(graph, parameters, weights, longest)
    quantised: dict[str, Int4Matrix] = {}

    def constants(name: str) -> Any:
        const = graph.constants[name]
        if name not in quantised:
            values = constant_tensor(const, parameters).numpy()
            if const.format != INT4_FORMAT:
                return values
            quantised[name] = nearest_blocks(values)
        return quantised[name]

    target = Target(
        tuple(sm.split(",")), capacity=longest, max_batch_size=batch, max_num_tokens=chunk
    )
    times = {"plan": time.perf_counter()}
    plan = plan_network(graph, target)
    engine = build_engine(
        graph, plan, constants, target, lambda step: times.update({step: time.perf_counter()})
    )
    ended = time.perf_counter()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return Row(
        model, weights, sm, times["plan"] - began, times["engine"] - times["plan"],
        ended - times["engine"], peak, len(engine.data), memory_report(plan).weights,
    )  # fmt: skip


def main() -> None:
    """Prints one line per build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = [m for m in CHECKPOINTS if (MODELS / m).exists()]
    parser.add_argument("models", nargs="*", default=[*SHAPES, *here])
    parser.add_argument("--sm", action="append", help="one, or several for one engine: sm86,sm89")
    parser.add_argument("--weights", action="append", choices=("f16", "int4"))
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--max-batch-size", type=int, default=8)
    parser.add_argument("--max-num-tokens", type=int, default=256)
    options = parser.parse_args()
    sizes = (options.max_seq_len, options.max_batch_size, options.max_num_tokens)
    print(f"{'model':24}{'weights':8}{'sm':18}{'graph s':>8}{'check s':>8}{'build s':>8}"
          f"{'all s':>7}{'peak MB':>9}{'engine MB':>10}{'planned MB':>11}")  # fmt: skip
    for model in options.models:
        for weights in options.weights or ("f16", "int4"):
            for sm in options.sm or ARCHITECTURES:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = pool.apply(build, (model, weights, sm, *sizes))
                print(f"{row.model:24}{row.weights:8}{row.sm:18}{row.graph:8.1f}{row.network:8.1f}"
                      f"{row.engine:8.1f}{row.total:7.1f}{row.peak / 1e6:9.0f}"
                      f"{row.size / 1e6:10.1f}{row.planned / 1e6:11.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
