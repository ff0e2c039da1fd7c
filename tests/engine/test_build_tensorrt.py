"""Builds for TensorRT without a GPU: the plan needs no TensorRT, the engine does."""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spikeinfer import SpikeError
from spikeinfer.compiler.assembly.request import BuildRequest
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.engine.network_check import network_problems
from spikeinfer.compiler.engine.revise import evidence_in, publish_evidence
from spikeinfer.compiler.engine.schema import encode
from spikeinfer.compiler.golden import GoldenSet, check
from spikeinfer.console.inspect import verify
from spikeinfer.console.terminal import Terminal
from spikeinfer.console.verify_device import with_device
from spikeinfer.driver import BuildResult, build

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
LLAMA = MODELS / "tiny-llama"
BASE: dict[str, Any] = {
    "backend": "tensorrt", "target_sm": "sm89", "max_seq_len": 64, "max_batch_size": 2,
    "max_num_tokens": 48,
}  # fmt: skip


def have_tensorrt() -> bool:
    try:
        return bool(version("tensorrt-rtx"))
    except PackageNotFoundError:
        return False


needs_tensorrt = pytest.mark.skipif(
    not have_tensorrt(), reason="tensorrt-rtx is not installed: no engine is built"
)


def request(output: Path, **options: Any) -> BuildRequest:
    return BuildRequest(LLAMA, output, **{**BASE, **options})


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    if not have_tensorrt():
        pytest.skip("tensorrt-rtx is not installed: no engine is built")
    output = tmp_path_factory.mktemp("engines") / "int4"
    return build(request(output, quantization="int4_sym", target_sm="sm86,sm89,sm120"))


def test_plan_only_needs_no_tensorrt_and_writes_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_rtx", None)
    made = [
        build(request(tmp_path / name, plan_only=True, quantization="int4_sym", golden="off"))
        for name in ("a", "b")
    ]
    texts = [(tmp_path / name / "plan.json").read_bytes() for name in ("a", "b")]
    assert texts[0] == texts[1]  # the same inputs, the same bytes
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["plan.json"]
    assert made[0].manifest is None
    plan = json.loads(texts[0])
    assert [p["name"] for p in plan["profiles"]] == ["prefill", "decode"]
    assert plan["profiles"][1]["batches"] == [1, 2, 2]
    assert plan["target"]["capacity"] == 72  # 64 tokens and a scratch place, in eights
    hashed = [c for c in plan["network"]["constants"] if "source" in c]
    assert all(len(c["sha256"]) == 64 for c in hashed)
    assert {"int4", "f16"} <= {c["dtype"] for c in hashed}


def test_the_engine_states_what_it_is_and_what_ran(int4: BuildResult) -> None:
    engine = EngineDirectory.open(int4.output_dir, verify=True)
    spec = engine.config.spike.tensorrt
    assert spec is not None
    assert (engine.config.spike.abi, engine.config.spike.backend) == ("linear", "tensorrt_rtx")
    assert spec.sms == ("sm86", "sm89", "sm120")
    assert spec.version == version("tensorrt-rtx")
    assert [s.name for s in engine.config.spike.states] == [a.state for a in spec.aliases]
    assert engine.manifest.provenance.not_reproducible == ("rank0.engine",)
    evidence = evidence_in(engine)
    assert evidence.status == "passed"
    assert evidence.validated_on_gpu is False
    assert "the engine's own kernels have not run" in evidence.executed
    errors = engine.config.spike.report["relative error"]
    assert isinstance(errors, dict)
    assert 0.02 < errors["model.layers.0.self_attn.q_proj.weight"] < 0.15


