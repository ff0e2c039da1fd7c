"""The batch loop: carries out what the scheduler decides, step by step.

Iteration-level batching: sequences join and leave between steps. Not thread-safe: `SpikeEngine`
holds a lock around every call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .batch import Chunk, step_inputs
from .blocks import BlockPool, BlockTable
from .kv_tier import TierOptions, open_tier
from .scheduler import Scheduler, SchedulingPolicy
from .sequence import Request
from .session import BestLogits, Session, engine_closed, step_failed
from .stats import Counters, EngineStats
from .turn import Turn, add_drafts, settle, turns_shape

# Logits of one step's scored tokens: a chunk of 2,048 rows over 262,144 ids would be 2 GiB.
LOGITS_BYTES = 64 << 20


class BatchLoop:
    """Runs requests over one session.

    Args:
        session: executes the steps.
        max_num_tokens: tokens of one step; None = the session's own limit.
        policy: of the scheduler.
        tier: where evicted blocks go; None = nowhere.
        now: seconds of a clock that only goes forward (a simulation has its own).
    """

    def __init__(
        self,
        session: Session,
        max_num_tokens: int | None = None,
        policy: SchedulingPolicy | None = None,
        tier: TierOptions | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._session = session
        limits = self._limits = session.limits
        most = limits.max_num_tokens
        self._budget = most if max_num_tokens is None else min(most, max_num_tokens)
        policy = policy or SchedulingPolicy()
        blocks = session.blocks if policy.prefix_cache else None
        sizes = limits.num_blocks, limits.block_size, limits.recent_blocks
        self.pool = BlockPool(*sizes, shares=blocks is not None)
        self._tier = None if tier is None else open_tier(blocks, tier)
        if self._tier is not None:
            self.pool.on_evict = self._tier.store
        self._logit_rows = max(1, LOGITS_BYTES // (4 * limits.vocab_size))
        self.scheduler = Scheduler(
            self.pool, self._budget, limits.max_batch_size, policy, self._logit_rows, self._tier
        )
        self._now = now
        self._counters = Counters()
        self.closed = False

    @property
    def idle(self) -> bool:
        """Whether nobody waits or runs."""
        return not self.scheduler.waiting and not self.scheduler.running

    def stats(self) -> EngineStats:
        """Queues, blocks and counts as they are now."""
        return self._counters.stats(self.scheduler, self.pool, self._tier)

    def clear_prefix_cache(self) -> None:
        """Forget all blocks that nobody owns, also in the tier; nobody finds the others."""
        self.pool.clear_cache()
        if self._tier is not None:
            self._tier.clear()

    def add(self, request: Request, moment: float | None = None) -> None:
        """Queue a request that has room (`require_room`).

        Args:
            request: a new one.
            moment: when it came; None = now.

        Raises:
            SpikeError: SPK617, the loop was closed.
        """
        self._require_open()
        request.clock.submit(self._now, self._now() if moment is None else moment)
        self.scheduler.add(request)
        self._counters.requests += 1

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
        self.scheduler.forget_finished()

    def close(self) -> None:
        """End everybody and take nobody any more."""
        self.closed = True
        for request in self._everybody():
            self.cancel(request)
        if self._tier is not None:
            self._tier.close()

    def sweep(self) -> None:
        """End the requests that nobody reads any more."""
        for request in self._everybody():
            if request.abandoned:
                self.cancel(request)

    def step(self) -> float:
        """Run one step for whoever takes part; nothing happens when idle.

        Returns:
            0, or seconds after which to call again: the batching window is open, and no step ran.
        """
        self.sweep()
        delay = self.scheduler.hold(self._now())
        if delay == 0.0:
            self._advance()
        return delay

    def score(self, tokens: Sequence[int], chunk_tokens: int | None = None) -> NDArray[np.float32]:
        """Logits at every position of `tokens`, float32 ``[T, V]``; other requests wait.

        Args:
            tokens: ids, 1 <= T <= max_seq_len.
            chunk_tokens: at most this many in one step; None = as many as pays.
        """
        self._require_open()
        table = self._table(len(tokens))
        logits = np.empty((len(tokens), self._limits.vocab_size), np.float32)
        size = min(self._budget, self._logit_rows)
        size = size if chunk_tokens is None else min(size, chunk_tokens)
        try:
            for start in range(0, len(tokens), size):
                part = tokens[start : start + size]
                inputs = step_inputs([Chunk(part, start, table, range(len(part)))])
                logits[start : start + len(part)] = self._session.step(inputs)
        finally:
            table.release()
        return logits

    def _everybody(self) -> list[Request]:
        return [*self.scheduler.running, *self.scheduler.waiting]

    def _table(self, tokens: int) -> BlockTable:
        """Room for `tokens` tokens, after as many steps of the others as that takes."""
        table = self.pool.table()
        while table.missing(0, tokens) > self.pool.available:
            if self.idle:
                raise SpikeError(
                    "SPK615",
                    "KV cache",
                    f"{tokens} tokens do not fit in {self.pool.num_blocks} blocks of "
                    f"{self.pool.block_size} tokens.",
                    "Score a shorter text or give the engine a larger kv_cache_memory.",
                )
            self.sweep()
            self._advance()
        table.grow(0, tokens)
        return table

    def _advance(self) -> None:
        started = self._now()
        turns = self._plan(started)
        if not turns:
            return
        shape = turns_shape(turns)
        if self._take_turns(turns):
            self._observe_first_tokens(turns)
            seconds = self._now() - started
            self.scheduler.costs.observe(shape, seconds)
            self.scheduler.lengths.observe(seconds)
            self._counters.count_step(shape, seconds)
        self.scheduler.forget_finished()

    def _plan(self, now: float) -> list[Turn]:
        """Who takes part, with what. If that is torn, nobody is left between two queues."""
        known = self._everybody()
        try:
            turns = [Turn(share) for share in self.scheduler.plan(now)]
            add_drafts(turns, self._budget, self._limits, self.pool)
            return turns
        except Exception as error:  # it would come again: they end
            self._fail(known, error, "planning it, ")
            self.scheduler.start_over(known)
            return []
        except BaseException:  # an interrupt
            self.scheduler.start_over(known)
            raise

    def _take_turns(self, turns: Sequence[Turn]) -> bool:
        """Run the step and give everybody what it found; whoever can't go on ends.

        Returns:
            Whether the step was run to its end.
        """
        ran = False
        requests = [turn.request for turn in turns]
        try:
            found = self._run(turns)
            ran = True
            with np.errstate(all="ignore"):  # the caller's settings are not for everybody's step
                settle(turns, found)
            return True
        except Exception as error:  # whatever it was: a reader must never wait for ever
            self._fail(requests, error)
            return False
        except BaseException:  # an interrupt of the thread that runs everybody's step
            if ran:  # who has drawn, advanced or been counted is unknown
                self._fail(requests, step_failed("it was interrupted"))
            else:  # the tokens are right, the cache may be half written: it is computed again
                for request in requests:
                    self.scheduler.preempt(request)
            self.scheduler.forget_finished()
            raise

    def _run(self, turns: Sequence[Turn]) -> NDArray[np.float32] | BestLogits:
        copies = [pair for turn in turns for pair in turn.copies]
        if copies and self._session.blocks is not None:
            self._session.blocks.copy(copies)
        inputs = step_inputs([turn.chunk() for turn in turns])
        if all(turn.takes_best for turn in turns):
            return self._session.best(inputs)
        return self._session.step(inputs)

    def _observe_first_tokens(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            clock = turn.request.clock
            if turn.complete and clock.first is not None and not turn.request.counted:
                turn.request.counted = True
                self._counters.count_prompt(turn.request)
                self.scheduler.window.observe(clock.first - clock.submitted)

    def _fail(self, requests: Sequence[Request], error: Exception, doing: str = "") -> None:
        """A failed step leaves the cache of its sequences unknown: they all end.

        `doing`: what failed with an error that is none of ours, if not the step itself.
        """
        if not isinstance(error, SpikeError):
            error = step_failed(f"{doing}{type(error).__name__}: {error}")
        for request in requests:
            request.finish("error", error)

    def _require_open(self) -> None:
        if self.closed:
            raise engine_closed()
