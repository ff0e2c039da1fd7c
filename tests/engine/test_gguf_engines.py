"""Engines into GGUF files and GGUF files into engines: the same bytes both ways."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from spikeinfer import SpikeEngine
from spikeinfer.compiler.assembly.source import open_source
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.gguf.checkpoint import GgufCheckpoint
from spikeinfer.compiler.gguf.export import export_gguf
from spikeinfer.compiler.gguf.reader import GgufFile
from spikeinfer.driver import BuildRequest, Progress, build
from spikeinfer.errors import SpikeError
from transformers import AutoConfig, AutoModelForCausalLM

MODELS = Path(__file__).parents[2] / ".cache" / "models"


class Notes(Progress):
    """Keeps what a build remarks."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def built(model: Path, output: Path, quantization: str = "none", **options: Any) -> list[str]:
    told = Notes()
    options = {"golden": "off", **options}
    build(BuildRequest(model, output, quantization=quantization, **options), told)
    return told.notes


def exported(engine: Path, output: Path) -> Path:
    export_gguf(EngineDirectory.open(engine), output)
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An engine of tiny-llama in q8_0, and its file."""
    root = tmp_path_factory.mktemp("gguf")
    built(MODELS / "tiny-llama", root / "engine", "q8_0")
    return root / "engine", exported(root / "engine", root / "tiny.gguf")


def test_a_file_holds_the_engines_blocks(llama: tuple[Path, Path]) -> None:
    source = Checkpoint.open(MODELS / "tiny-llama")
    reader = gguf.GGUFReader(str(llama[1]))
    found = {t.name: t for t in reader.tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, source.config.num_hidden_layers)
    for name in source.parameters:
        tensor = found.pop(f"{names.get_name(name.removesuffix('.weight'))}.weight")
        values = source.load(name).float().numpy()
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in name:  # LlamaModel.permute of llama.cpp's conversion/llama.py
                halves = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2)
                values = halves.reshape(values.shape)
        if values.ndim > 1:
            assert tensor.tensor_type == gguf.GGMLQuantizationType.Q8_0
            assert np.array_equal(tensor.data, quants.quantize(values, tensor.tensor_type)), name
        else:
            assert np.array_equal(tensor.data, values)
    assert list(found) == ["rope_freqs.weight"]


def test_engine_to_file_to_engine_changes_no_byte(llama: tuple[Path, Path], tmp_path: Path) -> None:
    engine, file = llama
    # int8 activations flip one token in twenty of a random model this small
    loose = {"top1": 0.85, "mean_kl": 0.02}
    again = tmp_path / "again"
    notes = built(file, again, golden="auto", enable_streaming=True, thresholds=loose)
    assert not any("again" in note for note in notes)
    weights = (engine / "rank0.weights").read_bytes()
    assert (tmp_path / "again" / "rank0.weights").read_bytes() == weights
    assert exported(tmp_path / "again", tmp_path / "2.gguf").read_bytes() == file.read_bytes()
    made = EngineDirectory.open(tmp_path / "again").config
    assert made.pretrained_config.quantization.quant_algo == "q8_0"
    assert made.pretrained_config.quantization.kv_cache_quant_algo == "f16"
    storage = made.spike.report["storage"]
    assert isinstance(storage, list)
    assert {row["why"] for row in storage} == {"as in the GGUF file"}


def test_quantising_again_is_said(llama: tuple[Path, Path], tmp_path: Path) -> None:
    notes = built(llama[1], tmp_path / "engine", "q6_k", dry_run=True)
    assert [n for n in notes if "quantises them again" in n]
    assert open_source(llama[1]).keeps("auto")
    assert not open_source(MODELS / "tiny-llama").keeps("auto")


def test_kept_blocks_are_not_quantised_to_inputs(llama: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match="SPK417"):
        built(llama[1], tmp_path / "engine", quantizer="feedback")
    assert not (tmp_path / "engine").exists()


def test_transposed_weights_go_there_and_back(tmp_path: Path) -> None:
    built(MODELS / "tiny-gpt2", tmp_path / "engine")
    file = exported(tmp_path / "engine", tmp_path / "x.gguf")
    ours, theirs = GgufCheckpoint.open(file), Checkpoint.open(MODELS / "tiny-gpt2")
    for name in theirs.parameters:
        assert torch.equal(ours.load(name), theirs.load(name)), name


def test_stacked_experts_go_there_and_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe", hidden_size=64, intermediate_size=64, moe_intermediate_size=32, head_dim=32,
        num_hidden_layers=2, vocab_size=96, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "hf")
    built(tmp_path / "hf", tmp_path / "engine", "q8_0")
    file = exported(tmp_path / "engine", tmp_path / "x.gguf")
    entries = GgufFile(file).tensors
    assert entries["blk.1.ffn_up_exps.weight"].shape == (4, 32, 64)
    assert entries["blk.1.ffn_down_exps.weight"].type.name == "Q8_0"
    built(file, tmp_path / "again")
    weights = [(tmp_path / name / "rank0.weights").read_bytes() for name in ("engine", "again")]
    assert weights[0] == weights[1]
    ours, theirs = GgufCheckpoint.open(file), Checkpoint.open(tmp_path / "hf")
    for name in theirs.parameters:
        # half a step, which is the largest weight / 127, and 127 times the rounding of its fp16
        limit = float(theirs.load(name).abs().max()) / 127 * (0.5 + 127 * 2**-11)
        torch.testing.assert_close(ours.load(name), theirs.load(name), rtol=0, atol=limit)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny-qwen3", "SPK590 .* has layer_types = .*llama.cpp would compute another model"),
        ("tiny-gemma3", "SPK590 .* has query_pre_attn_scalar = 48, and GGUF's gemma3"),
    ],
)
def test_a_model_that_gguf_cannot_state_is_refused(name: str, message: str, tmp_path: Path) -> None:
    built(MODELS / name, tmp_path / "engine")
    with pytest.raises(SpikeError, match=message):
        exported(tmp_path / "engine", tmp_path / "x.gguf")
    assert not (tmp_path / "x.gguf").exists()


def test_a_tokenizer_that_llama_cpp_does_not_know_is_refused(tmp_path: Path) -> None:
    source = shutil.copytree(MODELS / "tiny-llama", tmp_path / "source")
    page = json.loads((source / "tokenizer.json").read_text())
    page["pre_tokenizer"]["use_regex"] = False
    (source / "tokenizer.json").write_text(json.dumps(page))
    built(source, tmp_path / "engine")
    with pytest.raises(SpikeError, match=r"SPK592 .* no name for its pre-tokenizer"):
        exported(tmp_path / "engine", tmp_path / "x.gguf")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine", "source"]


def test_a_file_runs_where_an_engine_is_wanted(
    llama: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPIKE_CACHE_DIR", str(tmp_path))
    wrong = tmp_path / "x.gguf"
    wrong.write_bytes(b"GGML" * 30)
    with pytest.raises(SpikeError, match="SPK130"):
        SpikeEngine(wrong)
    monkeypatch.setattr("spikeinfer.driver.BuildRequest", partial(BuildRequest, golden="off"))
    with SpikeEngine(llama[1]) as engine:
        assert engine.complete([1, 2, 3], max_tokens=2).token_ids
    assert [p.name for p in (tmp_path / "engines").glob("tiny.gguf-*") if p.is_dir()]


def test_the_command(llama: tuple[Path, Path], tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("spike")), "export", str(llama[0])]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "x.gguf"), "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["tensors"] == {"F32": 6, "Q8_0": 16}
    assert (tmp_path / "x.gguf").read_bytes() == llama[1].read_bytes()
    precious = tmp_path / "model.safetensors"
    precious.write_text("not ours")
    kept = subprocess.run([*command, "-o", str(precious)], capture_output=True, text=True)
    assert (kept.returncode, precious.read_text()) == (2, "not ours")
    assert "SPK817" in kept.stderr
    refused = subprocess.run([*command, "-o", str(tmp_path / "y"), "-f", "onnx"],
                             capture_output=True, text=True)  # fmt: skip
    assert refused.returncode == 2
    assert "SPK807" in refused.stderr


def test_without_a_tokenizer_no_prompt_is_suggested(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(MODELS / "tiny-llama", source, ignore=shutil.ignore_patterns("tok*", "chat*"))
    built(source, tmp_path / "engine")
    command = [str(Path(sys.executable).with_name("spike")), "export", str(tmp_path / "engine")]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "new" / "x.gguf")], capture_output=True, text=True
    )
    assert (done.returncode, "llama-cli" in done.stdout) == (0, False), done.stderr
    assert "Tokenizer  none" in done.stdout
