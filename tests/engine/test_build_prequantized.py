"""Whole builds of tiny checkpoints that are quantised already.

The foreign judge is transformers in fp32 on a plain checkpoint with the values of the numpy writers
in tests/numeric/prequantized/packers.py. As f32 the logits differ by the order of sums only (1e-3,
as for plain checkpoints); kept blocks are exact, but their kernels round activations to int8, which
costs a few per cent of a logit's spread.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from spikeinfer import SpikeEngine
from spikeinfer.compiler.assembly.evidence import mean_kl
from spikeinfer.compiler.assembly.progress import Progress
from spikeinfer.compiler.assembly.source import open_source, rebuilt
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.golden import Prompt, check, record, thresholds_for
from spikeinfer.compiler.ir import Constant, DType, TensorType
from spikeinfer.driver import BuildRequest, BuildResult, build
from spikeinfer.kernels import dequantize, unpack
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "numeric" / "prequantized"))

import packers

LOGIT_TOLERANCE = 1e-3
ROUNDED_ACTIVATIONS = 0.05
"""Of the logits' spread; int8 per 32 is half a per cent per product, and there are fourteen."""
IDS = [5, 17, 90, 3, 42, 42, 8, 61, 77, 12]

FORMATS: dict[str, tuple[packers.Writer, dict[str, Any], set[str]]] = {
    "gptq asymmetric": (
        packers.gptq(sym=False, group=128),
        packers.gptq_settings(sym=False, group=128),
        {"q5_0"},
    ),
    "gptq act-order": (
        packers.gptq(act_order=True),
        packers.gptq_settings(act_order=True),
        {"f32"},
    ),
    "gptq 8 bits": (packers.gptq(8), packers.gptq_settings(8), {"q8_0"}),
    "awq": (packers.awq(), packers.awq_settings(), {"q5_0"}),
    "compressed": (packers.pack_quantized(), packers.compressed_settings(), {"q4_0"}),
    "fp8": (packers.float8((96, 80)), packers.fp8_settings((96, 80)), {"f32"}),
    "fp8 with powers of two": (
        packers.float8((1, 32), dtype=torch.uint8),
        {"quant_method": "mxfp8"},
        {"bf16"},
    ),
}


class Notes(Progress):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A format's name -> (packed checkpoint, values), made once."""
    made: dict[str, tuple[Path, dict[str, torch.Tensor]]] = {}

    def source(name: str) -> tuple[Path, dict[str, torch.Tensor]]:
        if name not in made:
            path = tmp_path_factory.mktemp("source")
            made[name] = (path, packers.write_checkpoint(path, *FORMATS[name][:2]))
        return made[name]

    return source


def reference_logits(packed: Path, values: Mapping[str, torch.Tensor], plain: Path) -> np.ndarray:
    """Of transformers on the values, stored plainly."""
    plain.mkdir()
    shutil.copy(packed / "config.json", plain)
    packers.edit_config(plain, quantization_config=None)
    tensors = {name: value.float().contiguous() for name, value in values.items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    return logits(plain, IDS)


def logits(plain: Path, ids: list[int]) -> np.ndarray:
    """float32 [T, V]."""
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.tensor([ids])).logits[0].numpy()
    return found


def built(source: Path, tmp_path: Path, **options: Any) -> tuple[BuildResult, list[str]]:
    notes = Notes()
    request = BuildRequest(source, tmp_path / "engine", enable_streaming=True, **options)
    return build(request, notes), notes.notes


@pytest.mark.parametrize("name", ["gptq act-order", "awq", "fp8"])
def test_logits_as_f32_equal_transformers(name: str, sources: Any, tmp_path: Path) -> None:
    source, values = sources(name)
    result, notes = built(source, tmp_path, dtype="float32", quantization="f32")
    assert result.evidence.status == "passed"  # against our values, with the limits of float32
    assert any("taken exactly" in note for note in notes)
    assert not any("quantises them again" in note for note in notes)
    expected = reference_logits(source, values, tmp_path / "plain")
    with SpikeEngine(tmp_path / "engine") as engine:
        assert np.abs(engine.score(IDS) - expected).max() <= LOGIT_TOLERANCE


@pytest.mark.parametrize("name", [n for n in FORMATS if n not in ("awq", "fp8")])
def test_weights_are_kept_bit_for_bit(name: str, sources: Any, tmp_path: Path) -> None:
    source, values = sources(name)
    result, notes = built(source, tmp_path)
    assert result.evidence.status == "passed"
    assert result.config is not None
    found = set()
    for spec in result.config.spike.weights:
        if len(spec.shape) < 2 or (expected := values.get(spec.parameters[0])) is None:
            continue
        n, k = spec.shape
        file = tmp_path / "engine" / "rank0.weights"
        data = np.fromfile(file, np.uint8, spec.bytes, offset=spec.offset)
        stored = dequantize(unpack(data, spec.format, n, k), spec.format, k)
        assert np.array_equal(stored, expected.float().numpy()), spec.name
        if expected.dtype == torch.float32:
            found.add(spec.format)
    assert found == FORMATS[name][2]
    assert any("kept bit for bit: 14 as" in note for note in notes)
    assert any("fit no block format" in note for note in notes) == bool(found & {"f32", "bf16"})
    expected = reference_logits(source, values, tmp_path / "plain")
    with SpikeEngine(tmp_path / "engine") as engine:
        error = np.abs(engine.score(IDS) - expected).max()
    assert error <= ROUNDED_ACTIVATIONS * np.ptp(expected)


