"""evidence.json: what the golden gate measured on the emitted engine before it was published."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal


@dataclass(frozen=True)
class Measurement:
    """One figure against its limit; `limit` None means it was only recorded.

    `better` says on which side of the limit a passing value lies.
    """

    name: str
    value: float
    limit: float | None = None
    better: Literal["lower", "higher"] = "lower"

    @property
    def passed(self) -> bool:
        """Whether the value keeps its limit (always, where there is none)."""
        if self.limit is None:
            return True
        return self.value <= self.limit if self.better == "lower" else self.value >= self.limit

    def storable(self) -> Measurement:
        """JSON has no infinity and no NaN: the worst finite value stands for both."""
        if math.isfinite(self.value):
            return self
        return replace(self, value=sys.float_info.max if self.better == "lower" else 0.0)


@dataclass(frozen=True)
class PromptEvidence:
    """One golden prompt: divergences in nats over its tokens, agreement as a share of 1.

    `first_divergence` is the index of the first greedy token that differs, None if none does.
    """

    name: str
    tokens: int
    mean_kl: float
    p99_kl: float
    top1_agreement: float
    first_divergence: int | None = None


@dataclass(frozen=True)
class Evidence:
    """The whole of evidence.json.

    Args:
        status: ``passed``, ``failed`` (only in a directory kept aside), or ``off``.
        golden_set: name of the set, ``auto`` for one recorded during the build.
        set_hash: sha256 of the golden set, empty for ``off``.
        reference: how the reference was made: versions, dtype, model hash.
        reason: why the gate was off or what failed.
        executed: what ran to be measured, where it wasn't the engine itself.
        validated_on_gpu: whether the engine's own kernels have run and been compared; None for an
            engine that runs on CPUs.
    """

    status: Literal["passed", "failed", "off"]
    golden_set: str = ""
    set_hash: str = ""
    reference: Mapping[str, str] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()
    prompts: tuple[PromptEvidence, ...] = ()
    reason: str = ""
    executed: str = ""
    validated_on_gpu: bool | None = None
