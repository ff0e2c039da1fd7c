"""The batch loop: who takes part in the next step, and what its logits mean for them.

Iteration-level batching: sequences join and leave between steps. Every running sequence that only
lacks its newest token gets it first; what is left of `max_num_tokens` goes to prompts, oldest
first, in chunks. Waiting requests are let in in order, when the block pool can promise them room.

Not thread-safe: `SpikeEngine` holds a lock around every call.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .batch import Chunk, step_inputs
from .blocks import BlockPool, BlockTable
from .sequence import Request
from .session import Session, engine_closed, step_failed
from .turn import Turn, settle

# Scored logits of one step: a chunk of 2,048 rows over 262,144 ids would be 2 GiB.
SCORE_BYTES = 64 << 20


class BatchLoop:
    """Runs requests over one session.

    Args:
        session: executes the steps.
        max_num_tokens: tokens of one step; None = the session's own limit.
    """

    def __init__(self, session: Session, max_num_tokens: int | None = None) -> None:
        self._session = session
        self._limits = session.limits
        most = self._limits.max_num_tokens
        self._budget = most if max_num_tokens is None else min(most, max_num_tokens)
        self.pool = BlockPool(
            self._limits.num_blocks, self._limits.block_size, self._limits.recent_blocks
        )
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self.closed = False

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self._waiting and not self._running

    def add(self, request: Request) -> None:
        """Queue a request that has room (`require_room`).

        Raises:
            SpikeError: SPK617, the loop was closed.
        """
        self._require_open()
        request.clock.submitted = time.perf_counter()
        self._waiting.append(request)

    def require_room(self, request: Request) -> None:
        """Check that the request can be let in at some time.

        Raises:
            SpikeError: SPK615, it could never be let in: the whole pool is too small for it.
        """
        needed = self.pool.blocks_for(request.cache_tokens)
        if needed > self.pool.num_blocks:
            raise SpikeError(
                "SPK615",
                "KV cache",
                f"the request may need {request.cache_tokens} tokens of cache, the pool has "
                f"{self.pool.num_blocks} blocks of {self.pool.block_size} tokens.",
                "Lower max_tokens or give the engine a larger kv_cache_memory.",
            )

    def cancel(self, request: Request) -> None:
        """End a request now; its blocks are free when this returns."""
        request.finish("cancelled")
        self._forget_finished()

    def close(self) -> None:
        """End everybody and take nobody any more."""
        self.closed = True
        for request in (*self._running, *self._waiting):
            self.cancel(request)

    def sweep(self) -> None:
        """End the requests that nobody reads any more."""
        abandoned = [r for r in (*self._running, *self._waiting) if r.abandoned]
        for request in abandoned:
            self.cancel(request)

    def step(self) -> None:
        """Run one step for whoever takes part; nothing happens when idle."""
        self.sweep()
        self._admit()
        plan = self._plan()
        if not plan:
            return
        try:
            settle(plan, self._session.step(step_inputs([turn.chunk() for turn in plan])))
        except Exception as error:  # whatever it was: a reader must never wait for ever
            cause = f"{type(error).__name__}: {error}"
            failure = error if isinstance(error, SpikeError) else step_failed(cause)
            self._fail([turn.request for turn in plan], failure)
        self._forget_finished()

    def score(self, tokens: Sequence[int], chunk_tokens: int | None = None) -> NDArray[np.float32]:
        """Logits at every position of `tokens`, float32 ``[T, V]``; other requests wait.

        Args:
            tokens: ids, 1 <= T <= max_seq_len.
            chunk_tokens: at most this many in one step; None = as many as pays.
        """
        self._require_open()
        table = self._promise(len(tokens))
        logits = np.empty((len(tokens), self._limits.vocab_size), np.float32)
        size = min(self._budget, self._most_rows)
        size = size if chunk_tokens is None else min(size, chunk_tokens)
        try:
            for start in range(0, len(tokens), size):
                part = tokens[start : start + size]
                inputs = step_inputs([Chunk(part, start, table, range(len(part)))])
                logits[start : start + len(part)] = self._session.step(inputs)
        finally:
            table.release()
        return logits

    def _promise(self, tokens: int) -> BlockTable:
        """Room for `tokens` tokens, after as many steps of the others as that takes."""
        while (table := self.pool.promise(tokens)) is None:
            if self.idle:
                raise SpikeError(
                    "SPK615",
                    "KV cache",
                    f"{tokens} tokens do not fit in {self.pool.num_blocks} blocks of "
                    f"{self.pool.block_size} tokens.",
                    "Score a shorter text or give the engine a larger kv_cache_memory.",
                )
            self.step()
        return table

    def _admit(self) -> None:
        # No more than the budget: so every running request gets at least one token a step.
        most = min(self._limits.max_batch_size, self._budget)
        while self._waiting and len(self._running) < most:
            table = self.pool.promise(self._waiting[0].cache_tokens)
            if table is None:
                return
            request = self._waiting.popleft()
            request.table = table
            request.clock.started = time.perf_counter()
            self._running.append(request)

    @property
    def _most_rows(self) -> int:
        """Rows of logits that fit into `SCORE_BYTES`, at least one."""
        return max(1, SCORE_BYTES // (4 * self._limits.vocab_size))

    def _plan(self) -> list[Turn]:
        """Who takes part with how many tokens: single tokens first, then chunks of prompts."""
        plan: list[Turn] = []
        left = self._budget
        for request in sorted(self._running, key=lambda request: request.pending > 1):
            count = min(request.pending, left)
            if count == 0:
                break
            if request.next_prompt_logprob < request.prompt_tokens:
                count = min(count, self._most_rows)
            plan.append(Turn(request, count))
            left -= count
        load = self._budget - left
        for turn in plan:
            room = self._limits.draft_room(len(turn.request.tokens))
            left -= turn.draft(min(left, room), load)
        return plan

    def _fail(self, requests: list[Request], error: SpikeError) -> None:
        """A failed step leaves the cache of its sequences unknown: they all end."""
        for request in requests:
            request.finish("error", error)
        self._forget_finished()

    def _require_open(self) -> None:
        if self.closed:
            raise engine_closed()

    def _forget_finished(self) -> None:
        self._running = [request for request in self._running if not request.finished]
        if any(request.finished for request in self._waiting):
            self._waiting = deque(r for r in self._waiting if not r.finished)