def test_quantising_again_is_done_with_a_warning(sources: Any, tmp_path: Path) -> None:
    source, _ = sources("awq")
    result, notes = built(source, tmp_path, quantization="q8_0")
    assert {c.format for c in result.plan.choices} <= {"q8_0", "f32"}
    assert sum("quantises them again" in note and "AWQ" in note for note in notes) == 1


def test_a_quality_budget_chooses_for_packed_weights(sources: Any, tmp_path: Path) -> None:
    source, _ = sources("gptq act-order")
    result, notes = built(source, tmp_path, max_kl=0.02)
    assert mean_kl(result.evidence) <= 0.02
    assert {c.format for c in result.plan.choices} & {"q4_0", "q4_1", "q4_k", "q5_k", "q6_k"}
    assert sum("as mixed quantises them again" in note for note in notes) == 1


def test_whether_blocks_are_kept_is_known_without_unpacking(
    sources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = open_source(sources("gptq 8 bits")[0])
    name = next(n for n in kept.checkpoint.parameters if "q_proj" in n)
    shape = kept.checkpoint.parameters[name].shape
    const = Constant("w", TensorType(DType.F32, tuple(shape)), name, role="attn_q")
    assert not kept.has_blocks(const)
    given = kept.given(const)
    assert given is not None
    const.format = given.format
    assert kept.ready(const) is not None
    monkeypatch.setattr(Checkpoint, "integers", None)
    assert kept.has_blocks(const)
    const.format = "q4_k"
    assert not kept.has_blocks(const)


def test_recorded_sets_hold_the_values_that_were_read(sources: Any, tmp_path: Path) -> None:
    source, values = sources("fp8")
    given = rebuilt(Checkpoint.open(source))
    golden = record(source, [Prompt("p", tokens=tuple(IDS), greedy=1)], "set", rebuilt=given)
    reference_logits(source, values, tmp_path / "plain")
    limits = thresholds_for(None, "float32")
    assert check(golden, lambda ids: logits(tmp_path / "plain", ids), limits).passed


def test_two_builds_give_the_same_bytes_and_the_dry_run_their_number(
    sources: Any, tmp_path: Path
) -> None:
    source, _ = sources("gptq asymmetric")
    planned, _ = built(source, tmp_path, dry_run=True)
    for name, threads in (("a", 1), ("b", 2)):
        result, _ = built(source, tmp_path / name, workers=threads, golden="off")
        assert result.weight_bytes == planned.weight_bytes
    a, b = ((tmp_path / name / "engine" / "rank0.weights").read_bytes() for name in "ab")
    assert a == b


def test_layers_that_keep_inputs_first_are_kept_as_blocks(tmp_path: Path) -> None:
    def write(rng: Any, k: int, n: int) -> Any:  # GPT-2's Conv1D stores [inputs, outputs]
        parts, values = packers.gptq(sym=False)(rng, n, k)
        return parts, values.T.copy()

    def chosen(module: str) -> bool:
        return module.endswith(("c_attn", "c_proj", "c_fc"))  # attn.c_proj is square

    settings = packers.gptq_settings(sym=False)
    extra = {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64}
    values = packers.write_checkpoint(tmp_path / "packed", write, settings, "gpt2", chosen, **extra)
    result, _ = built(tmp_path / "packed", tmp_path)
    assert result.evidence.status == "passed"
    assert sum(choice.format == "q5_0" for choice in result.plan.choices) >= 8
    expected = reference_logits(tmp_path / "packed", values, tmp_path / "plain")
    with SpikeEngine(tmp_path / "engine") as engine:
        error = np.abs(engine.score(IDS) - expected).max()
    assert error <= ROUNDED_ACTIVATIONS * np.ptp(expected)


def test_experts_are_kept_as_blocks(tmp_path: Path) -> None:
    extra = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    writer, settings = packers.awq(), packers.awq_settings()
    values = packers.write_checkpoint(tmp_path / "packed", writer, settings, "mixtral", **extra)
    result, _ = built(tmp_path / "packed", tmp_path)
    assert result.evidence.status == "passed"
    stacked = [c for c in result.plan.choices if len(c.shape) == 3]
    assert stacked
    assert {c.format for c in stacked} == {"q5_0"}
    expected = reference_logits(tmp_path / "packed", values, tmp_path / "plain")
    with SpikeEngine(tmp_path / "engine") as engine:
        error = np.abs(engine.score(IDS) - expected).max()
    assert error <= ROUNDED_ACTIVATIONS * np.ptp(expected)
