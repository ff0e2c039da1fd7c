"""Translation validation raises no false alarm over 200 seeds of weights and tokens."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from spikeinfer.compiler.ir import parse_graph
from spikeinfer.passes.manager import run_pipeline
from spikeinfer.passes.pipeline import default_pipeline
from spikeinfer.passes.validate import ValidatePasses

sys.path.insert(0, str(Path(__file__).parents[1] / "numeric" / "planted_faults"))
from tiny_models import LONGEST, MODELS, traced, weights


@pytest.mark.parametrize("seed", range(200))
def test_healthy_passes_are_not_accused(seed: int) -> None:
    model = list(MODELS)[seed % len(MODELS)]
    watch = ValidatePasses(weights(model, seed).__getitem__, LONGEST, seed)
    run_pipeline(
        parse_graph(traced(model)),
        default_pipeline(),
        watch,
    )
