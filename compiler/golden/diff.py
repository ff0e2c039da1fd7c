"""What differs between two golden sets: after a library update, or a change of the model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .sets import GoldenPrompt, GoldenSet


@dataclass(frozen=True)
class PromptDiff:
    """One prompt in both sets.

    Attributes:
        name: of the prompt.
        tokens_differ: the prompt's own ids differ (another tokenizer), nothing else is compared.
        first_greedy: first generated token that differs; None if the continuations are the same.
        top1: share of positions with the same likeliest token, before the continuations part.
        logprob_difference: largest absolute difference of log-probabilities kept by both.
    """

    name: str
    tokens_differ: bool
    first_greedy: int | None
    top1: float
    logprob_difference: float


@dataclass(frozen=True)
class GoldenDiff:
    """All differences; `lines` is the text for a terminal, empty when the sets agree.

    Attributes:
        only_left, only_right: prompts that one set lacks.
        provenance: fields of how they were made that differ, as ``field: left -> right``.
        prompts: those in both.
    """

    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    provenance: tuple[str, ...]
    prompts: tuple[PromptDiff, ...]

    def lines(self, tolerance: float) -> list[str]:
        """Readable differences; log-probabilities within `tolerance` nats count as equal."""
        text = [f"made: {entry}" for entry in self.provenance]
        text += [f"only in the first: {name}" for name in self.only_left]
        text += [f"only in the second: {name}" for name in self.only_right]
        for item in self.prompts:
            if item.tokens_differ:
                text.append(f"{item.name}: tokenised differently")
            elif item.first_greedy is not None:
                text.append(f"{item.name}: continuations part at step {item.first_greedy}")
            elif item.logprob_difference > tolerance:
                text.append(
                    f"{item.name}: log-probabilities differ by {item.logprob_difference:.3g}, "
                    f"top-1 {item.top1:.1%}"
                )
        return text


def diff(left: GoldenSet, right: GoldenSet) -> GoldenDiff:
    """Compare two sets by prompt name."""
    ours = {prompt.name: prompt for prompt in left.prompts}
    theirs = {prompt.name: prompt for prompt in right.prompts}
    made, other = vars(left.made), vars(right.made)
    return GoldenDiff(
        only_left=tuple(name for name in ours if name not in theirs),
        only_right=tuple(name for name in theirs if name not in ours),
        provenance=tuple(
            f"{key}: {made[key]} -> {other[key]}" for key in made if made[key] != other[key]
        ),
        prompts=tuple(
            _prompt_diff(prompt, theirs[name]) for name, prompt in ours.items() if name in theirs
        ),
    )


def _prompt_diff(left: GoldenPrompt, right: GoldenPrompt) -> PromptDiff:
    """Rows after the continuations part belong to different texts and are left out."""
    if left.tokens != right.tokens or left.first != right.first:
        return PromptDiff(left.name, True, None, 0.0, float("inf"))
    pairs = list(zip(left.greedy, right.greedy, strict=False))
    parted = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if parted is None and len(left.greedy) != len(right.greedy):
        parted = len(pairs)
    same = len(left.tokens) + (len(pairs) if parted is None else parted) - left.first
    top1 = float((left.top_ids[:same, 0] == right.top_ids[:same, 0]).mean()) if same else 1.0
    worst = max((_row_difference(left, right, row) for row in range(same)), default=0.0)
    return PromptDiff(left.name, False, parted, top1, worst)


def _row_difference(left: GoldenPrompt, right: GoldenPrompt, row: int) -> float:
    """Largest log-probability difference of the tokens that both kept at one position."""
    _, ours, theirs = np.intersect1d(left.top_ids[row], right.top_ids[row], return_indices=True)
    if ours.size == 0:
        return float("inf")
    gap = left.top_logprobs[row][ours] - right.top_logprobs[row][theirs]
    return float(np.abs(gap).max())
