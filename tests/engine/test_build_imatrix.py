"""`spike-build --imatrix`: every matrix is quantised with its importances, or a note says not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from spikeinfer import SpikeError
from spikeinfer.compiler.assembly.calibrate import calibrate
from spikeinfer.compiler.assembly.progress import Progress
from spikeinfer.compiler.calibrate import Entry, Importance, read_imatrix, write_imatrix
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.gguf.export import export_gguf
from spikeinfer.driver import BuildRequest, BuildResult, build
from spikeinfer.kernels import Format, pack, quantize
from transformers import AutoModelForCausalLM, MixtralConfig

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
LLAMA = MODELS / "tiny-llama"
GIVEN = ("f32", "q8_0")


class Notes(Progress):
    """Keeps what a build says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, message: str) -> None:
        self.said.append(message)


def engine(model: Path, output: Path, imatrix: Path | None = None, **options: Any) -> BuildResult:
    request = {"quantization": "q4_k_m", "golden": "off", "enable_streaming": True, **options}
    return build(BuildRequest(model, output, imatrix=imatrix, **request))


def weights(path: Path) -> dict[str, tuple[str, bytes]]:
    """Format and packed bytes of every tensor."""
    directory = EngineDirectory.open(path)
    data = directory.weights_path.read_bytes()
    specs = directory.config.spike.weights
    return {s.name: (s.format, data[s.offset : s.offset + s.bytes]) for s in specs}


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint of which some experts never see a token."""
    path = tmp_path_factory.mktemp("checkpoint") / "mixtral"
    config = MixtralConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        gate = model.model.layers[1].mlp.gate
        gate.weight.zero_()  # of equals, the same two are always chosen
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / name, path)
    return path


def collected(model: Path, output: Path) -> Importance:
    """What the file has: sums in f32."""
    write_imatrix(output, calibrate(model, [], 512, 32, 1, Progress()))
    return read_imatrix(output)


def test_matrices_are_quantised_with_the_files_importances(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    found = collected(LLAMA, path)
    engine(LLAMA, tmp_path / "plain")
    result = engine(LLAMA, tmp_path / "weighed", path)
    plain, weighed = weights(tmp_path / "plain"), weights(tmp_path / "weighed")
    model = AutoModelForCausalLM.from_pretrained(LLAMA, dtype=torch.float32)
    projections = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
                   "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}  # fmt: skip
    changed = 0
    for name, (format, data) in weighed.items():
        assert plain[name][0] == format
        parts = name.split(".")
        if format in GIVEN or "layers" not in parts or not name.endswith("_proj.weight"):
            continue
        entry = found.entries[f"blk.{parts[2]}.{projections[parts[4].split('_')[0]]}.weight"]
        means = (entry.sums / entry.counts).astype(np.float32)
        values = model.get_parameter(name).detach().numpy()
        rows = quantize(values, cast(Format, format), importance=means)
        assert data == pack(rows, cast(Format, format), *values.shape).tobytes(), name
        changed += data != plain[name][1]
    assert changed >= 10
    assert result.config is not None
    facts = result.config.spike.report["facts"]["assign-storage"]["importances"]  # type: ignore[index]
    assert facts["file"] == "imatrix.gguf"
    assert facts["without"] == []
    assert facts["datasets"] == ["own text"]


def test_experts_have_their_own_importances(tmp_path: Path, mixtral: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    found = collected(mixtral, path)
    assert set(found.unseen) == {f"blk.1.ffn_{n}_exps.weight" for n in ("gate", "up", "down")}
    (unseen,) = {tuple(experts) for experts in found.unseen.values()}
    assert len(unseen) == 2
    notes = Notes()
    request = BuildRequest(mixtral, tmp_path / "e", quantization="q4_k_m", golden="off",
                           imatrix=path)  # fmt: skip
    result = build(request, notes)
    said = f"blk.1.ffn_up_exps.weight: experts {unseen[0]}, {unseen[1]} saw no token"
    assert any(said in note for note in notes.said)
    assert result.config is not None
    stored = weights(tmp_path / "e")
    model = AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32)
    for layer in (0, 1):
        entry = found.entries[f"blk.{layer}.ffn_up_exps.weight"]
        parameter = f"model.layers.{layer}.mlp.experts.gate_up_proj"
        values = model.get_parameter(parameter).detach().numpy()[:, 96:]
        format, data = stored[f"{parameter}.96"]
        assert format == "q5_0"
        size = len(data) // 4
        for expert, count in enumerate(entry.counts):
            sums, tokens = entry.sums[expert], count
            if not count:  # counts as if all tokens had been routed to it
                sums, tokens = entry.sums.sum(0), entry.counts.sum()
            means = (sums / tokens).astype(np.float32)
            rows = quantize(values[expert], "q5_0", importance=means)
            expected = pack(rows, "q5_0", *values[expert].shape).tobytes()
            assert data[expert * size : (expert + 1) * size] == expected


def test_a_build_says_which_matrices_a_file_lacks(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.gguf"
    found = collected(LLAMA, path)
    fewer = {n: e for n, e in found.entries.items() if not n.startswith("blk.1.attn")}
    write_imatrix(path, Importance(fewer))
    notes = Notes()
    build(BuildRequest(LLAMA, tmp_path / "e", quantization="q4_k_m", imatrix=path, dry_run=True),
          notes)  # fmt: skip
    said = "imatrix.gguf has no importances for 3 of 13 matrices, which are quantised without: "
    assert any(said in note for note in notes.said), notes.said


@pytest.mark.parametrize("dry_run", [False, True])
def test_what_is_refused(tmp_path: Path, dry_run: bool) -> None:
    path = tmp_path / "imatrix.gguf"
    write_imatrix(path, Importance({"blk.0.attn_q.weight": Entry(np.ones(96), np.array([5]))}))
    cases = [("q4_k_m", path, "SPK413"), ("bf16", path, "SPK819"), ("q8_0", path, "SPK819"),
             ("q4_k_m", tmp_path / "none", "SPK126")]  # fmt: skip
    (tmp_path / "junk").write_bytes(b"GGUF" + b"\xff" * 60)
    cases.append(("q4_k_m", tmp_path / "junk", "SPK412"))
    for quantization, file, code in cases:
        with pytest.raises(SpikeError) as caught:
            engine(LLAMA, tmp_path / "e", file, quantization=quantization, dry_run=dry_run)
        assert caught.value.code == code
        assert not (tmp_path / "e").exists()


def test_blocks_that_are_taken_over_are_not_weighed(tmp_path: Path) -> None:
    """A GGUF source keeps its blocks; quantised anew they are weighed, with a warning."""
    engine(LLAMA, tmp_path / "e")
    source = tmp_path / "tiny.gguf"
    export_gguf(EngineDirectory.open(tmp_path / "e"), source)
    path = tmp_path / "imatrix.gguf"
    assert collected(source, path).entries.keys() == collected(LLAMA, path).entries.keys()
    with pytest.raises(SpikeError, match=r"SPK819 .*taken over"):
        engine(source, tmp_path / "f", path, quantization="none", dry_run=True)
    facts = engine(source, tmp_path / "f", path, dry_run=True).reports
    (importances,) = (r.facts["importances"] for r in facts if r.name == "assign-storage")
    assert importances["matrices"] == 13  # type: ignore[index]
