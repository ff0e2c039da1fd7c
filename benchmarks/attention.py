"""How fast attention is, next to what the machine does in the same moment.

    .venv/bin/python benchmarks/attention.py [--shapes smollm2,gemma3] [--formats f16,int4]
        [--cases decode-1024,prefill-2048] [--rounds 7]

One ONNX Runtime session runs the Attention nodes of all layers (or of as many as --layers allows),
each with a cache of its own, as in a step of an engine. Before each run memory is streamed through
once: no call finds its cache warm, and the rate is the yardstick. Decode: GB/s of keys and values
seen, and its share of the stream's. Prefill: Gop/s, four per query head, element and visible pair
of positions, and the share of the fp32 multiply-add peak measured next to it. `us` is per layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper
from spikeinfer import kernels
from spikeinfer.compiler.backends.chains import chain_node

BLOCK = 32
ASLEEP = 0.05  # until ONNX Runtime's threads no longer spin beside the yardsticks
RECENT_BLOCKS = 4  # of an int4 cache with such blocks: 32 rows of f16, 10 to a block


@dataclass(frozen=True)
class Shape:
    """Attention of a model; `windows` of its layers, 0 for those that see everything."""

    heads: int
    kv_heads: int
    dim: int
    windows: tuple[int, ...]


SHAPES = {
    "smollm2": Shape(9, 3, 64, (0,) * 30),
    "gemma3": Shape(4, 1, 256, ((512,) * 5 + (0,)) * 3),
    "llama1b": Shape(32, 8, 64, (0,) * 16),
}


@dataclass(frozen=True)
class Case:
    """`new` tokens of each of `sequences` sequences behind `past` cached ones."""

    new: int
    past: int
    sequences: int = 1


CASES = {
    "decode-32": Case(1, 31),
    "decode-1024": Case(1, 1023),
    "decode-8192": Case(1, 8191),
    "decode-1024-x8": Case(1, 1023, 8),
    "prefill-512": Case(512, 0),
    "prefill-2048": Case(2048, 0),
    "chunk-512-at-8192": Case(512, 8192),
}


def row_bytes(kv_format: str, dim: int) -> int:
    """Bytes of a cached row."""
    return {"f32": 4 * dim, "f16": 2 * dim, "int8": dim // 32 * 34, "int4": dim // 32 * 20}[
        kv_format
    ]


class Layers:
    """A session of one Attention link per layer, bound to its inputs and caches."""

    def __init__(self, shape: Shape, kv_format: str, case: Case, layers: int, threads: int) -> None:
        self.shape, self.case = shape, case
        self.kv_format = kv_format
        self.windows = shape.windows[:layers]
        nodes = [self._node(i, window) for i, window in enumerate(self.windows)]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(kernels.ops_library()))
        self._session = ort.InferenceSession(_model(nodes), options)
        self._binding = self._session.io_binding()
        self._kept: list[Any] = []
        rng = np.random.default_rng(0)
        for name, data in self._inputs(rng).items():
            self._bind(name, data)
        out = np.empty((case.new * case.sequences, shape.heads * shape.dim), np.float32)
        for i in range(len(self.windows)):
            for side in ("k", "v"):
                self._bind(f"{side}_pool{i}", self._pool(side, rng), f"{side}_pool_out{i}")
            value = ort.OrtValue.ortvalue_from_numpy(out.copy())
            self._kept.append(value)
            self._binding.bind_ortvalue_output(f"o{i}", value)

    def run(self) -> None:
        """One step of all layers."""
        self._session.run_with_iobinding(self._binding)

    def cache_bytes(self) -> int:
        """Bytes of keys and values that a decode step reads."""
        length = self.case.past + self.case.new
        seen = sum(min(length, window or length) for window in self.windows)
        row = 2 * row_bytes(self.kv_format, self.shape.dim)
        return seen * self.case.sequences * self.shape.kv_heads * row

    def operations(self) -> int:
        """Multiplications and additions on pairs of a query and a key that it sees."""
        at = np.arange(self.case.past, self.case.past + self.case.new, dtype=np.int64) + 1
        pairs = sum(int(np.minimum(at, window or at).sum()) for window in self.windows)
        return 4 * self.shape.heads * self.shape.dim * pairs * self.case.sequences

    def _bind(self, name: str, data: NDArray[Any], output: str | None = None) -> None:
        value = ort.OrtValue.ortvalue_from_numpy(data)
        self._kept += [value, data]
        self._binding.bind_ortvalue_input(name, value)
        if output is not None:
            self._binding.bind_ortvalue_output(output, value)

    def _blocks(self) -> int:
        return -(-(self.case.past + self.case.new) // BLOCK) + self._lead()

    def _lead(self) -> int:
        return RECENT_BLOCKS if self.kv_format == "int4" else 0

    def _inputs(self, rng: np.random.Generator) -> dict[str, NDArray[Any]]:
        case, s = self.case, self.shape
        tokens = case.new * case.sequences
        tables = rng.permutation(case.sequences * self._blocks()).astype(np.int32)
        tables = tables.reshape(case.sequences, self._blocks())
        at = np.arange(case.past, case.past + case.new)
        slots = tables[:, self._lead() + at // BLOCK] * BLOCK + (at % BLOCK).astype(np.int32)
        widths = {"q": s.heads * s.dim, "k": s.kv_heads * s.dim, "v": s.kv_heads * s.dim}
        floats = {n: rng.standard_normal((tokens, w), np.float32) for n, w in widths.items()}
        return floats | {
            "slots": slots.reshape(-1),
            "seq_starts": (np.arange(case.sequences + 1) * case.new).astype(np.int32),
            "kv_lens": np.full(case.sequences, case.past + case.new, np.int32),
            "block_tables": tables,
        }

    def _pool(self, side: str, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Every block the same: values of size one, whatever the format makes of such bytes."""
        row = self.shape.kv_heads * row_bytes(self.kv_format, self.shape.dim)
        kind = np.float32 if self.kv_format == "f32" else np.float16
        block = rng.standard_normal(BLOCK * row // kind().itemsize).astype(kind).view(np.uint8)
        blocks = np.tile(block, self.case.sequences * self._blocks())
        return blocks.reshape(-1, BLOCK, self.shape.kv_heads, row // self.shape.kv_heads)

    def _node(self, i: int, window: int) -> Any:
        index = ["slots", "seq_starts", "kv_lens", "block_tables"]
        return helper.make_node(
            "Attention",
            ["q", "k", "v", f"k_pool{i}", f"v_pool{i}", *index],
            [f"o{i}", f"k_pool_out{i}", f"v_pool_out{i}"],
            domain="spike",
            heads=self.shape.heads,
            kv_heads=self.shape.kv_heads,
            scale=self.shape.dim**-0.5,
            window=window,
            kv_format=self.kv_format,
        )


def _model(nodes: list[Any]) -> bytes:
    kinds = {"q": TensorProto.FLOAT, "k": TensorProto.FLOAT, "v": TensorProto.FLOAT}
    index = ("slots", "seq_starts", "kv_lens", "block_tables")
    kinds |= dict.fromkeys(index, TensorProto.INT32)
    outputs: dict[str, int] = {}
    for node in nodes:
        kinds |= dict.fromkeys(node.input[3:5], TensorProto.UINT8)
        outputs |= {node.output[0]: TensorProto.FLOAT}
        outputs |= dict.fromkeys(node.output[1:], TensorProto.UINT8)
    ports = [
        [helper.make_tensor_value_info(name, kind, None) for name, kind in side.items()]
        for side in (kinds, outputs)
    ]
    chain = chain_node(nodes, list(outputs), "layers")
    graph = helper.make_graph([chain], "attention", *ports)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("spike", 1)]
    model: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=9).SerializeToString()
    return model


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measure(layers: Layers, rounds: int, threads: int, stream: Any) -> tuple[float, float, float]:
    """Medians over `rounds`: seconds of a step, its share of the stream rate and of the peak."""
    layers.run()
    times, of_stream, of_peak = [], [], []
    for _ in range(rounds):
        time.sleep(ASLEEP)
        taken, operations = timed(lambda: kernels.fma_burst(1_000_000, threads))
        peak = operations / taken
        taken, _ = timed(lambda: kernels.stream_read(stream, threads))
        rate = stream.nbytes / taken
        taken, _ = timed(layers.run)
        times.append(taken)
        of_stream.append(layers.cache_bytes() / taken / rate)
        of_peak.append(layers.operations() / taken / peak)
    return statistics.median(times), statistics.median(of_stream), statistics.median(of_peak)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--formats", default="f16,int8,int4,f32")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--layers", type=int, default=12, help="most Attention nodes of a session")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def lines(options: argparse.Namespace) -> Iterator[str]:
    """One line per shape, format and case."""
    stream = np.ones(64_000_000, np.uint8)
    for name in options.shapes.split(","):
        for kv_format in options.formats.split(","):
            for case in options.cases.split(","):
                shape = SHAPES[name]
                layers = Layers(shape, kv_format, CASES[case], options.layers, options.threads)
                taken, of_stream, of_peak = measure(layers, options.rounds, options.threads, stream)
                each = taken / len(layers.windows) * 1e6
                rate = layers.cache_bytes() / taken / 1e9
                gops = layers.operations() / taken / 1e9
                yield (
                    f"{name:8} {kv_format:5} {case:18} {each:9.1f} us  "
                    f"{rate:6.1f} GB/s {of_stream:5.2f} of stream  "
                    f"{gops:6.1f} Gop/s {of_peak:5.2f} of peak"
                )


def main() -> None:
    """Print the table."""
    options = parse()
    print(f"{kernels.cpu_tier()}, {options.threads} threads, up to {options.layers} layers")
    for line in lines(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
