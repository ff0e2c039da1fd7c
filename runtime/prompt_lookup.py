"""Drafts without a second model: what followed when the newest tokens came the last time.

The model checks a draft by computing its tokens in one ragged step with the token before them. The
sampler then chooses from each row as it would without drafts, and goes on as long as it chose what
the draft said. So the answer is the same, token by token and draw by draw; a draft is accepted with
the probability that the model gives it, which is all that rejection sampling allows a draft that
isn't random itself (Leviathan et al. 2023, "Fast Inference from Transformers via Speculative
Decoding"; lookup: Saxena 2023, "Prompt Lookup Decoding").

Drafts pay where texts repeat themselves (summaries, edits, code) and cost time where they are
wrong. So their length follows the share of drafted tokens that were right, and where that is low
there are none for a while.
"""

from __future__ import annotations

from dataclasses import dataclass

from .sampling_params import SamplingParams
from .session import SessionLimits

# Tokens that have to be the same before what followed them is proposed. Of 1 to 5, and the longest
# match first, none gave more on the prompts of benchmarks/prompt_lookup.py.
MATCH = 2
# The kernels compute a step's tokens in tiles of eight: the ninth costs as much as three others.
MOST_DRAFTS = 7
# What a further token adds to the time of a step of one token, and by how much drafts must win.
# Measured on SmolLM2 135M in Q4_K, 2 cores: 1.10, 1.24, 1.48, 1.62, 1.79, 1.93, 2.07 for 2 to 8.
TOKEN_COST = 0.15
MARGIN = 1.05
# Weight of the newest drafted token in the share of accepted ones; the share supposed at first.
WEIGHT = 0.1
FIRST_SHARE = 0.5
# Tokens without drafts once they don't pay; twice as many the next time.
FIRST_PAUSE, LONGEST_PAUSE = 16, 512


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
        self._pause = FIRST_PAUSE
        self._resume = 0
        self._length = 0  # of the sequence at the last proposal
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
        """Whether drafts don't pay at present."""
        return self._length < self._resume

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
        self._length = len(tokens)
        count = 0 if self.paused else min(most, best_length(self._share, load))
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
        if best_length(self._share, 1) == 0:
            self._resume = self._length + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._share = FIRST_SHARE
        elif accepted == drafted:
            self._pause = FIRST_PAUSE

    def _index(self, tokens: list[int]) -> None:
        for at in range(self._indexed, len(tokens)):
            self._followed[tuple(tokens[at - MATCH : at])] = at
        self._indexed = max(self._indexed, len(tokens))


def best_length(share: float, load: int) -> int:
    """The number of drafts that promises most tokens in the time; 0 when none pays.

    With a share `a` of right ones, k drafts give 1 + a + ... + a^k tokens in a time of 1 + k * c.

    Args:
        share: of drafted tokens that are right, 0 <= a < 1.
        load: tokens of the step without drafts; c is the cost of a token of each of them.
    """
    cost = TOKEN_COST * load / (1 + TOKEN_COST * (load - 1))
    best, length, tokens, term = MARGIN, 0, 1.0, 1.0
    for count in range(1, MOST_DRAFTS + 1):
        term *= share
        tokens += term
        if tokens / (1 + cost * count) > best:
            best, length = tokens / (1 + cost * count), count
    return length
