"""Traced graphs of the real development checkpoints against transformers in fp32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.frontend.import_model import import_model
from spikeinfer.compiler.ir import Interpreter
from transformers import AutoModelForCausalLM

MODELS = Path(__file__).parents[2] / ".cache" / "models"
# fp32 rounding through 18 to 30 layers, relative to the largest logit (34 and 96 here); 2e-6 seen.
RELATIVE = 1e-5


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "gemma-3-270m"])
def test_real_checkpoint_equals_transformers(name: str) -> None:
    path = MODELS / name
    if not path.is_dir():
        pytest.skip(f"{path} is missing; `make models` fetches it")
    checkpoint = Checkpoint.open(path)
    graph = import_model(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = torch.randint(3, 1000, (2, 40), generator=torch.Generator().manual_seed(0))
    states = {
        n: torch.zeros(2, int(s.type.shape[1]), 0, int(s.type.shape[3]))
        for n, s in graph.states.items()
    }
    interpreter = Interpreter(graph, checkpoint.load, dict(states))
    got, done = [], 0
    with torch.no_grad():
        want = model(tokens).logits
        for size in (30, 1, 1, 8):
            positions = torch.arange(done, done + size).expand(2, size)
            step = {"tokens": tokens[:, done : done + size], "positions": positions}
            got += interpreter.run(step)
            done += size
    difference = (torch.cat(got, 1) - want).abs().max().item()
    print(name, difference, want.abs().max().item())
    assert difference <= RELATIVE * want.abs().max().item()
