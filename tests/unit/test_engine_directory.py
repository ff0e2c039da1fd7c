"""An engine directory: written, opened, and every way in which it can be wrong on opening."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from spikeinfer import ExitCode, SpikeError
from spikeinfer.compiler.engine import (
    FORMAT_VERSION,
    BuildConfig,
    EngineConfig,
    EngineDirectory,
    EngineWriter,
    Evidence,
    Measurement,
    NearMiss,
    PassEntry,
    PrecisionEntry,
    PretrainedConfig,
    PromptEvidence,
    Provenance,
    QuantizationConfig,
    SpikeConfig,
    StateSpec,
    WeightSpec,
)
from spikeinfer.compiler.engine.manifest import seal_manifest
from spikeinfer.compiler.engine.schema import encode

PROVENANCE = Provenance("c0ffee", {"quantization": "q4_k_m"}, {"torch": "2.13.0"})
EVIDENCE = Evidence(
    "passed",
    golden_set="auto",
    measurements=(Measurement("mean KL", 0.01, 0.05), Measurement("top-1", 0.99, 0.9, "higher")),
    prompts=(PromptEvidence("capital <of> France", 32, 0.01, 0.1, 0.97),),
)


def tiny_config(weights: tuple[WeightSpec, ...]) -> EngineConfig:
    quantization = QuantizationConfig("q4_k_m", "f16")
    model = PretrainedConfig(
        "TinyForCausalLM", "tiny", "bfloat16", 32, 8, 1, 2, 1, 4, 64, quantization
    )
    state = StateSpec("layers.0.key", "key", "key_out", 1, 4, "f16", 8)
    spike = SpikeConfig(
        "streaming",
        "onnxruntime",
        32,
        (2,),
        (state,),
        weights,
        precision=(PrecisionEntry("layers.0", "angles", "f32", "positions above 2048"),),
        passes=(PassEntry("raise-rope", 1, ("layers.0",), (NearMiss("layers.1", "no cos"),)),),
        report={"fallbacks": [{"tensor": "a", "stored": "q5_0"}]},
    )
    return EngineConfig(model, BuildConfig(64, 4, 64, "paged", 16, True), spike)


def build(output: Path, fill: int = 1, provenance: Provenance = PROVENANCE) -> Path:
    """A small whole engine; `fill` is the byte its weights consist of."""
    with EngineWriter(output, version="0.1.0") as writer:
        with writer.weights() as weights:
            for name in ("token_embd", "layers.0.q"):
                weights.append(
                    name,
                    format="q8_0",
                    shape=(32, 32),
                    role="attn_q",
                    parameters=(f"{name}.weight",),
                    chunks=[bytes([fill]) * 700, bytes([fill + 1]) * 388],
                )
        writer.write("rank0.engine", b"graph")
        (writer.path / "tokenizer.json").write_text("{}")
        writer.stage(tiny_config(weights.specs), provenance)
        assert EngineDirectory.open(writer.path, verify=True).config.spike.vocab_size == 32
        writer.publish(EVIDENCE)
    return output


def failure(path: Path, verify: bool = False) -> SpikeError:
    with pytest.raises(SpikeError) as caught:
        EngineDirectory.open(path, verify=verify)
    return caught.value


def edit_manifest(path: Path, change: Callable[[dict[str, object]], object]) -> None:
    data = json.loads((path / "manifest.json").read_bytes())
    change(data)
    (path / "manifest.json").write_bytes(encode(data))


def test_a_built_engine_opens_with_everything_it_was_given(tmp_path: Path) -> None:
    engine = EngineDirectory.open(build(tmp_path / "engine"), verify=True)
    first, second = engine.config.spike.weights
    assert (first.offset, first.bytes, second.offset) == (0, 1088, 4096)
    data = engine.weights_path.read_bytes()
    assert data[4096 : 4096 + 1088] == b"\1" * 700 + b"\2" * 388
    assert len(data) == 8192
    assert engine.model_path.read_bytes() == b"graph"
    assert engine.file("tokenizer.json") is not None
    assert engine.file("chat_template.jinja") is None
    assert engine.manifest.provenance == PROVENANCE
    assert engine.config == tiny_config((first, second))
    assert all(check.ok for check in engine.verify())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["engine"]


def test_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    one, two = build(tmp_path / "one"), build(tmp_path / "elsewhere" / "two")
    names = sorted(p.name for p in one.iterdir())
    assert names == sorted(p.name for p in two.iterdir())
    assert "report.html" in names
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


def test_engine_id_follows_the_weights_but_not_the_evidence(tmp_path: Path) -> None:
    ids = [
        EngineDirectory.open(build(tmp_path / str(i), fill)).manifest.engine_id
        for i, fill in enumerate((1, 1, 9))
    ]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    "name",
    ["config.json", "evidence.json", "rank0.engine", "rank0.weights", "tokenizer.json",
     "report.html", "manifest.json"],
)  # fmt: skip
def test_one_changed_bit_in_any_file_is_found(tmp_path: Path, name: str) -> None:
    path = build(tmp_path / "engine")
    data = bytearray((path / name).read_bytes())
    for position in (0, len(data) // 2, len(data) - 1):
        changed = bytearray(data)
        changed[position] ^= 1
        (path / name).write_bytes(changed)
        error = failure(path, verify=True)
        expected = {"config.json": ["SPK508"], "manifest.json": ["SPK512", "SPK501", "SPK502"]}
        assert error.code in expected.get(name, ["SPK508"])
        assert name in error.what or error.code == "SPK502"
    (path / name).write_bytes(data)
    EngineDirectory.open(path, verify=True)


def test_a_damaged_tensor_is_named(tmp_path: Path) -> None:
    path = build(tmp_path / "engine")
    with (path / "rank0.weights").open("r+b") as file:
        file.seek(4096 + 3)
        file.write(b"\7")
    EngineDirectory.open(path)  # contents are not read without verify
    error = failure(path, verify=True)
    assert error.code == "SPK508"
    assert "damaged tensors: layers.0.q." in error.what
    bad = [check.name for check in EngineDirectory.open(path).verify() if not check.ok]
    assert bad == ["rank0.weights"]


def test_damaged_padding_is_found_too(tmp_path: Path) -> None:
    path = build(tmp_path / "engine")
    with (path / "rank0.weights").open("r+b") as file:
        file.seek(2000)
        file.write(b"\7")
    assert "only padding" in failure(path, verify=True).what


def test_size_is_checked_without_verify(tmp_path: Path) -> None:
    path = build(tmp_path / "engine")
    with (path / "rank0.weights").open("ab") as file:
        file.write(b"x")
    error = failure(path)
    assert error.code == "SPK507"
    assert "8193 bytes where the manifest says 8192" in error.what


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    path = build(tmp_path / "engine")
    (path / "notes.txt").write_text("mine")
    error = failure(path)
    assert (error.code, "notes.txt" in error.what) == ("SPK511", True)
    (path / "notes.txt").unlink()
    (path / "tokenizer.json").unlink()
    error = failure(path)
    assert (error.code, "tokenizer.json" in error.what) == ("SPK506", True)


@pytest.mark.parametrize("name", ["rank0.weights", "config.json", "manifest.json"])
def test_links_and_special_files_are_refused(tmp_path: Path, name: str) -> None:
    path = build(tmp_path / "engine")
    outside = tmp_path / "outside"
    shutil.copy(path / name, outside)
    (path / name).unlink()
    (path / name).symlink_to(outside)
    assert "a symbolic link" in failure(path).what
    (path / name).unlink()
    os.link(outside, path / name)
    error = failure(path)
    assert (error.code, "a hard link (2 names)" in error.what) == ("SPK510", True)
    (path / name).unlink()
    os.mkfifo(path / name)
    error = failure(path)
    assert (error.code, "not a regular file" in error.what) == ("SPK510", True)


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ""])
def test_a_file_name_cannot_leave_the_directory(tmp_path: Path, name: str) -> None:
    path = build(tmp_path / "engine")
    manifest = EngineDirectory.open(path).manifest
    files = {**manifest.files, name: manifest.files["config.json"]}
    forged = seal_manifest(files, manifest.tensors, manifest.provenance, "0.1.0")
    (path / "manifest.json").write_bytes(encode(forged))
    assert failure(path).code == "SPK513"


def test_other_format_versions_are_named_with_what_to_do(tmp_path: Path) -> None:
    path = build(tmp_path / "engine")

    def newer(data: dict[str, object]) -> None:
        data.update(format_version=7, spikeinfer_version="3.1.0", something="new")

    edit_manifest(path, newer)
    error = failure(path)
    assert error.code == "SPK502"
    assert "format version 7 (written by SpikeInfer 3.1.0)" in error.what
    assert f"reads version {FORMAT_VERSION}" in error.what
    assert "Install spikeinfer 3.1.0 or later" in error.remedy
    assert error.exit_code == ExitCode.UNSUPPORTED


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    path = build(tmp_path / "engine")
    edit_manifest(path, lambda data: data.update(engine_id="0" * 64))
    error = failure(path)
    assert (error.code, "its own hash" in error.what) == ("SPK512", True)


def test_required_cpu_features(tmp_path: Path) -> None:
    needs = replace(PROVENANCE, required_cpu_features=("quantum",))
    with EngineWriter(tmp_path / "engine", version="0.1.0") as writer:
        writer.write("rank0.engine", b"graph")
        writer.stage(tiny_config(()), needs)
        writer.publish(EVIDENCE)
    error = failure(tmp_path / "engine")
    assert (error.code, error.exit_code) == ("SPK509", ExitCode.UNSUPPORTED)
    assert "quantum" in error.what


def test_weights_outside_the_file_are_refused(tmp_path: Path) -> None:
    for offset, size in ((0, 9000), (100, 8)):
        output = tmp_path / f"engine{offset}"
        with EngineWriter(output, version="0.1.0") as writer:
            with writer.weights() as weights:
                spec = weights.append(
                    "w", format="f32", shape=(2, 1), role="other", parameters=(), chunks=[b"8" * 8]
                )
            writer.write("rank0.engine", b"graph")
            forged = replace(spec, offset=offset, bytes=size)
            writer.stage(tiny_config((forged,)), PROVENANCE)
            writer.publish(EVIDENCE)
        assert failure(output).code == "SPK512"


def test_what_is_not_an_engine_gets_a_helpful_answer(tmp_path: Path) -> None:
    assert "No such file" in failure(tmp_path / "absent").what
    (tmp_path / "file").write_text("")
    assert "is a file" in failure(tmp_path / "file").what
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty" in failure(empty).what
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "model.safetensors").write_text("")
    error = failure(checkpoint)
    assert (error.code, "Hugging Face checkpoint" in error.what) == ("SPK501", True)
    assert f"spike-build --model {checkpoint}" in error.remedy
    build(tmp_path / "outer" / "engine")
    assert str(tmp_path / "outer" / "engine") in failure(tmp_path / "outer").remedy
    (empty / "manifest.json").write_text('{"manifest_version": 3}')
    assert "another program's" in failure(empty).what


def test_report_is_self_contained_and_escaped(tmp_path: Path) -> None:
    page = (build(tmp_path / "engine") / "report.html").read_text()
    assert "capital &lt;of&gt; France" in page
    assert "raise-rope" in page
    assert "layers.1: no cos" in page
    assert "at most 0.05, kept" in page
    for outside in ("http://", "https://", "<script", "src=", str(tmp_path)):
        assert outside not in page
