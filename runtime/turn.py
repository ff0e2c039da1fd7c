"""A request's turn in a step: the tokens it puts in, and what it takes from their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .batch import Chunk
from .blocks import BlockPool
from .logprobs import token_logprobs
from .sampling import Choice, choose_best, choose_rows, unusable
from .scheduler import Share
from .session import BestLogits, SessionLimits
from .step_cost import StepShape

FloatRows = NDArray[np.float32]


class Turn:
    """What one request does in one step.

    Args:
        share: what the scheduler gave it.

    Attributes:
        tokens: ids of its part of the step.
        complete: whether its last row says what comes next.
        rows: which of its tokens need logits, as offsets.
        prompt_rows: how many of `rows`, the first ones, are about tokens of the prompt.
        drafts: tokens behind the known ones that may prove right; part of `tokens`.
        copies: blocks to copy before the step.
    """

    def __init__(self, share: Share) -> None:
        self.request = request = share.request
        self.count, self.complete = share.count, share.completes
        self.copies = list(share.copies)
        start = request.computed
        self.tokens = request.tokens[start : start + self.count]
        last = self.count - 1 if self.complete else self.count
        # Row t is about token t + 1.
        first = min(max(request.next_prompt_logprob - 1 - start, 0), last)
        self.rows = range(first, self.count)
        self.prompt_rows = last - first
        self.drafts: list[int] = []

    @property
    def takes_best(self) -> bool:
        """Whether the best logit of each of its rows is all that it needs."""
        return not self.prompt_rows and (not self.complete or self.request.sampler.takes_best)

    def chunk(self) -> Chunk:
        """Its part of the step's arrays."""
        assert self.request.table is not None  # running requests were admitted
        return Chunk(self.tokens, self.request.computed, self.request.table, self.rows)

    def draft(self, most: int, load: int, pool: BlockPool) -> int:
        """Add drafts, at most so many, and return how many. See `PromptLookup.propose`.

        Nobody is pre-empted for them: without a block for them there are none.
        """
        request, start = self.request, self.request.computed
        if request.lookup is None or request.table is None or not self.complete:
            return 0
        shared = load if request.params.speculative == "auto" else 1
        drafts = request.lookup.propose(request.tokens, most, shared)
        stop = start + self.count + len(drafts)
        if not drafts or request.table.missing(start, stop) > pool.available:
            return 0
        self.copies += request.table.grow(start, stop)
        request.lookup.drafted += len(drafts)
        self.drafts, self.tokens = drafts, [*self.tokens, *drafts]
        self.rows = range(self.rows.start, len(self.tokens))
        return len(drafts)

    def take_prompt(self, rows: FloatRows) -> None:
        """Log probabilities of tokens of the prompt from their `prompt_rows` rows."""
        request, at = self.request, self.request.next_prompt_logprob
        if not len(rows):
            return
        peak = float(rows.max())
        if not math.isfinite(peak):
            request.finish("error", unusable(peak))
            return
        counts = [request.params.prompt_logprobs or 0] * len(rows)
        tokens = request.tokens[at : at + len(rows)]
        request.prompt_logprobs.extend(token_logprobs(rows, tokens, counts))

    def take(self, choice: Choice | SpikeError, depth: int) -> bool:
        """A token was chosen behind the known ones and `depth` drafts; may finish the request.

        Returns:
            Whether it is the next draft: then that one's row says what comes after it.
        """
        request = self.request
        if isinstance(choice, SpikeError):
            request.finish("error", choice)
            return False
        drafted = depth < len(self.drafts)
        right = drafted and choice.token == self.drafts[depth]
        if drafted and request.lookup is not None:  # before it may end, and be looked at
            request.lookup.accepted += right
            if not right or depth + 1 == len(self.drafts):
                request.lookup.adapt(len(self.drafts), depth + right)
        request.accept(choice)
        if right:
            request.advance(1)  # its K and V are in the cache already
        return right and not request.finished


def add_drafts(turns: Sequence[Turn], budget: int, limits: SessionLimits, pool: BlockPool) -> None:
    """Fill what the step's budget of tokens leaves with drafts of those who may have them."""
    load = sum(turn.count for turn in turns)
    left = budget - load
    for turn in turns:
        known = len(turn.request.tokens)
        room = min(left, limits.draft_room(known), turn.request.cache_tokens - known)
        left -= turn.draft(room, load, pool)


def turns_shape(turns: Sequence[Turn]) -> StepShape:
    """What the step of these turns costs by."""
    parts = ((len(turn.tokens), turn.request.computed) for turn in turns)
    return StepShape.of(parts, sum(len(turn.rows) for turn in turns))


def settle(turns: Sequence[Turn], found: FloatRows | BestLogits) -> None:
    """Give every request what the step found for it.

    Args:
        turns: those of the step, in its order.
        found: their `rows`, one turn after the other: logits, float32 ``[R, V]``, or the best of
            each where all `turns` take that.
    """
    active: list[tuple[Turn, int]] = []  # with their next rows
    end = 0
    for turn in turns:
        start, end = end, end + len(turn.rows)
        if not isinstance(found, BestLogits):
            turn.take_prompt(found[start : start + turn.prompt_rows])
        turn.request.advance(turn.count)
        if turn.complete and not turn.request.finished:
            active.append((turn, start + turn.prompt_rows))
    depth = 0
    while active:
        pairs = zip(active, _choices(active, found), strict=True)
        active = [(turn, row + 1) for (turn, row), choice in pairs if turn.take(choice, depth)]
        depth += 1


def _choices(
    active: Sequence[tuple[Turn, int]], found: FloatRows | BestLogits
) -> list[Choice | SpikeError]:
    rows = [row for _, row in active]
    if isinstance(found, BestLogits):
        return choose_best(found, rows)
    samplers = [turn.request.sampler for turn, _ in active]
    return choose_rows([found[row] for row in rows], samplers)
