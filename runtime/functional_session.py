"""A session over the functional ABI (batch, past -> present), behind the same ragged interface.

For engines built without `--enable-streaming`. The cache lives here, in float32 pools with the same
slots; every step gathers each sequence's past, runs it alone, and puts the new rows back. That is
the copying the streaming ABI exists to avoid: this one is for comparison, for other runtimes, and
for models with convolution or recurrent states. Those belong to a sequence, which is known by its
first block. An engine whose step is one token gets a prompt token by token.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..compiler.engine.config import EngineConfig, FixedStateSpec, StateSpec
from .kv_pool import pool_memory
from .ort import open_session, require_names, sentence
from .session import BestLogits, SessionLimits, StepInputs, best_of, step_failed


class FunctionalSession:
    """Runs rank0.engine of a functional engine. Arguments and errors: `StreamingSession`."""

    def __init__(
        self,
        model: Path,
        config: EngineConfig,
        limits: SessionLimits,
        ops_library: Path | None,
        threads: int,
        spins: bool = True,
    ) -> None:
        self._limits = limits
        self._states, self._fixed = config.spike.states, config.spike.fixed_states
        self._session = open_session(model, ops_library, threads, spins)
        kept: list[StateSpec | FixedStateSpec] = [*self._states, *self._fixed]
        names_in = {state.input for state in kept}
        self._outputs = ["logits", *(state.output for state in kept)]
        require_names(self._session, {"tokens", "positions", *names_in}, set(self._outputs), model)
        slots = limits.num_blocks * limits.block_size
        self._pools = [
            _float_pool((slots, state.kv_heads, state.head_dim)) for state in self._states
        ]
        shapes = {value.name: value.shape for value in self._session.get_inputs()}
        self._stepwise = shapes["tokens"][1] == 1
        self._held: dict[int, list[NDArray[np.float32]]] = {}  # first block -> fixed states

    @property
    def limits(self) -> SessionLimits:
        """What this session can hold."""
        return self._limits

    @property
    def blocks(self) -> None:
        """See `Session.blocks`: other states go with a sequence, and bits with the run's shape."""
        return None

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """See `Session.step`."""
        rows = [self._run_one(inputs, b) for b in range(inputs.kv_lens.size)]
        return np.concatenate(rows)[inputs.logit_rows]

    def best(self, inputs: StepInputs) -> BestLogits:
        """See `Session.best`."""
        return best_of(self.step(inputs))

    def close(self) -> None:
        """Let go of the model and the pools."""
        self._session = None
        self._pools.clear()
        self._held.clear()

    def _run_one(self, inputs: StepInputs, b: int) -> NDArray[np.float32]:
        """Logits of sequence b's new tokens, float32 ``[S, V]``; its states are updated."""
        first, last = int(inputs.seq_starts[b]), int(inputs.seq_starts[b + 1])
        cuts = range(first, last) if self._stepwise else (first,)
        size = 1 if self._stepwise else last - first
        return np.concatenate([self._run_span(inputs, b, cut, cut + size) for cut in cuts])

    def _run_span(self, inputs: StepInputs, b: int, first: int, last: int) -> NDArray[np.float32]:
        """One run of the model: the step's tokens first <= t < last, of sequence b."""
        length = int(inputs.kv_lens[b]) - int(inputs.seq_starts[b + 1]) + first
        past = self._past_slots(inputs, b, length)
        feed: dict[str, NDArray[Any]] = {
            "tokens": inputs.tokens[None, first:last],
            "positions": inputs.positions[None, first:last],
        }
        for state, pool in zip(self._states, self._pools, strict=True):
            feed[state.input] = np.ascontiguousarray(pool[past].transpose(1, 0, 2))[None]
        block = int(inputs.block_tables[b, 0])
        held = self._held.get(block) if length else None
        for index, fixed in enumerate(self._fixed):
            start = np.zeros((1, *fixed.shape), np.float32)
            feed[fixed.input] = start if held is None else held[index]
        try:
            logits, *presents = self._session.run(self._outputs, feed)
        except Exception as error:  # onnxruntime's exceptions share no base class of their own
            raise step_failed(sentence(error)) from error
        for pool, present in zip(self._pools, presents, strict=False):
            pool[inputs.slots[first:last]] = present[0, :, past.size :].transpose(1, 0, 2)
        if self._fixed:
            self._held[block] = presents[len(self._pools) :]
        result: NDArray[np.float32] = logits[0]
        return result

    def _past_slots(self, inputs: StepInputs, b: int, length: int) -> NDArray[np.int32]:
        """Slots of the tokens sequence b has in the cache, int32 ``[length]``."""
        index = np.arange(length, dtype=np.int32)
        size = np.int32(self._limits.block_size)
        slots: NDArray[np.int32] = inputs.block_tables[b, index // size] * size + index % size
        return slots


def _float_pool(shape: tuple[int, ...]) -> NDArray[np.float32]:
    size = math.prod(shape)
    return pool_memory(4 * size).view(np.float32).reshape(shape)
