"""The seam between the runtime and whatever executes the model: one step of many sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ExitCode, SpikeError
from .block_bytes import BlockBytes

IntRow = NDArray[np.int32]


@dataclass(frozen=True)
class SessionLimits:
    """What a session can hold.

    Attributes:
        vocab_size: width of the logits; token ids are below it.
        max_num_tokens: most tokens of one step, all sequences together.
        max_batch_size: most sequences of one step.
        max_seq_len: most tokens of one sequence, prompt and output together.
        num_blocks: KV blocks in the pool.
        block_size: tokens in a block.
        recent_blocks: blocks that lead each sequence's block table, for its last tokens.
        group_tokens: tokens whose cache is coded together once all of them are there; 1 = each
            token alone, 0 = nothing can be taken back.
    """

    vocab_size: int
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    num_blocks: int
    block_size: int
    recent_blocks: int = 0
    group_tokens: int = 1

    def draft_room(self, tokens: int) -> int:
        """How many more tokens a sequence of `tokens` may get and give back again.

        Giving back is only to count on from fewer and write the same slots once more, so nothing
        may have been coded together with what goes.
        """
        if self.group_tokens == 0:
            return 0
        group = self.group_tokens
        return self.max_seq_len if group == 1 else group - 1 - tokens % group


class StepInputs:
    """One ragged step: B sequences with T new tokens in all.

    The arrays lie in one buffer, so that handing them over is one copy.

    Args:
        packed: int32, the arrays one behind the other in the order of `NAMES`.
        tokens, sequences, table_width, rows: T, B, M and R.

    The arrays, int32 and C-contiguous:
        tokens: ids of the new tokens, sequence after sequence, ``[T]``, T >= 1.
        positions: index of each token in its sequence, ``[T]``.
        slots: where each token's K and V go: ``block * block_size + offset``, ``[T]``.
        seq_starts: sequence b's tokens are ``seq_starts[b] <= t < seq_starts[b+1]``, ``[B+1]``.
        kv_lens: tokens of each sequence, cached and new together, ``[B]``.
        block_tables: each sequence's blocks in order, behind its `recent_blocks`, padded with 0,
            ``[B, M]``.
        logit_rows: tokens whose logits are wanted, ``[R]``; may be empty.
    """

    NAMES = (
        "tokens",
        "positions",
        "slots",
        "seq_starts",
        "kv_lens",
        "block_tables",
        "logit_rows",
    )

    def __init__(
        self, packed: IntRow, tokens: int, sequences: int, table_width: int, rows: int
    ) -> None:
        self.packed = packed
        self.sizes = (tokens, sequences, table_width, rows)

    @classmethod
    def of(
        cls,
        *,
        tokens: IntRow,
        positions: IntRow,
        slots: IntRow,
        seq_starts: IntRow,
        kv_lens: IntRow,
        block_tables: IntRow,
        logit_rows: IntRow,
    ) -> StepInputs:
        """From separate arrays."""
        arrays = (tokens, positions, slots, seq_starts, kv_lens, block_tables.ravel(), logit_rows)
        packed = np.concatenate(arrays).astype(np.int32, copy=False)
        sequences, width = block_tables.shape
        return cls(packed, tokens.size, sequences, width, logit_rows.size)

    def arrays(self, packed: IntRow | None = None) -> dict[str, IntRow]:
        """The arrays by name, as views of `packed` or of a buffer laid out alike."""
        memory = self.packed if packed is None else packed
        tokens, sequences, width, rows = self.sizes
        counts = (tokens, tokens, tokens, sequences + 1, sequences, sequences * width, rows)
        views, start = {}, 0
        for name, count in zip(self.NAMES, counts, strict=True):
            views[name] = memory[start : start + count]
            start += count
        views["block_tables"] = views["block_tables"].reshape(sequences, width)
        return views

    def __getattr__(self, name: str) -> IntRow:
        if name not in self.NAMES:
            raise AttributeError(name)
        return self.arrays()[name]


@dataclass(frozen=True)
class BestLogits:
    """The best logit of each row: the first NaN of a row, or its largest logit's lowest id.

    Attributes:
        ids: int32 ``[R]``.
        logits: float32 ``[R]``; not finite where there is no distribution to choose from.
    """

    ids: IntRow
    logits: NDArray[np.float32]


class Session(Protocol):
    """Runs steps over KV pools that it owns."""

    @property
    def limits(self) -> SessionLimits:
        """What this session can hold."""
        ...

    @property
    def blocks(self) -> BlockBytes | None:
        """The pools' memory, where a full block depends on nothing but the tokens up to its end.

        With the same bits however they came into it: then sequences that begin alike may share it.
        None: a block is worth nothing outside its sequence.
        """
        ...

    def step(self, inputs: StepInputs) -> NDArray[np.float32]:
        """Run one step: write the new tokens' K and V, return the logits of `logit_rows`.

        Returns:
            float32 ``[R, V]``, valid until the next step (the session may use the memory again).

        Raises:
            SpikeError: SPK616, the executor failed.
        """
        ...

    def best(self, inputs: StepInputs) -> BestLogits:
        """Run one step as `step` does, and return the best logit of each of `logit_rows` only.

        Raises:
            SpikeError: SPK616, the executor failed.
        """
        ...

    def close(self) -> None:
        """Let go of the model and the pools."""
        ...


def best_of(logits: NDArray[np.float32]) -> BestLogits:
    """The best of each row of logits, float32 ``[R, V]``."""
    ids = logits.argmax(-1).astype(np.int32)  # numpy's arg max stops at the first NaN
    return BestLogits(ids, logits[np.arange(len(logits)), ids])


def step_failed(cause: str) -> SpikeError:
    """The error of a session whose executor failed, `cause` saying why: SPK616."""
    return SpikeError(
        "SPK616",
        "engine",
        f"a step failed: {cause}",
        "The requests of that step have ended; if it happens again, run `spike verify` on the "
        "engine and report it.",
        ExitCode.INTERNAL,
    )


def engine_closed() -> SpikeError:
    """The error for using an engine after `close`: SPK617."""
    return SpikeError(
        "SPK617",
        "engine",
        "this engine was closed.",
        "Open it again with SpikeEngine(path).",
        ExitCode.USAGE,
    )
