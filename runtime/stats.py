"""What an engine has done and is doing, in numbers."""

from __future__ import annotations

from dataclasses import dataclass

from .blocks import BlockPool
from .kv_tier import KvTier
from .scheduler import Scheduler
from .sequence import Request
from .step_cost import StepShape


@dataclass(frozen=True)
class EngineStats:
    """A moment of an engine.

    Attributes:
        waiting, running: requests in the queue and in the batch.
        blocks_free: KV blocks that hold nothing.
        blocks_cached: blocks that nobody owns and whose tokens may come again.
        blocks_owned: blocks of running requests.
        blocks_evicted: cached blocks given up for new tokens, so far.
        requests: submitted so far.
        preemptions: times a running request lost its blocks.
        steps, step_seconds: run so far, and the time in them.
        tokens: computed in steps, so far.
        prompt_tokens: of requests that have come to their first token.
        cached_prompt_tokens: of these, found in the prefix cache.
        tier_blocks: evicted blocks in the host's file.
        tier_restored, tier_damaged: blocks read back so far, and found changed.
        batching_window: seconds an idle engine waits for company now.
    """

    waiting: int
    running: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    blocks_evicted: int
    requests: int
    preemptions: int
    steps: int
    step_seconds: float
    tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    tier_blocks: int
    tier_restored: int
    tier_damaged: int
    batching_window: float

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the prefix cache had."""
        return self.cached_prompt_tokens / max(1, self.prompt_tokens)


@dataclass
class Counters:
    """What the loop counts."""

    requests: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0

    def count_step(self, shape: StepShape, seconds: float) -> None:
        """One more step."""
        self.steps += 1
        self.step_seconds += seconds
        self.tokens += shape.tokens

    def count_prompt(self, request: Request) -> None:
        """One more request has come to its first token."""
        self.prompt_tokens += request.prompt_tokens
        self.cached_prompt_tokens += request.cached_tokens

    def stats(self, scheduler: Scheduler, pool: BlockPool, tier: KvTier | None) -> EngineStats:
        """The counts beside what scheduler, pool and tier hold now."""
        return EngineStats(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            blocks_free=pool.available - pool.resting,
            blocks_cached=pool.resting,
            blocks_owned=pool.owned,
            blocks_evicted=pool.evicted,
            requests=self.requests,
            preemptions=scheduler.preemptions,
            steps=self.steps,
            step_seconds=self.step_seconds,
            tokens=self.tokens,
            prompt_tokens=self.prompt_tokens,
            cached_prompt_tokens=self.cached_prompt_tokens,
            tier_blocks=0 if tier is None else len(tier),
            tier_restored=0 if tier is None else tier.restored,
            tier_damaged=0 if tier is None else tier.damaged,
            batching_window=scheduler.window.seconds,
        )