def test_verify_checks_structure_without_a_gpu(
    int4: BuildResult, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(int4.output_dir, Terminal()) == 0
    said = capsys.readouterr().out
    assert "the network agrees with config.json; TensorRT finds its file well-formed" in said
    assert "have not run on a GPU" in said


def test_opening_it_without_a_gpu_is_one_error(int4: BuildResult) -> None:
    from spikeinfer.compiler.backends.tensorrt import have_gpu
    from spikeinfer.runtime import SpikeEngine

    if have_gpu():
        pytest.skip("this machine has a GPU")
    with pytest.raises(SpikeError, match="no NVIDIA driver") as refused:
        SpikeEngine(int4.output_dir)
    assert (refused.value.code, refused.value.exit_code) == ("SPK621", 5)


def swap_alias(network: Any) -> None:
    first, second = network["aliases"][:2]
    first["input"], second["input"] = second["input"], first["input"]


def drop_layer(network: Any) -> None:
    del network["layers"][len(network["layers"]) // 2]


def other_profile(network: Any) -> None:
    network["profiles"][1]["batches"][2] += 1


def lose_hash(network: Any) -> None:
    next(c for c in network["constants"] if "sha256" in c).pop("sha256")


def other_cache(network: Any) -> None:
    next(t for t in network["inputs"] if t["name"].endswith(".past"))["dtype"] = "f32"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (swap_alias, "aliased pairs differ"),
        (drop_layer, "too early|nothing makes"),
        (other_profile, "profiles differ"),
        (lose_hash, "has no hash"),
        (other_cache, "is not f16"),
    ],
)
def test_a_network_that_is_not_the_configs(
    int4: BuildResult, tmp_path: Path, damage: Any, words: str
) -> None:
    import re

    network = json.loads((int4.output_dir / "network.json").read_text())
    damage(network)
    (tmp_path / "network.json").write_text(json.dumps(network))
    engine = EngineDirectory.open(int4.output_dir)
    damaged = dataclasses.replace(engine, path=tmp_path)
    assert network_problems(engine) == []
    assert any(re.search(words, problem) for problem in network_problems(damaged))


def test_the_emulation_is_transformers_with_these_weights(int4: BuildResult) -> None:
    """transformers in float32, given what the quantiser makes of each matrix, says nearly the same:
    what is left is half precision, some units of 2^-11 of logits and activations of up to 12. The
    int4 values themselves move logits by 3 and more."""
    from spikeinfer import kernels
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for module in layer.modules():
                if isinstance(module, torch.nn.Linear):
                    rows = kernels.quantize(module.weight.numpy(), "int4_sym")
                    values = kernels.dequantize(rows, "int4_sym", module.weight.shape[1])
                    module.weight.copy_(torch.from_numpy(values))
        expected = GoldenSet.load(int4.output_dir / "device-check.yaml")
        for prompt in expected.prompts:
            logits = model(torch.tensor([prompt.sequence])).logits[0].numpy()
            theirs = np.take_along_axis(logits, prompt.top_ids.astype(np.int64), 1)
            error = np.abs(theirs - prompt.top_logits)
            assert error.max() < 0.1
            assert 1e-4 < error.mean() < 0.01  # it was rounded at all


@needs_tensorrt
def test_half_precision_passes_its_own_limits(tmp_path: Path) -> None:
    result = build(request(tmp_path / "f16"))
    figures = {m.name: m.value for m in result.evidence.measurements}
    assert result.evidence.status == "passed"
    assert 0 < figures["mean KL (nats)"] < 3e-4


def test_the_device_check_is_what_the_emulation_says(int4: BuildResult) -> None:
    """A device that computes what was emulated is validated; one that doesn't isn't."""
    expected = GoldenSet.load(int4.output_dir / "device-check.yaml")
    rows = {p.sequence: p for p in expected.prompts}

    def emulated(tokens: list[int]) -> np.ndarray:
        prompt = rows[tuple(tokens)]
        rest = np.log(np.exp(prompt.lse[:, 1]) / (expected.vocab_size - prompt.top_ids.shape[1]))
        logits = np.repeat(rest[:, None], expected.vocab_size, 1).astype(np.float32)
        np.put_along_axis(logits, prompt.top_ids.astype(np.int64), prompt.top_logits, 1)
        return logits

    from spikeinfer.compiler.golden import thresholds_for

    limits = thresholds_for("float16", "float32")
    engine = EngineDirectory.open(int4.output_dir)
    right = check(expected, emulated, limits, emulated)
    wrong = check(expected, lambda t: emulated(t)[:, ::-1].copy(), limits)
    broken = check(expected, lambda t: np.full_like(emulated(t), np.nan), limits)
    for report, verdict in ((wrong, False), (broken, False), (right, True)):
        evidence = with_device(evidence_in(engine), report, "Fake GPU (sm89)")
        assert evidence.validated_on_gpu is verdict
        encode(evidence)  # whatever the device gave
    assert "the engine's own kernels ran on Fake GPU (sm89)" in evidence.executed


