"""A request's turn in a step: the tokens it puts in, and what it takes from their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import SpikeError
from .batch import Chunk
from .logprobs import token_logprobs
from .sampling import Choice, choose_rows, unusable
from .sequence import Request

FloatRows = NDArray[np.float32]


class Turn:
    """What one request does in one step.

    Args:
        request: running, with a table.
        count: how many of its known tokens are computed, 1 <= count <= `request.pending`.

    Attributes:
        tokens: ids of its part of the step.
        complete: whether its last row says what comes next.
        rows: which of its tokens need logits, as offsets.
        prompt_rows: how many of `rows`, the first ones, are about tokens of the prompt.
        drafts: tokens behind the known ones that may prove right; part of `tokens`.
    """

    def __init__(self, request: Request, count: int) -> None:
        self.request = request
        self.count = count
        start = request.computed
        self.tokens = request.tokens[start : start + count]
        self.complete = count == request.pending
        last = count - 1 if self.complete else count
        # Row t is about token t + 1.
        first = min(max(request.next_prompt_logprob - 1 - start, 0), last)
        self.rows = range(first, len(self.tokens))
        self.prompt_rows = last - first
        self.drafts: list[int] = []

    def draft(self, most: int, load: int) -> int:
        """Add drafts, at most so many, and return how many. See `PromptLookup.propose`."""
        request = self.request
        if request.lookup is None or not self.complete:
            return 0
        room = min(most, request.limit - 1 - len(request.tokens))
        shared = load if request.params.speculative == "auto" else 1
        self.drafts = request.lookup.propose(request.tokens, room, shared)
        self.tokens = [*self.tokens, *self.drafts]
        self.rows = range(self.rows.start, len(self.tokens))
        return len(self.drafts)

    def chunk(self) -> Chunk:
        """Its part of the step's arrays."""
        assert self.request.table is not None  # running requests were admitted
        return Chunk(self.tokens, self.request.computed, self.request.table, self.rows)

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
        right = depth < len(self.drafts) and choice.token == self.drafts[depth]
        request.computed += right  # its K and V are in the cache already
        request.accept(choice)
        goes_on = right and not request.finished
        if self.drafts and request.lookup is not None and not goes_on:
            request.lookup.record(len(self.drafts), depth + right)
        return goes_on


def settle(turns: Sequence[Turn], logits: FloatRows) -> None:
    """Give every request what the step found for it.

    Args:
        turns: those of the step, in its order.
        logits: their `rows`, one turn after the other, float32 ``[R, V]``.
    """
    active: list[tuple[Turn, int]] = []  # with their next rows
    end = 0
    for turn in turns:
        start, end = end, end + len(turn.rows)
        turn.take_prompt(logits[start : start + turn.prompt_rows])
        turn.request.computed += turn.count
        if turn.complete and not turn.request.finished:
            active.append((turn, start + turn.prompt_rows))
    depth = 0
    while active:
        rows = [logits[row] for _, row in active]
        chosen = choose_rows(rows, [turn.request.sampler for turn, _ in active])
        pairs = zip(active, chosen, strict=True)
        active = [(turn, row + 1) for (turn, row), choice in pairs if turn.take(choice, depth)]
        depth += 1
