"""The shipped golden sets against transformers on the generated models, and planted wrong readings.

The tiny models are generated here, which takes a second.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from spikeinfer.compiler.golden import (
    GoldenReport,
    GoldenSet,
    Prompt,
    Reference,
    check,
    gate,
    record,
    thresholds_for,
)
from spikeinfer.compiler.golden.sets import Float32
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TINY = ["tiny-llama", "tiny-qwen3", "tiny-gemma3", "tiny-gpt2"]
EXACT = thresholds_for(None, "float32")


@pytest.fixture(scope="module")
def models() -> Iterator[ModuleType]:
    """`benchmarks/models.py`, which is a script beside its own modules."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location("models", ROOT / "benchmarks/models.py")
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["models"] = module  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
        sys.modules.pop("models", None)


@pytest.fixture(scope="module")
def tiny(models: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The four tiny checkpoints, freshly generated; their hashes are checked on the way."""
    root = tmp_path_factory.mktemp("models")
    return {name: models.ready(name, root) for name in TINY}


def changed(directory: Path, **changes: Any) -> Any:
    """The model read wrongly: its configuration altered, its weights kept."""
    config = AutoConfig.from_pretrained(directory)
    for name, value in changes.items():
        assert hasattr(config, name), name
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def report_of(name: str, model: Any) -> GoldenReport:
    def score(tokens: list[int]) -> Float32:
        with torch.inference_mode():
            return np.asarray(model(torch.tensor([tokens])).logits[0].numpy())

    return check(GoldenSet.load(ROOT / "golden" / f"{name}.yaml"), score, EXACT)


@pytest.mark.parametrize("name", TINY)
def test_the_source_passes_its_shipped_set(name: str, tiny: dict[str, Path]) -> None:
    report = report_of(name, changed(tiny[name]))
    assert report.failures == ()
    # Another machine's matrix products sum in another order; logits are about 4 in size.
    assert report.logit_error < 2e-4


# `past_key_values` has another name from transformers 5.24 on; the older ones know only this one.
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
@pytest.mark.parametrize("name", TINY)
def test_decoding_with_the_cache_equals_one_run(name: str, tiny: dict[str, Path]) -> None:
    model = changed(tiny[name])

    def decode(tokens: list[int]) -> Float32:
        rows, cache = [], None
        with torch.inference_mode():
            for token in tokens:
                out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                rows.append(out.logits[0, -1].numpy())
        return np.stack(rows)

    golden = GoldenSet.load(ROOT / "golden" / f"{name}.yaml")
    with Reference.load(tiny[name]) as source:
        report = check(golden, source.score, EXACT, decode)
    assert report.failures == ()
    assert report.decode_error is not None


PLAIN = {"rope_type": "default", "rope_theta": 1e4}
LOCAL = {"rope_type": "default", "rope_theta": 100.0}
FULL = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}


def both(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


WRONG_READINGS = [
    ("tiny-llama", "rope theta", {"rope_parameters": {**PLAIN, "rope_theta": 5e5}}),
    ("tiny-llama", "no rope scaling", {"rope_parameters": PLAIN}),
    ("tiny-llama", "epsilon", {"rms_norm_eps": 1e-3}),
    ("tiny-llama", "activation", {"hidden_act": "gelu"}),
    ("tiny-qwen3", "window off by one", {"sliding_window": 15}),
    ("tiny-qwen3", "no window", {"layer_types": ["full_attention"] * 3}),
    ("tiny-qwen3", "rope theta", {"rope_parameters": PLAIN}),
    ("tiny-gemma3", "no soft-cap", {"final_logit_softcapping": None}),
    ("tiny-gemma3", "scale by the head size", {"query_pre_attn_scalar": 64}),
    ("tiny-gemma3", "one rope for both", both(FULL, FULL)),
    ("tiny-gemma3", "no rope scaling", both(PLAIN, LOCAL)),
    ("tiny-gemma3", "exact gelu", {"hidden_activation": "gelu"}),
    ("tiny-gpt2", "exact gelu", {"activation_function": "gelu"}),
    ("tiny-gpt2", "epsilon", {"layer_norm_epsilon": 1e-3}),
    ("tiny-gpt2", "no scale", {"scale_attn_weights": False}),
]


@pytest.mark.parametrize(("name", "fault", "changes"), WRONG_READINGS)
def test_wrong_readings_fail(
    name: str, fault: str, changes: dict[str, Any], tiny: dict[str, Path]
) -> None:
    report = report_of(name, changed(tiny[name], **changes))
    assert not report.passed, f"{fault} went unnoticed: {report.summary()}"


def test_a_dropped_soft_cap_moves_no_argmax(tiny: dict[str, Path]) -> None:
    report = report_of("tiny-gemma3", changed(tiny["tiny-gemma3"], final_logit_softcapping=None))
    assert report.top1 == 1.0
    assert report.divergences == ()
    assert report.logit_error > 0.1


@pytest.mark.parametrize(("name", "module"), [("tiny-llama", "q_proj"), ("tiny-qwen3", "k_norm")])
def test_a_wrong_weight_fails(name: str, module: str, tiny: dict[str, Path]) -> None:
    """One projection's heads, or a norm's channels, in the wrong order."""
    model = changed(tiny[name])
    weight = getattr(model.model.layers[1].self_attn, module).weight
    with torch.no_grad():
        weight.copy_(weight.flip(0).clone())
    assert not report_of(name, model).passed


def test_recording_again_gives_the_shipped_numbers(tiny: dict[str, Path], tmp_path: Path) -> None:
    shipped = GoldenSet.load(ROOT / "golden" / "tiny-llama.yaml")
    prompts = [Prompt(p.name, tokens=p.tokens, greedy=16) for p in shipped.prompts]
    again = record(tiny["tiny-llama"], prompts, "tiny-llama")
    assert [p.greedy for p in again.prompts] == [p.greedy for p in shipped.prompts]
    for ours, theirs in zip(again.prompts, shipped.prompts, strict=True):
        np.testing.assert_allclose(ours.lse, theirs.lse, atol=2e-4)
        np.testing.assert_allclose(ours.next_logits, theirs.next_logits, atol=2e-4)
    assert GoldenSet.load(again.save(tmp_path)).made.weights == shipped.made.weights


def test_the_live_gate_passes_the_source_and_fails_another(tiny: dict[str, Path]) -> None:
    with Reference.load(tiny["tiny-llama"]) as same:
        report = gate(tiny["tiny-llama"], same.score, EXACT, decode=same.score)
    assert report.passed
    assert (report.mean_kl, report.logit_error, report.decode_error) == (0.0, 0.0, 0.0)
    assert not report.stored
    assert report.continuations == 1
    model = changed(tiny["tiny-llama"], rms_norm_eps=1e-3)

    def score(tokens: list[int]) -> Float32:
        with torch.inference_mode():
            return np.asarray(model(torch.tensor([tokens])).logits[0].numpy())

    assert not gate(tiny["tiny-llama"], score, EXACT).passed


def test_the_live_gate_keeps_within_learned_positions(tiny: dict[str, Path]) -> None:
    longest: list[int] = []
    with Reference.load(tiny["tiny-gpt2"]) as source:

        def score(tokens: list[int]) -> Float32:
            longest.append(len(tokens))
            return source.score(tokens)

        assert gate(tiny["tiny-gpt2"], score, EXACT, max_length=40).passed
    assert max(longest) <= 40


def test_generated_weights_are_refused_when_they_differ(
    models: ModuleType, tiny: dict[str, Path], tmp_path: Path
) -> None:
    directory = tmp_path / "tiny-gpt2"
    directory.mkdir()
    data = bytearray((tiny["tiny-gpt2"] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (directory / "model.safetensors").write_bytes(bytes(data))
    with pytest.raises(SystemExit, match="expected cbbf579a"):
        models.ready("tiny-gpt2", tmp_path)


def test_a_model_appears_whole_or_not_at_all(models: ModuleType, tmp_path: Path) -> None:
    def half(out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError):
        models.publish(tmp_path / "model", half)
    assert list(tmp_path.iterdir()) == []
