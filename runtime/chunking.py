"""How many tokens of prompts go into a step beside the sequences that are decoding.

Decoding never waits for a prompt, it only shares steps with it: what a prompt may add to a step is
bounded, so that the time between two tokens of the others stays within a small multiple of what it
is without the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import require_count, require_real
from .step_cost import CostModel, StepShape

CHUNK_UNIT = 4  # tokens: beyond some context, even 16 cost more than all who decode


@dataclass(frozen=True)
class ChunkPolicy:
    """Limits prompt tokens in steps with decoding sequences; alone, prompts take the whole step.

    Attributes:
        slack: such a step may take this many times as long as without prompts, as foretold; with
            1.75 the slowest hundredth stays below three times.
        seconds: and at least this long; None = no such floor.
        unmeasured: tokens while the cost model knows nothing yet. From there a step may be at
            most twice as wide as any that was measured: one that waited for a single far too
            large chunk would be a stall, whatever is learnt from it.

    Raises:
        SpikeError: SPK608, a value out of range.
    """

    slack: float = 1.75
    seconds: float | None = None
    unmeasured: int = 16

    def __post_init__(self) -> None:
        require_real("slack", self.slack, finite=False)
        require_real("seconds", self.seconds, finite=False, optional=True)
        require_count("unmeasured", self.unmeasured, optional=False)

    def most(self, model: CostModel, decoding: StepShape, start: int, left: int) -> int:
        """Most prompt tokens, between one unit and `left` (whichever is less, at least).

        Args:
            model: knows what steps cost.
            decoding: the step without prompts.
            start: position of the prompt's first token.
            left: what the step's token limit leaves.
        """
        if decoding.tokens == 0 or left <= CHUNK_UNIT:
            return left
        if (cost := model.cost) is None:
            return min(left, self.unmeasured)
        reach = max(CHUNK_UNIT, self.unmeasured, 2 * model.widest - decoding.tokens)
        left = min(left, reach)
        limit = max(self.seconds or 0.0, self.slack * cost.seconds(decoding))
        low, high = 1, left // CHUNK_UNIT
        while low < high:  # most units that keep to the limit
            middle = (low + high + 1) // 2
            within = cost.seconds(decoding.plus(middle * CHUNK_UNIT, start)) <= limit
            low, high = (middle, high) if within else (low, middle - 1)
        whole = cost.seconds(decoding.plus(left, start)) <= limit
        return left if whole else low * CHUNK_UNIT
