"""Roles of a real graph's matrices, on which formats and overrides depend."""

from __future__ import annotations

from pathlib import Path

import pytest
from spikeinfer.driver import BuildRequest, build

MODELS = Path(__file__).parents[2] / ".cache" / "models"


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-gemma3"])
def test_every_layers_output_projection_has_its_role(
    model: str, streaming: bool, tmp_path: Path
) -> None:
    """Also the last layer's, behind which streaming keeps the rows that logits are wanted of."""
    request = BuildRequest(MODELS / model, tmp_path, enable_streaming=streaming, dry_run=True)
    choices = build(request).plan.choices
    roles = {c.role.value for c in choices if c.name.endswith("o_proj.weight")}
    assert roles == {"attn_output"}
    assert not any(c.role.value == "other" for c in choices)
