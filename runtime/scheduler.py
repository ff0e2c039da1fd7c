"""Who is in the batch, and who takes part in the next step with how many tokens.

Decides only; `BatchLoop` carries it out. Iteration-level batching (Orca, Yu et al. 2022), with
prompts in chunks beside decoding sequences (Sarathi-Serve, Agrawal et al. 2024). Blocks are taken
on demand. When a sequence needs one and none is left, the last in rank is pre-empted: it gives all
its blocks back and computes its tokens again later. So the first in rank always finishes, then the
next: no deadlock.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from .batch_window import BatchWindow, WindowPolicy
from .blocks import BlockPool, BlockTable, Copies
from .checks import require_instance
from .chunking import ChunkPolicy
from .kv_tier import KvTier
from .length_order import LengthOrder, LengthPolicy
from .qos import QosPolicy
from .sequence import Request
from .step_cost import CostModel, StepShape


@dataclass(frozen=True)
class SchedulingPolicy:
    """What may be chosen about scheduling; nothing of it changes anybody's tokens.

    Attributes:
        qos: who goes first.
        chunks: prompts beside decoding sequences.
        window: waiting for company.
        lengths: who is expected to end soon goes earlier.
        prefix_cache: whether full blocks are remembered and shared (benchmarks of prompts: no).

    Raises:
        SpikeError: SPK608, a part that is of another kind.
    """

    qos: QosPolicy = field(default_factory=QosPolicy)
    chunks: ChunkPolicy = field(default_factory=ChunkPolicy)
    window: WindowPolicy = field(default_factory=WindowPolicy)
    lengths: LengthPolicy = field(default_factory=LengthPolicy)
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        require_instance("qos", self.qos, QosPolicy)
        require_instance("chunks", self.chunks, ChunkPolicy)
        require_instance("window", self.window, WindowPolicy)
        require_instance("lengths", self.lengths, LengthPolicy)
        require_instance("prefix_cache", self.prefix_cache, bool)


@dataclass(frozen=True)
class Share:
    """A request's part in a step.

    Attributes:
        request: whose.
        count: its next tokens; its table has room for them.
        completes: no known token is left uncomputed then, so that the next one can be chosen.
        copies: blocks to copy before the step.
    """

    request: Request
    count: int
    completes: bool
    copies: Copies


class Scheduler:
    """Waiting and running requests, both in rank order.

    Args:
        pool: the KV blocks.
        max_num_tokens: of one step.
        max_batch_size: sequences of one step.
        policy: see there.
        prompt_rows: most tokens of a step from prompts whose log probabilities are wanted: each
            makes a row of logits.
        tier: of evicted blocks, if there is one.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_num_tokens: int,
        max_batch_size: int,
        policy: SchedulingPolicy,
        prompt_rows: int,
        tier: KvTier | None = None,
    ) -> None:
        self._pool = pool
        self._tier = tier
        self._policy = policy
        self._budget = max_num_tokens
        self._prompt_rows = prompt_rows
        # No more than the budget: so every running request gets at least one token a step.
        self._seats = min(max_batch_size, max_num_tokens)
        self._arrivals = 0
        self.window = BatchWindow(self._policy.window)
        self.costs = CostModel()
        self.lengths = LengthOrder(policy.lengths)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request; its clock has been started."""
        self._arrivals += 1
        request.rank = (0.0, self._arrivals)
        self._delay(request, self.lengths.unknown)
        insort(self.waiting, request, key=_rank)

    def hold(self, now: float) -> float:
        """Seconds to wait for company; 0 = go on."""
        if self.running or not self.waiting or len(self.waiting) >= self._seats:
            return 0.0
        return self.window.remaining(now, min(r.clock.submitted for r in self.waiting))

    def plan(self, now: float) -> list[Share]:
        """The next step: who decodes first, then prompts with what is left; empty when idle."""
        self._order(now)
        self._admit(now)
        decoding = self._decoding()
        left = self._budget - sum(share.count for share in decoding)
        return decoding + self._prompts(left, decoding)

    def forget_finished(self) -> None:
        """Drop the requests that have ended."""
        self.running = [request for request in self.running if not request.finished]
        self.waiting = [request for request in self.waiting if not request.finished]

    def preempt(self, request: Request) -> None:
        """Take a running request's blocks; it waits again, in its rank."""
        self.running.remove(request)
        request.give_up_cache()
        self.preemptions += 1
        insort(self.waiting, request, key=_rank)

    def start_over(self, requests: Sequence[Request]) -> None:
        """Nobody runs and all blocks are blank; those of the requests that haven't ended wait.

        Args:
            requests: everybody there was before something went wrong, in queues or between them.
        """
        for request in requests:
            if request.table is not None:
                request.give_up_cache()
                self.preemptions += 1
        self._pool.reset()
        self.running = []
        self.waiting = sorted((r for r in requests if not r.finished), key=_rank)

    def _order(self, now: float) -> None:
        """Rank new requests by their expected length, and the overdue by their submission.

        A rank moves twice at most: the second time to the front of its class, for good.
        """
        if not self.lengths.unknown:  # nobody is ever delayed
            return
        fresh = [request for request in self.waiting if not request.ordered]
        if fresh and self.lengths.due(now):
            for request, seconds in zip(fresh, self.lengths.delays(fresh), strict=True):
                self._delay(request, seconds)
                request.ordered = True
        for request in (*self.waiting, *self.running):
            if self.lengths.overdue(request, now):
                self._delay(request, 0.0)
                request.ordered = True  # whatever would be guessed
        self.waiting.sort(key=_rank)
        self.running.sort(key=_rank)

    def _delay(self, request: Request, seconds: float) -> None:
        """Rank a request so much behind its place by class and submission."""
        place = self._policy.qos.rank(request.qos, request.clock.submitted)
        request.rank = (place + seconds, request.rank[1])
        request.delayed = seconds > 0

    def _admit(self, now: float) -> None:
        while self.waiting and (table := self._seat(self.waiting[0])) is not None:
            request = self.waiting.pop(0)
            request.enter_cache(table, now)
            insort(self.running, request, key=_rank)

    def _seat(self, request: Request) -> BlockTable | None:
        """A table with room for all known tokens, if there is a seat and room, or can be made."""
        may = self._policy.qos.may_displace
        lower = [r for r in self.running if r.rank > request.rank and may(request.qos, r.qos)]
        if len(self.running) - len(lower) >= self._seats:
            return None
        table, size = self._pool.table(request.cache_salt), len(request.tokens)
        start = table.adopt(request.tokens) if request.reuses_prefix else 0
        victims = self._in_the_way(table.missing(start, size), lower)
        if victims is None:
            table.release()
            return None
        for victim in victims:
            self.preempt(victim)
        if self._tier is not None and request.reuses_prefix:
            self._tier.restore(self._pool, table, request.tokens, self.costs.cost)
        table.grow(table.committed, size)
        return table

    def _in_the_way(self, blocks: int, lower: list[Request]) -> list[Request] | None:
        """The last of `lower`, as many as have to go for so many blocks; None if all are too few.

        Beside the running ones, a block for each of them stays free: who enters must not be thrown
        out again by the next token of somebody else.
        """
        for count in range(len(lower) + 1):
            victims = lower[len(lower) - count :]
            stay = len(self.running) - count
            room = self._pool.available + self._pool.freed_by(_tables(victims))
            if stay < self._seats and blocks + stay <= room:
                return victims
        return None

    def _decoding(self) -> list[Share]:
        """All tokens of those who have one, or a few, at a time; one stays for everybody else."""
        shares: list[Share] = []
        left = self._budget - len(self.running)
        for request in [request for request in self.running if not request.catching_up]:
            count = min(request.pending, 1 + left)
            # It may have been pre-empted for one before it.
            if request.table is not None and self._make_room(request, count):
                shares.append(_share(request, count))
                left -= count - 1
        return shares

    def _make_room(self, request: Request, count: int) -> bool:
        """Pre-empt the last in rank until the request has room; False if it was the last itself."""
        table, start = request.table, request.computed
        assert table is not None  # it runs
        while table.missing(start, start + count) > self._pool.available:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _prompts(self, left: int, decoding: Sequence[Share]) -> list[Share]:
        """Chunks of prompts in rank order; admission gave them their blocks."""
        prompts = [request for request in self.running if request.catching_up]
        if not prompts:
            return []
        rows = self._prompt_rows
        start = prompts[0].computed
        left = self._policy.chunks.most(self.costs, step_shape(decoding), start, left)
        shares = []
        for request in prompts:
            request.skip_known()
            count = min(request.pending, left)
            if request.scores_prompt:
                count = min(count, rows)
                rows -= count
            if count:
                shares.append(_share(request, count))
                left -= count
        return shares


def _tables(requests: Sequence[Request]) -> list[BlockTable]:
    return [request.table for request in requests if request.table is not None]


def _share(request: Request, count: int) -> Share:
    assert request.table is not None  # it runs
    start, completes = request.computed, count == request.pending
    return Share(request, count, completes, request.table.grow(start, start + count))


def step_shape(shares: Sequence[Share]) -> StepShape:
    """What the step of these shares costs by."""
    parts = ((share.count, share.request.computed) for share in shares)
    return StepShape.of(parts, sum(share.completes for share in shares))


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
