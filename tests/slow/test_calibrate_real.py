"""Importances of the real checkpoints against the inputs that transformers' own modules get."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from spikeinfer.compiler.assembly.calibrate import calibrate, gguf_names, windows_of
from spikeinfer.compiler.assembly.progress import Progress
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
TOKENS, WINDOW = 512, 256
RELATIVE = 1e-4
"""f32 through 30 layers in another order of sums; of a matrix's largest channel."""


def hooked(checkpoint: Path, windows: Tensor) -> dict[str, Tensor]:
    """Sums of squares f64 [K] of the input of every linear module, by parameter."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    found: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
            found[name] = found.get(name, 0) + x.square().sum(0)

        return hook

    for path, module in model.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(watch(f"{path}.weight"))
    with torch.no_grad():
        for window in windows:
            model(window[None], use_cache=False)
    return found


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "gemma-3-270m"])
def test_importances_are_what_transformers_modules_see(name: str) -> None:
    found = calibrate(MODELS / name, [], TOKENS, WINDOW, 0, Progress())
    checkpoint = Checkpoint.open(MODELS / name)
    vocab = int(checkpoint.parameters["model.embed_tokens.weight"].shape[0])
    windows = windows_of(checkpoint, vocab, [None], TOKENS, WINDOW)
    assert windows.shape == (TOKENS // WINDOW, WINDOW)
    names = gguf_names(checkpoint)
    expected = hooked(MODELS / name, windows)
    expected["model.embed_tokens.weight"] = expected.pop("lm_head.weight")  # tied
    assert {t for p in expected for t in names[p]} == set(found.entries)
    for parameter, sums in expected.items():
        entry = found.entries[names[parameter][0]]
        assert entry.counts.tolist() == [TOKENS]
        error = np.abs(entry.sums - sums.numpy()).max() / float(sums.max())
        assert error < RELATIVE, (parameter, error)
