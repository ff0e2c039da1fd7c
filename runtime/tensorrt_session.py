"""A session over a TensorRT engine: batched steps on a GPU, keys and values in linear caches.

A sequence has one row of every cache, `capacity` tokens long; its only block is that row. The
engine's caches are inputs that come out again at the same address, so that a step writes in place.
There are two contexts, one per profile: decode takes a token of each row at once, prefill some
tokens of one row, whose address it is given. Decode always runs from row 0 on: its shapes change
seldom and addresses never, so that its launches are captured in a CUDA graph. A row that has no
token then writes to the last place of its cache, which is kept free for that.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiler.engine.config import LINEAR_INPUTS, LOGITS, EngineConfig, TensorRtSpec
from ..errors import ExitCode, SpikeError
from .cuda import Gpu, OutOfDeviceMemory
from .session import BestLogits, SessionLimits, StepInputs, best_of, step_failed

ALIGNMENT = 256
DTYPES = {"f16": "HALF", "bf16": "BF16", "f32": "FLOAT"}
"""Our name of a cache's element type -> TensorRT's."""
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Run:
    """One execution: B rows of the caches from `first_row` on, with S tokens and R logit rows each.

    Attributes:
        profile: of `TensorRtSpec.profiles`.
        first_row: of the caches.
        arrays: the integer inputs.
        wanted: (row of the step's logits, index b, index r) of what is read afterwards.
    """

    profile: str
    first_row: int
    arrays: Mapping[str, NDArray[np.int32]]
    wanted: Sequence[tuple[int, int, int]]


class TensorRtSession:
    """Runs rank0.engine of a TensorRT engine. See `Session`.

    Args:
        model: path of rank0.engine.
        config: the engine's config.json.
        limits: from `linear_limits`.
        trt: the module tensorrt_rtx; None imports it.
        gpu: None opens the first one.

    Raises:
        SpikeError: SPK614 the engine has another interface than its config says, SPK621 no GPU,
            SPK622 tensorrt_rtx is missing, SPK623 TensorRT refuses the engine here, SPK624 too
            little device memory.
    """

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        limits: SessionLimits,
        trt: Any = None,
        gpu: Gpu | None = None,
    ) -> None:
        self._limits, self._spec = limits, linear_spec(config)
        self._gpu = gpu or Gpu()
        self._closed = False
        try:
            self._trt = trt or _import()
            self._engine = _deserialised(self._trt, model)
            _check_interface(self._trt, self._engine, config, model)
            self._contexts = {
                profile.name: self._context(index, profile.name)
                for index, profile in enumerate(self._spec.profiles)
            }
            self._allocate(config)
        except OutOfDeviceMemory as error:
            self._gpu.close()
            raise _no_memory(limits) from error
        except BaseException:
            self._gpu.close()
            raise

    @property
    def limits(self) -> SessionLimits:
        """What this session can hold."""
        return self._limits

    @property
    def blocks(self) -> None:
        """See `Session.blocks`: bits depend on how tokens are grouped, so nothing is shared."""
        return None

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `Session.step`."""
        self._gpu.enter()
        result = np.empty((inputs.logit_rows.size, self._limits.vocab_size), np.float32)
        for run in runs_of(inputs, self._spec):
            logits = self._execute(run)
            for row, b, r in run.wanted:
                result[row] = logits[b, r]
        return result

    def best(self, inputs: StepInputs) -> BestLogits:
        """See `Session.best`."""
        return best_of(self.step(inputs))

    def close(self) -> None:
        """Let go of the model and the caches."""
        if not self._closed:
            self._closed = True
            self._contexts.clear()
            self._engine = None
            self._gpu.close()

    def _context(self, index: int, profile: str) -> Any:
        """An execution context; that of decode runs from a CUDA graph that TensorRT captures."""
        strategy = self._trt.CudaGraphStrategy
        if index == 0 and self._engine.streamable_weights_size > 0:
            budget = self._engine.get_weight_streaming_automatic_budget()
            self._engine.weight_streaming_budget_v2 = budget
        config = self._engine.create_runtime_config()
        captured = profile == DECODE
        config.cuda_graph_strategy = strategy.WHOLE_GRAPH_CAPTURE if captured else strategy.DISABLED
        context = self._engine.create_execution_context(config)
        if context is None:
            raise _refused("it makes no execution context (too little device memory?)")
        if not context.set_optimization_profile_async(index, self._gpu.stream):
            raise _refused(f"it has no optimisation profile {index}")
        return context

    def _allocate(self, config: EngineConfig) -> None:
        """All memory, once: caches, integer inputs, logits."""
        rows, spec = self._limits.num_blocks, self._spec
        self._caches = {}
        for pair, state in zip(spec.aliases, config.spike.states, strict=True):
            shape = (state.kv_heads, spec.capacity, state.head_dim)
            row_bytes = state.kv_heads * spec.capacity * state.row_bytes
            self._caches[pair] = (shape, row_bytes, self._gpu.allocate(rows * row_bytes))
        most = max(p.batches[-1] * p.steps[-1] for p in spec.profiles)
        self._integer_bytes = -(-4 * most // ALIGNMENT) * ALIGNMENT
        size = len(LINEAR_INPUTS) * self._integer_bytes
        self._integers, self._staged = self._gpu.allocate(size), self._gpu.host_array(size)
        most = max(p.batches[-1] * p.logit_rows[-1] for p in spec.profiles)
        size = most * 4 * self._limits.vocab_size
        self._logits, self._read = self._gpu.allocate(size), self._gpu.host_array(size)

    def _execute(self, run: Run) -> NDArray[np.float32]:
        """The logits of one execution, float32 ``[B, R, V]``, valid until the next one."""
        context = self._contexts[run.profile]
        batch, rows = run.arrays["logit_rows"].shape
        for index, name in enumerate(LINEAR_INPUTS):
            self._bind_integers(context, name, run.arrays[name], index * self._integer_bytes)
        for pair, (shape, row_bytes, base) in self._caches.items():
            address = base + run.first_row * row_bytes
            _require(context.set_input_shape(pair.input, (batch, *shape)), pair.input)
            _require(context.set_tensor_address(pair.input, address), pair.input)
            _require(context.set_tensor_address(pair.output, address), pair.output)
        _require(context.set_tensor_address(LOGITS, self._logits), LOGITS)
        used = (len(LINEAR_INPUTS) - 1) * self._integer_bytes + run.arrays["logit_rows"].nbytes
        self._gpu.copy_in(self._integers, self._staged[:used])
        if not context.execute_async_v3(self._gpu.stream):
            raise step_failed(f"TensorRT did not run the {run.profile} step.")
        vocab = self._limits.vocab_size
        read = self._read[: 4 * batch * rows * vocab]
        if run.wanted:
            self._gpu.copy_out(read, self._logits)
        self._gpu.wait()
        return read.view(np.float32).reshape(batch, rows, vocab)

    def _bind_integers(
        self, context: Any, name: str, values: NDArray[np.int32], offset: int
    ) -> None:
        self._staged[offset : offset + values.nbytes] = values.reshape(-1).view(np.uint8)
        _require(context.set_input_shape(name, values.shape), name)
        _require(context.set_tensor_address(name, self._integers + offset), name)


def runs_of(inputs: StepInputs, spec: TensorRtSpec) -> Iterator[Run]:
    """One ragged step as executions: the chunks one by one, then one token of all others."""
    singles = []
    most = {p.name: (p.steps[-1], p.logit_rows[-1]) for p in spec.profiles}[PREFILL]
    for b in range(inputs.kv_lens.size):
        if inputs.seq_starts[b + 1] - inputs.seq_starts[b] == 1:
            singles.append(b)
        else:
            yield from _chunks(inputs, b, *most)
    if singles:
        yield _decode(inputs, singles, spec.capacity)


def _chunks(inputs: StepInputs, b: int, most_tokens: int, most_rows: int) -> Iterator[Run]:
    """The new tokens of one sequence, as few at a time as the engine takes tokens and rows."""
    start, stop = int(inputs.seq_starts[b]), int(inputs.seq_starts[b + 1])
    wanted = [(int(t), i) for i, t in enumerate(inputs.logit_rows) if start <= t < stop]
    while start < stop:
        end = min(stop, start + most_tokens)
        if len(rows := [(t, i) for t, i in wanted if start <= t < end]) > most_rows:
            end = rows[most_rows][0]
            rows = rows[:most_rows]
        yield _chunk(inputs, b, start, end, rows)
        start = end


def _chunk(
    inputs: StepInputs, b: int, start: int, end: int, rows: Sequence[tuple[int, int]]
) -> Run:
    kept = int(inputs.positions[start])  # tokens already in the cache
    read = [t - start for t, _ in rows] or [end - start - 1]
    arrays = {
        "tokens": inputs.tokens[None, start:end],
        "positions": inputs.positions[None, start:end],
        "write_indices": np.array([kept], np.int32),
        "kv_lens": np.array([kept + end - start], np.int32),
        "logit_rows": np.array([read], np.int32),
    }
    wanted = [(row, 0, r) for r, (_, row) in enumerate(rows)]
    return Run(PREFILL, int(inputs.block_tables[b, 0]), arrays, wanted)


def _decode(inputs: StepInputs, sequences: Sequence[int], capacity: int) -> Run:
    """One token of each of these sequences; the rows between them idle."""
    rows = inputs.block_tables[sequences, 0]
    at = inputs.seq_starts[sequences]
    batch = int(rows.max()) + 1
    arrays = {
        "tokens": np.zeros((batch, 1), np.int32),
        "positions": np.zeros((batch, 1), np.int32),
        "write_indices": np.full(batch, capacity - 1, np.int32),
        "kv_lens": np.ones(batch, np.int32),
        "logit_rows": np.zeros((batch, 1), np.int32),
    }
    arrays["tokens"][rows, 0] = inputs.tokens[at]
    arrays["positions"][rows, 0] = inputs.positions[at]
    arrays["write_indices"][rows] = inputs.positions[at]
    arrays["kv_lens"][rows] = inputs.kv_lens[sequences]
    place = {int(t): int(row) for t, row in zip(at, rows, strict=True)}
    wanted = [(i, place[t], 0) for i, t in enumerate(inputs.logit_rows.tolist()) if t in place]
    return Run(DECODE, 0, arrays, wanted)


def linear_spec(config: EngineConfig) -> TensorRtSpec:
    """What config.json says of a TensorRT engine."""
    assert config.spike.tensorrt is not None  # the load-time checks refuse such an engine
    return config.spike.tensorrt


def linear_limits(
    config: EngineConfig, max_seq_len: int, kv_cache_memory: int | None
) -> SessionLimits:
    """Limits of a session over a TensorRT engine: one block, a cache row, for each sequence.

    Raises SPK615 if `kv_cache_memory` does not hold one row.
    """
    build, spec = config.build_config, linear_spec(config)
    row = sum(s.kv_heads * spec.capacity * s.row_bytes for s in config.spike.states)
    rows = build.max_batch_size
    if kv_cache_memory is not None:
        rows = min(rows, kv_cache_memory // max(1, row))
        if rows < 1:
            raise SpikeError(
                "SPK615",
                "KV cache",
                f"kv_cache_memory={kv_cache_memory} bytes don't hold the cache of one sequence.",
                f"Give at least {row} bytes, or build the engine with a smaller --max-seq-len.",
            )
    return SessionLimits(
        vocab_size=config.spike.vocab_size,
        max_num_tokens=build.max_num_tokens,
        max_batch_size=rows,
        max_seq_len=max_seq_len,
        num_blocks=rows,
        block_size=spec.capacity,
        group_tokens=0,
    )


def _import() -> Any:
    try:
        import tensorrt_rtx
    except ImportError as error:
        raise SpikeError(
            "SPK622",
            "engine",
            f"a TensorRT engine needs the package tensorrt-rtx, which can't be imported: {error}.",
            "pip install 'spikeinfer[tensorrt]'",
            ExitCode.UNSUPPORTED,
        ) from error
    return tensorrt_rtx


def _deserialised(trt: Any, model: Path) -> Any:
    """The engine, read from a map of its file."""
    log = _logger(trt)
    runtime = trt.Runtime(log)
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        validity, flags = runtime.get_engine_validity(data)
        if validity == trt.EngineValidity.INVALID:
            reasons = trt.EngineInvalidityDiagnostics.__members__.items()
            named = [name.lower().replace("_", " ") for name, v in reasons if flags & int(v.value)]
            raise _refused(", ".join(named) or log.last or "it gives no reason")
        engine = runtime.deserialize_cuda_engine(data)
    if engine is None:
        raise _refused(log.last or "it can't deserialise it")
    return engine


def malformed(model: Path) -> bool | None:
    """Whether TensorRT says that a file is no engine, which needs no GPU; None if it isn't here."""
    try:
        trt = _import()
    except SpikeError:
        return None
    with model.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        _, flags = trt.Runtime(_logger(trt)).get_engine_validity(data)
    return bool(flags & int(trt.EngineInvalidityDiagnostics.MALFORMED_ENGINE.value))


def _logger(trt: Any) -> Any:
    """A logger of TensorRT's that prints nothing and keeps the last error."""

    class LastError(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.last = ""

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.last = " ".join(message.split()).rstrip(".")

    return LastError()


def _check_interface(trt: Any, engine: Any, config: EngineConfig, model: Path) -> None:
    """The engine's inputs, outputs, aliases and profiles are those of config.json; SPK614."""
    spec, modes = linear_spec(config), trt.TensorIOMode
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    found = {n for n in names if engine.get_tensor_mode(n) == modes.INPUT}
    inputs = {*LINEAR_INPUTS, *(pair.input for pair in spec.aliases)}
    outputs = {LOGITS, *(pair.output for pair in spec.aliases)}
    differing = (found ^ inputs) | ((set(names) - found) ^ outputs)
    if not differing:
        element = {
            name: getattr(trt.DataType, DTYPES[state.format])
            for state in config.spike.states
            for name in (state.input, state.output)
        }
        element |= dict.fromkeys(LINEAR_INPUTS, trt.DataType.INT32) | {LOGITS: trt.DataType.FLOAT}
        differing |= {n for n, kind in element.items() if engine.get_tensor_dtype(n) != kind}
        differing |= {p.output for p in spec.aliases
                      if engine.get_aliased_input_tensor(p.output) != p.input}  # fmt: skip
    if engine.num_optimization_profiles != len(spec.profiles):
        differing.add("profiles")
    elif not differing:
        differing |= set(_wrong_profiles(engine, spec))
    if differing:
        raise SpikeError(
            "SPK614",
            "engine",
            f"{model} and its config.json disagree about {', '.join(sorted(differing))}.",
            "The directory mixes two engines; build it again.",
        )


def _wrong_profiles(engine: Any, spec: TensorRtSpec) -> Iterator[str]:
    """Profiles that take other sizes than config.json says."""
    for index, profile in enumerate(spec.profiles):
        least, _, most = (tuple(d) for d in engine.get_tensor_profile_shape("tokens", index))
        rows = tuple(engine.get_tensor_profile_shape("logit_rows", index)[-1])
        bounds = tuple(zip(profile.batches, profile.steps, strict=True))
        if (least, most) != (bounds[0], bounds[-1]) or rows[-1] != profile.logit_rows[-1]:
            yield f"profile {profile.name}"


def _require(done: bool, name: str) -> None:
    if not done:
        raise step_failed(f"TensorRT does not take the shape or the address of {name}.")


def _refused(cause: str) -> SpikeError:
    return SpikeError(
        "SPK623",
        "engine",
        f"TensorRT does not take this engine here: {cause}.",
        "It runs with the version of tensorrt-rtx that built it, on a GPU of its list: "
        "`spike inspect` shows both. Build it again for this machine.",
        ExitCode.UNSUPPORTED,
    )


def _no_memory(limits: SessionLimits) -> SpikeError:
    return SpikeError(
        "SPK624",
        "engine",
        f"the GPU has too little memory for the engine and the caches of {limits.num_blocks} "
        f"sequences of {limits.block_size} tokens.",
        "Give a smaller kv_cache_memory, or build with a smaller --max-batch-size or "
        "--max-seq-len.",
        ExitCode.UNSUPPORTED,
    )
