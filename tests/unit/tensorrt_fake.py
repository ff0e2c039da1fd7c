"""A tensorrt_rtx and a GPU for tests: device memory is this process's, and every call is recorded.

The engine is a small model whose logits depend on everything a session has to get right: which
tokens lie in a sequence's cache row, in which order, at which positions, up to which length.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCAB, HEADS, WIDTH = 61, 2, 8
CALLS: set[tuple[str, str, int, tuple[str, ...]]] = set()
"""(class, attribute, number of arguments or -1 for a property, their type names) of all calls."""


def called(kind: str, name: str, *arguments: Any) -> None:
    CALLS.add((kind, name, len(arguments), tuple(type(a).__name__ for a in arguments)))


def got(kind: str, name: str) -> None:
    CALLS.add((kind, name, -1, ()))


def logits_of(tokens: list[int]) -> NDArray[np.float32]:
    """Of the token after these, float32 ``[VOCAB]``."""
    mixed = 7
    for position, token in enumerate(tokens):
        mixed = (mixed * 31 + 5 * token + position) % 1_000_003
    return np.float32(np.arange(VOCAB) * (mixed % 97 + 1) % 53)


def memory(address: int, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """The array at an address, which is one of ours."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype).reshape(shape)


class FakeGpu:
    """`runtime.cuda.Gpu` over this process's memory."""

    def __init__(self, most: int = 1 << 28) -> None:
        self.stream, self.most, self.closed, self.waited = 77, most, False, True
        self.arrays: list[NDArray[np.uint8]] = []

    def enter(self) -> None:
        assert not self.closed

    def allocate(self, size: int) -> int:
        from spikeinfer.runtime.cuda import OutOfDeviceMemory

        self.most -= size
        if self.most < 0:
            raise OutOfDeviceMemory
        return int(self.host_array(size).ctypes.data)

    def host_array(self, size: int) -> NDArray[np.uint8]:
        self.arrays.append(np.zeros(size, np.uint8))
        return self.arrays[-1]

    def copy_in(self, address: int, content: NDArray[Any]) -> None:
        self.waited = False
        memory(address, content.shape, content.dtype)[...] = content

    def copy_out(self, content: NDArray[Any], address: int) -> None:
        self.waited = False
        content[...] = memory(address, content.shape, content.dtype)

    def wait(self) -> None:
        self.waited = True

    def close(self) -> None:
        self.closed = True


@dataclass
class FakeContext:
    """Runs the small model from the addresses and shapes it was given."""

    engine: FakeEngine
    captured: bool
    profile: int = -1
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    addresses: dict[str, int] = field(default_factory=dict)
    runs: list[tuple[int, ...]] = field(default_factory=list)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        called("IExecutionContext", "set_optimization_profile_async", profile_index, stream_handle)
        self.profile = profile_index
        return profile_index < self.engine.num_optimization_profiles

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        called("IExecutionContext", "set_input_shape", name, shape)
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        called("IExecutionContext", "set_tensor_address", name, memory)
        assert isinstance(memory, int)
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        called("IExecutionContext", "execute_async_v3", stream_handle)
        if self.engine.fails:
            return False
        arrays = {
            n: memory(self.addresses[n], self.shapes[n], np.int32)
            for n in ("tokens", "positions", "write_indices", "kv_lens", "logit_rows")
        }
        batch, size = arrays["tokens"].shape
        self._check(batch, size, arrays)
        self.runs.append((batch, size))
        caches = []
        for name in ("key", "value"):
            assert self.addresses[f"past.{name}"] == self.addresses[f"present.{name}"]
            shape = self.shapes[f"past.{name}"]
            assert shape == (batch, HEADS, self.engine.capacity, WIDTH)
            caches.append(memory(self.addresses[f"past.{name}"], shape, np.float16))
        logits = memory(self.addresses["logits"], (*arrays["logit_rows"].shape, VOCAB), np.float32)
        for b in range(batch):
            at = int(arrays["write_indices"][b])
            keys = (t[b, :, at : at + size] for t in caches)
            for cache, values in zip(keys, (arrays["tokens"], arrays["positions"]), strict=True):
                cache[...] = values[b][None, :, None]
            for r, row in enumerate(arrays["logit_rows"][b]):
                length = int(arrays["kv_lens"][b]) - size + int(row) + 1
                seen = caches[0][b, 0, :length, 0].astype(int).tolist()
                places = caches[1][b, 1, :length, 3].astype(int).tolist()
                if at < self.engine.capacity - 1:  # an idle row may hold anything
                    assert places == list(range(length))
                logits[b, r] = logits_of(seen)
        return True

    def _check(self, batch: int, size: int, arrays: dict[str, NDArray[np.int32]]) -> None:
        """What TensorRT's profiles and layers ask of the inputs."""
        least, _, most = self.engine.profiles[self.profile]["tokens"]
        assert all(a <= b <= c for a, b, c in zip(least, (batch, size), most, strict=True))
        rows = arrays["logit_rows"].shape[1]
        assert 1 <= rows <= self.engine.profiles[self.profile]["logit_rows"][-1][1]
        assert (arrays["logit_rows"] < size).all()
        assert (arrays["write_indices"] + size <= self.engine.capacity).all()
        assert (arrays["kv_lens"] >= 1).all()


