"""A session over the streaming ABI: flat tokens, paged KV written in place, one run per step.

All memory is bound once. A step copies its small arrays into a staging buffer (bound again only
when a shape changes) and runs; the pools never move and are never copied. Of the logits only rows
that are wanted are written; which of each row is best comes out beside them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiler.engine.config import EngineConfig
from .block_bytes import BlockBytes
from .kv_pool import pool_memory
from .ort import open_session, require_names, sentence
from .session import BestLogits, SessionLimits, StepInputs, step_failed

LOGITS, WANTED = "logits", "wanted_logits"
BEST_IDS, BEST_LOGITS = "best_ids", "best_logits"


class StreamingSession:
    """Runs rank0.engine of a streaming engine.

    Args:
        model: path of rank0.engine.
        config: the engine's config.json.
        limits: pool size and step limits.
        ops_library: our kernels.
        threads: for the kernels.
        spins: see `open_session`.

    Raises:
        SpikeError: SPK614, the model can't be loaded or has another interface.
    """

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        limits: SessionLimits,
        ops_library: Path | None,
        threads: int,
        spins: bool = True,
    ) -> None:
        states = config.spike.states
        self._limits = limits
        # What there was to fuse is fused: the graph is little more than our kernels.
        self._session = open_session(model, ops_library, threads, spins, optimise=False)
        inputs = {*StepInputs.NAMES, WANTED, *(state.input for state in states)}
        outputs = {LOGITS, BEST_IDS, BEST_LOGITS, *(state.output for state in states)}
        require_names(self._session, inputs, outputs, model)
        self._binding: Any = self._session.io_binding()
        self._bound: tuple[int, ...] = ()  # sizes of what is bound: T, B, M, R, wanted rows
        self._staged = self._wanted = self._ids = np.empty(0, np.int32)
        self._best = np.empty(0, np.float32)
        self._logits = np.empty((0, limits.vocab_size), np.float32)
        self._pools: list[NDArray[np.uint8]] = []
        for state in states:
            shape = (limits.num_blocks, limits.block_size, state.kv_heads, state.row_bytes)
            self._bind_pool(state.input, state.output, shape)
        self._blocks = BlockBytes(self._pools, limits.num_blocks)

    @property
    def limits(self) -> SessionLimits:
        """What this session can hold."""
        return self._limits

    @property
    def blocks(self) -> BlockBytes:
        """See `Session.blocks`: the kernels keep to that, for every cache format."""
        return self._blocks

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `Session.step`."""
        self._run(inputs, inputs.sizes[-1])
        return self._logits

    def best(self, inputs: StepInputs) -> BestLogits:
        """See `Session.best`."""
        self._run(inputs, 0)
        rows = inputs.sizes[-1]
        return BestLogits(self._ids[:rows], self._best[:rows])

    def _run(self, inputs: StepInputs, wanted: int) -> None:
        if inputs.sizes[-1] == 0:
            # Kernels are not asked for zero rows: one is computed and dropped.
            tokens, sequences, width, _ = inputs.sizes
            packed = np.append(inputs.packed, np.int32(tokens - 1))
            inputs = StepInputs(packed, tokens, sequences, width, 1)
        if self._bound != (*inputs.sizes, wanted):
            self._bind(inputs, wanted)
        self._staged[...] = inputs.packed
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise step_failed(sentence(error)) from error

    def close(self) -> None:
        """Let go of the model and the pools."""
        self._binding = None
        self._session = None
        self._blocks.release()
        self._pools.clear()
        self._logits = np.empty((0, self._limits.vocab_size), np.float32)

    def _bind(self, inputs: StepInputs, wanted: int) -> None:
        """Memory for steps of these sizes."""
        rows = inputs.sizes[-1]
        self._staged = np.empty_like(inputs.packed)
        self._wanted = np.arange(wanted, dtype=np.int32)
        self._ids, self._best = np.empty(rows, np.int32), np.empty(rows, np.float32)
        if self._logits.shape[0] != wanted:
            self._logits = np.empty((wanted, self._limits.vocab_size), np.float32)
        for name, array in {**inputs.arrays(self._staged), WANTED: self._wanted}.items():
            self._binding.bind_input(name, "cpu", 0, np.int32, array.shape, array.ctypes.data)
        results = {BEST_IDS: self._ids, BEST_LOGITS: self._best, LOGITS: self._logits}
        for name, result in results.items():
            kind, shape, address = result.dtype.type, result.shape, result.ctypes.data
            self._binding.bind_output(name, "cpu", 0, kind, shape, address)
        self._bound = (*inputs.sizes, wanted)

    def _bind_pool(self, name_in: str, name_out: str, shape: tuple[int, ...]) -> None:
        pool = pool_memory(math.prod(shape))
        self._pools.append(pool)
        address = pool.ctypes.data
        self._binding.bind_input(name_in, "cpu", 0, np.uint8, shape, address)
        self._binding.bind_output(name_out, "cpu", 0, np.uint8, shape, address)