def test_new_evidence_is_published_whole(int4: BuildResult, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "engine"
    shutil.copytree(int4.output_dir, copy)
    engine = EngineDirectory.open(copy)
    evidence = dataclasses.replace(evidence_in(engine), validated_on_gpu=True)
    manifest = publish_evidence(engine, evidence)
    again = EngineDirectory.open(copy, verify=True)
    assert manifest.engine_id == engine.manifest.engine_id  # what it computes is what it was
    assert evidence_in(again).validated_on_gpu is True
    assert verify(copy, Terminal()) == 0


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are q4_k blocks: a GGUF file."""
    from spikeinfer.compiler.gguf.export import export_gguf

    directory = tmp_path_factory.mktemp("gguf")
    build(BuildRequest(LLAMA, directory / "engine", quantization="q4_1", golden="off"))
    export_gguf(EngineDirectory.open(directory / "engine"), directory / "model.gguf")
    return directory / "model.gguf"


def test_asymmetric_blocks_are_refused_or_converted_with_their_loss(
    quantised: Path, tmp_path: Path
) -> None:
    options = {**BASE, "plan_only": True, "golden": "off"}
    with pytest.raises(SpikeError, match="TensorRT has no q4_1") as refused:
        build(BuildRequest(quantised, tmp_path / "kept", **options))
    assert refused.value.code == "SPK561"
    assert "--quantization int4_sym quantises it again" in refused.value.remedy
    assert not (tmp_path / "kept").exists()
    build(BuildRequest(quantised, tmp_path / "again", quantization="int4_sym", **options))
    errors = json.loads((tmp_path / "again" / "plan.json").read_text())["relative error"]
    loss = [e for name, e in errors.items() if "q_proj" in name]
    assert all(0.01 < e < 0.2 for e in loss)


def test_symmetric_codes_are_kept_bit_for_bit() -> None:
    """Rows of q4_0 whose scales are above zero are int4_sym as they are."""
    from spikeinfer import kernels
    from spikeinfer.compiler.assembly.source import Source
    from spikeinfer.compiler.assembly.tensorrt import storable
    from spikeinfer.compiler.ir import Constant, DType, TensorType
    from spikeinfer.compiler.quantize import Blocks, Given

    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0)).numpy()
    rows = {
        "positive": kernels.quantize(x, "int4_sym"),
        "either": kernels.quantize(x, "q4_0"),
    }

    def const(name: str) -> Constant:
        return Constant(name, TensorType(DType.F32, (8, 64)), parameter=name)

    source = storable(
        Source(
            None,  # type: ignore[arg-type]
            quantised="GPTQ",
            ready=lambda c: Blocks("q4_0", rows[c.name], 64) if c.format == "q4_0" else None,
            given=lambda c: Given("q4_0", "the source's codes and scales"),
        )
    )
    kept = const("positive")
    given = source.given(kept)
    assert given is not None
    kept.format = given.format
    blocks = source.ready(kept)
    assert blocks is not None
    assert (given.format, blocks.format) == ("int4_sym", "int4_sym")
    np.testing.assert_array_equal(blocks.rows, rows["positive"])
    with pytest.raises(SpikeError, match="GPTQ") as refused:
        source.given(const("either"))
    assert refused.value.code == "SPK561"