class FakeEngine:
    """ICudaEngine."""

    streamable_weights_size = 1000

    def __init__(self, batch: int, chunk: int, rows: int, capacity: int) -> None:
        self.capacity, self.fails = capacity, False
        self.contexts: list[FakeContext] = []
        self.profiles = [
            {"tokens": [(1, 1), (1, chunk), (1, chunk)], "logit_rows": [(1, 1), (1, 1), (1, rows)]},
            {"tokens": [(1, 1), (batch, 1), (batch, 1)],
             "logit_rows": [(1, 1), (batch, 1), (batch, 1)]},
        ]  # fmt: skip
        self.names = ["tokens", "positions", "write_indices", "kv_lens", "logit_rows", "past.key",
                      "past.value", "present.key", "present.value", "logits"]  # fmt: skip
        self.budget = -1

    @property
    def num_io_tensors(self) -> int:
        got("ICudaEngine", "num_io_tensors")
        return len(self.names)

    @property
    def num_optimization_profiles(self) -> int:
        got("ICudaEngine", "num_optimization_profiles")
        return len(self.profiles)

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, budget: int) -> None:
        got("ICudaEngine", "weight_streaming_budget_v2")
        assert not self.contexts
        self.budget = budget

    def get_weight_streaming_automatic_budget(self) -> int:
        called("ICudaEngine", "get_weight_streaming_automatic_budget")
        return 800

    def get_tensor_name(self, index: int) -> str:
        called("ICudaEngine", "get_tensor_name", index)
        return self.names[index]

    def get_tensor_mode(self, name: str) -> Mode:
        called("ICudaEngine", "get_tensor_mode", name)
        output = name == "logits" or name.startswith("present")
        return Mode.OUTPUT if output else Mode.INPUT

    def get_tensor_dtype(self, name: str) -> str:
        called("ICudaEngine", "get_tensor_dtype", name)
        if name == "logits":
            return "FLOAT"
        return "HALF" if "." in name else "INT32"

    def get_aliased_input_tensor(self, name: str) -> str:
        called("ICudaEngine", "get_aliased_input_tensor", name)
        return name.replace("present", "past")

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        called("ICudaEngine", "get_tensor_profile_shape", name, profile_index)
        return list(self.profiles[profile_index][name])

    def create_runtime_config(self) -> Any:
        called("ICudaEngine", "create_runtime_config")
        got("IRuntimeConfig", "cuda_graph_strategy")
        return SimpleNamespace(cuda_graph_strategy=None)

    def create_execution_context(self, runtime_config: Any) -> FakeContext:
        called("ICudaEngine", "create_execution_context", runtime_config)
        self.contexts.append(FakeContext(self, runtime_config.cuda_graph_strategy == "whole"))
        return self.contexts[-1]


class Mode(Enum):
    INPUT = 1
    OUTPUT = 2


class Validity(Enum):
    VALID = 0
    INVALID = 2


class Diagnostics(Enum):
    VERSION_MISMATCH = 1
    UNSUPPORTED_CC = 2


class FakeLogger:
    INTERNAL_ERROR, ERROR, WARNING = 0, 1, 2


class FakeTrt:
    """The module tensorrt_rtx; `flags` is why it finds engines invalid."""

    __version__ = "1.7.1.116"
    TensorIOMode, EngineValidity, ILogger = Mode, Validity, FakeLogger
    EngineInvalidityDiagnostics = Diagnostics
    CudaGraphStrategy = SimpleNamespace(DISABLED="off", WHOLE_GRAPH_CAPTURE="whole")
    DataType = SimpleNamespace(INT32="INT32", FLOAT="FLOAT", HALF="HALF", BF16="BF16")

    def __init__(self, engine: FakeEngine | None, flags: int = 0) -> None:
        self.engine, self.flags = engine, flags

    def Runtime(self, logger: Any) -> Any:
        called("Runtime", "__init__", logger)
        return FakeRuntime(self, logger)


@dataclass
class FakeRuntime:
    trt: FakeTrt
    logger: Any

    def get_engine_validity(self, buffer: Any) -> tuple[Validity, int]:
        called("Runtime", "get_engine_validity", buffer)
        return (Validity.INVALID if self.trt.flags else Validity.VALID), self.trt.flags

    def deserialize_cuda_engine(self, serialized_engine: Any) -> FakeEngine | None:
        called("Runtime", "deserialize_cuda_engine", serialized_engine)
        assert bytes(serialized_engine[:4]) == b"plan"
        if self.trt.engine is None:
            self.logger.log(FakeLogger.ERROR, "CUDA initialization failure.\n")
        return self.trt.engine
