"""Drafts without a second model: what followed when the newest tokens came the last time.

The model checks a draft by computing its tokens in one ragged step with the token before them. The
sampler then chooses from each row as it would without drafts, and goes on as long as it chose what
the draft said. So the answer is the same, token by token and draw by draw; a draft is accepted with
the probability that the model gives it, which is all that rejection sampling allows a draft that
isn't random itself (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding"; lookup: Saxena 2023, "Prompt Lookup Decoding").

Drafts pay where texts repeat themselves (summaries, edits, code) and cost time where they are
wrong. So their length follows the share of drafted tokens that were right; and what they cost is
booked against the steps they saved: a request that has lost a little drafts no more until it has
earned the next try, by a hundredth of a step with every token. So drafts lose at most the first
loan and that hundredth, whatever the text.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sampling_params import SamplingParams
from .session import SessionLimits

# Tokens that have to be the same before what followed them is proposed. Of 1 to 5, and the longest
# match first, none gave more on the prompts of benchmarks/prompt_lookup.py.
MATCH = 2
# The kernels compute a step's tokens in tiles of eight: the ninth costs as much as ten others.
MOST_DRAFTS = 7
# What drafts add to the time of a step of one token: the first one besides, and each. Measured on
# SmolLM2 135M in Q4_K, 2 cores: 1.16, 1.26, 1.36, 1.26, 1.35, 1.45, 1.56 for 2 to 8 tokens.
FIRST_COST, TOKEN_COST = 0.1, 0.065
MARGIN = 1.05  # by how much a longer draft must win
# Weight of the newest drafted token in the share of accepted ones; the share supposed at first.
WEIGHT = 0.1
FIRST_SHARE = 0.5
# Steps that drafts may lose: at first, more with each token, and never more than at last.
LOAN, INCOME, MOST_CREDIT = 0.3, 0.01, 4.0


@dataclass(frozen=True)
class Speculation:
    """What drafts did for a request.

    Attributes:
        drafted: tokens proposed and computed.
        accepted: of these, tokens the sampler chose too: so many steps were saved.
        off: why there were none, or none any more at the end; empty when they were on.
    """

    drafted: int
    accepted: int
    off: str = ""


class PromptLookup:
    """Proposes tokens for one request from its own prompt and output.

    Args:
        off: why it never may; empty = it may.

    Attributes:
        drafted, accepted: as in `Speculation`; counted by who uses the proposals.
    """

    def __init__(self, off: str = "") -> None:
        self._off = off
        self._followed: dict[tuple[int, ...], int] = {}  # tokens -> where the next one stood
        self._indexed = MATCH
        self._share = FIRST_SHARE
        self._credit = LOAN
        self._length = 0  # of the sequence at the last proposal
        self._load = 1  # then
        self.drafted = self.accepted = 0

    @classmethod
    def start(cls, params: SamplingParams, limits: SessionLimits) -> PromptLookup | None:
        """For a request of a session; None when it doesn't ask for drafts."""
        if params.speculative == "off":
            return None
        if params.structured:
            return cls("a grammar says what may come, and forces what it can")
        if limits.group_tokens == 0:
            return cls("a functional engine takes no token back")
        return cls()

    @property
    def paused(self) -> bool:
        """Whether drafts have cost more than they may."""
        return self._credit < draft_cost(1, self._load)

    @property
    def result(self) -> Speculation:
        """What it did so far."""
        off = "few drafts were right" if self.paused else self._off
        return Speculation(self.drafted, self.accepted, off)

    def propose(self, tokens: list[int], most: int, load: int) -> list[int]:
        """Tokens that may come next, none if nothing like the newest ones came before.

        Args:
            tokens: the sequence, which only ever grows.
            most: no more than so many.
            load: tokens of the step without drafts, those of other sequences included: the more
                they are, the less is a step's time that of reading the weights.
        """
        if self._off:
            return []
        self._index(tokens)
        grown = len(tokens) - self._length if self._length else 0
        self._credit = min(self._credit + INCOME * grown, MOST_CREDIT)
        self._length, self._load = len(tokens), load
        worth = int(draft_cost(1, load) < 1)  # one, to try
        count = min(most, max(worth, best_length(self._share, load)))
        while count > 0 and draft_cost(count, load) > self._credit:
            count -= 1
        at = self._followed.get(tuple(tokens[-MATCH:]))
        if at is None or count < 1:
            return []
        drafts: list[int] = []
        for place in range(at, at + count):  # a short period goes round and round
            drafts.append(tokens[place] if place < len(tokens) else drafts[place - len(tokens)])
        return drafts

    def adapt(self, drafted: int, accepted: int) -> None:
        """Draft more or less, by how a proposal did."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._share += WEIGHT * (right - self._share)
        self._credit += accepted - draft_cost(drafted, self._load)

    def _index(self, tokens: list[int]) -> None:
        for at in range(self._indexed, len(tokens)):
            self._followed[tuple(tokens[at - MATCH : at])] = at
        self._indexed = max(self._indexed, len(tokens))


def draft_cost(count: int, load: int) -> float:
    """Steps' worth of time that so many drafts take, from all who are in the step.

    Args:
        count: of drafts, at least one.
        load: tokens of the step without them.
    """
    return (FIRST_COST + TOKEN_COST * count) * load / (1 + TOKEN_COST * (load - 1))


def best_length(share: float, load: int) -> int:
    """The number of drafts that promises most tokens in the time; 0 when none pays.

    With a share `a` of right ones, k drafts give 1 + a + ... + a^k tokens in a time of 1 + their
    cost.

    Args:
        share: of drafted tokens that are right, 0 <= a < 1.
        load: tokens of the step without drafts.
    """
    best, length, tokens, term = MARGIN, 0, 1.0, 1.0
    for count in range(1, MOST_DRAFTS + 1):
        term *= share
        tokens += term
        speed = tokens / (1 + draft_cost(count, load))
        if speed > best:
            best, length = speed, count
    return length
