"""A session over the streaming ABI: flat tokens, paged KV written in place, one run per step.

All memory is bound once. A step copies seven small arrays into staging buffers (bound again only
when a shape changes) and runs; the pools never move and are never copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiler.engine.config import EngineConfig
from .block_bytes import BlockBytes
from .kv_pool import pool_memory
from .ort import open_session, require_names, sentence
from .session import SessionLimits, StepInputs, step_failed

STEP_INPUTS = tuple(field.name for field in fields(StepInputs))
LOGITS = "logits"


class StreamingSession:
    """Runs rank0.engine of a streaming engine.

    Args:
        model: path of rank0.engine.
        config: the engine's config.json.
        limits: pool size and step limits.
        ops_library: our kernels.
        threads: for the kernels.
        reading: see `open_session`.

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
        reading: Callable[[], None] = lambda: None,
    ) -> None:
        states = config.spike.states
        self._limits = limits
        self._session = open_session(model, ops_library, threads, reading)
        inputs = {*STEP_INPUTS, *(state.input for state in states)}
        require_names(self._session, inputs, {LOGITS, *(state.output for state in states)}, model)
        self._binding: Any = self._session.io_binding()
        self._staged: dict[str, NDArray[np.int32]] = {}
        self._logits = np.empty((0, limits.vocab_size), np.float32)
        self._pools: list[NDArray[np.uint8]] = []
        for state in states:
            shape = (limits.num_blocks, limits.block_size, state.kv_heads, state.row_bytes)
            self._bind_pool(state.input, state.output, shape)
        self._blocks: BlockBytes | None = BlockBytes(self._pools, limits.num_blocks)

    @property
    def limits(self) -> SessionLimits:
        """What this session can hold."""
        return self._limits

    @property
    def blocks(self) -> BlockBytes | None:
        """See `Session.blocks`: the kernels keep to that, for every cache format."""
        return self._blocks

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `Session.step`."""
        for name in STEP_INPUTS:
            self._stage(name, getattr(inputs, name))
        if not inputs.logit_rows.size:
            # Kernels are not asked for zero rows: one is computed and dropped.
            self._stage("logit_rows", inputs.seq_starts[-1:] - np.int32(1))
        self._bind_logits(max(1, inputs.logit_rows.size))
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise step_failed(sentence(error)) from error
        return self._logits[: inputs.logit_rows.size]

    def close(self) -> None:
        """Let go of the model and the pools."""
        self._binding = None
        self._session = None
        self._blocks = None
        self._pools.clear()
        self._staged.clear()

    def _stage(self, name: str, values: NDArray[np.int32]) -> None:
        staged = self._staged.get(name)
        if staged is None or staged.shape != values.shape:
            staged = self._staged[name] = np.empty(values.shape, np.int32)
            self._binding.bind_input(name, "cpu", 0, np.int32, staged.shape, staged.ctypes.data)
        staged[...] = values

    def _bind_logits(self, rows: int) -> None:
        if self._logits.shape[0] != rows:
            self._logits = np.empty((rows, self._limits.vocab_size), np.float32)
            shape, address = self._logits.shape, self._logits.ctypes.data
            self._binding.bind_output(LOGITS, "cpu", 0, np.float32, shape, address)

    def _bind_pool(self, name_in: str, name_out: str, shape: tuple[int, ...]) -> None:
        pool = pool_memory(int(np.prod(shape, dtype=np.int64)))
        self._pools.append(pool)
        address = pool.ctypes.data
        self._binding.bind_input(name_in, "cpu", 0, np.uint8, shape, address)
        self._binding.bind_output(name_out, "cpu", 0, np.uint8, shape, address)
