"""The safetensors reader on good, damaged and hostile files; hashes and file lists."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.frontend.safetensors_file import SafetensorsFile
from spikeinfer.errors import SpikeError
from transformers import AutoConfig, AutoModelForCausalLM


def write(path: Path, header: Any, data: bytes = b"", pad: int = 0) -> Path:
    raw = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: str = "U8") -> Any:
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 4), "b": entry(2, 6)}, 6, "b overlaps that of a"),
        ({"a": entry(0, 4), "b": entry(0, 4)}, 4, "b overlaps that of a"),
        ({"a": entry(0, 4), "b": entry(6, 8)}, 8, "b leaves a hole after that of a"),
        ({"a": entry(2, 4)}, 4, "a leaves a hole after that of the header"),
        ({"a": entry(0, 4)}, 6, "2 bytes follow the last tensor"),
        ({"a": entry(4, 0, [4])}, 4, "can't fill"),
        ({"a": entry(0, 4, [2])}, 4, "can't fill"),
        ({"a": entry(0, 4, [2**62, 2**62])}, 4, "can't fill"),
        ({"a": entry(0, 4, [-4])}, 4, "bad shape or bad offsets"),
        ({"a": entry(0, 4, [4.0])}, 4, "bad shape or bad offsets"),
        ({"a": entry(0, 1, [True])}, 1, "bad shape or bad offsets"),
        ({"a": entry(-4, 0, [4])}, 4, "bad shape or bad offsets"),
        ({"a": {"dtype": "U8", "shape": [4]}}, 4, "bad shape or bad offsets"),
        ({"a": entry(0, 4, dtype="F33")}, 4, "unknown dtype 'F33'"),
        ({"a": {**entry(0, 4), "dtype": ["U8"]}}, 4, "unknown dtype ['U8']"),
        ({"a": 3}, 0, "isn't a JSON object"),
        ([1], 0, "isn't a JSON object"),
        (b'{"a": 1, "a": 2}', 0, "a name occurs twice"),
        (b"{", 0, "isn't valid JSON"),
        (b"\xff\xff", 0, "isn't valid JSON"),
        (b"[" * 100_000, 0, "isn't valid JSON"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: Any, data: int, words: str) -> None:
    path = write(tmp_path / "x.safetensors", header, bytes(data))
    with pytest.raises(SpikeError, match="SPK119") as caught:
        SafetensorsFile(path)
    assert words in str(caught.value)
    assert "x.safetensors" in str(caught.value)
    with pytest.raises(SafetensorError):  # the reference implementation refuses it, too
        load_file(path)


def test_offsets_past_the_end_are_a_truncation(tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match="SPK106"):
        SafetensorsFile(write(tmp_path / "x.safetensors", {"a": entry(0, 2**60)}, b"1234"))


def test_header_length_is_bounded_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**63).to_bytes(8, "little") + b"{}")
    with pytest.raises(SpikeError, match=r"SPK119.*claims a header of 9,223,372"):
        SafetensorsFile(path)


def test_unaligned_and_empty_tensors(tmp_path: Path) -> None:
    values = np.arange(6, dtype="<f4")
    header = {
        "__metadata__": {"format": "pt"},
        "byte": entry(0, 1),
        "empty": entry(1, 1, [0, 3], "F32"),
        "floats": entry(1, 25, [2, 3], "F32"),
        "scalar": entry(25, 27, [], "BF16"),
    }
    data = b"\x07" + values.tobytes() + b"\x80\x3f"
    for pad in range(8):  # every alignment of the data
        file = SafetensorsFile(write(tmp_path / f"{pad}.safetensors", header, data, pad))
        assert file.tensor("floats").tolist() == [[0, 1, 2], [3, 4, 5]]
        assert file.tensor("empty").shape == (0, 3)
        assert file.tensor("byte").tolist() == [7]
        assert file.tensor("scalar").item() == 1.0
        assert "__metadata__" not in file.tensors


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.int8]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        max_size=6,
    )
)
def test_reads_what_the_reference_writes(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, tuple[torch.dtype, list[int]]]
) -> None:
    path = tmp_path_factory.mktemp("reference") / "x.safetensors"
    tensors = {name: (torch.randn(shape) * 50).to(dtype) for name, (dtype, shape) in shapes.items()}
    save_file(tensors, path)
    file = SafetensorsFile(path)
    assert file.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        loaded = file.tensor(name)
        assert loaded.dtype == tensor.dtype
        assert loaded.shape == tensor.shape
        expected = tensor.reshape(-1).view(torch.uint8)
        assert torch.equal(loaded.reshape(-1).view(torch.uint8), expected)
        assert bytes(file.raw_bytes(name)) == expected.numpy().tobytes()


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damaged_files_are_refused_or_read_within_bounds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "x.safetensors"
    save_file({"a": torch.ones(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = SafetensorsFile(path)
    except SpikeError as refusal:
        code = refusal.code
    else:
        code = ""
    if code:
        assert code in {"SPK106", "SPK119"}
        return
    for name, tensor in file.tensors.items():
        assert len(file.raw_bytes(name)) == tensor.end - tensor.begin


@pytest.fixture
def checkpoint_directory(tmp_path: Path) -> Path:
    config = AutoConfig.for_model(
        "llama",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        vocab_size=97,
    )
    directory = tmp_path / "model"
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size="20KB")
    return directory


def test_source_hash_can_be_checked_with_sha256sum(checkpoint_directory: Path) -> None:
    names = ["config.json", "model.safetensors.index.json"]
    names += sorted(path.name for path in checkpoint_directory.glob("*-of-*.safetensors"))
    listing = subprocess.run(
        ["sha256sum", *names], cwd=checkpoint_directory, check=True, capture_output=True
    ).stdout
    expected = hashlib.sha256(listing).hexdigest()
    assert Checkpoint.open(checkpoint_directory).source_hash() == expected


def test_source_hash_sees_one_changed_bit(checkpoint_directory: Path) -> None:
    before = Checkpoint.open(checkpoint_directory).source_hash()
    shard = max(checkpoint_directory.glob("*-of-*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert Checkpoint.open(checkpoint_directory).source_hash() != before


def test_fingerprint_changes_with_any_source_file(checkpoint_directory: Path) -> None:
    (checkpoint_directory / "tokenizer.json").write_text("{}")
    checkpoint = Checkpoint.open(checkpoint_directory)
    seen = {checkpoint.fingerprint()}
    assert checkpoint.fingerprint() in seen
    for count, name in enumerate(
        ["config.json", "model.safetensors.index.json", "tokenizer.json"], start=2
    ):
        path = checkpoint_directory / name
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))
        seen.add(checkpoint.fingerprint())
        assert len(seen) == count, name


def test_tokenizer_files(checkpoint_directory: Path) -> None:
    names = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "merges.txt"}
    for name in names:
        (checkpoint_directory / name).write_text("{}")
    templates = checkpoint_directory / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("{{ x }}")
    (checkpoint_directory / "README.md").touch()
    found = {path.name for path in Checkpoint.open(checkpoint_directory).tokenizer_files()}
    assert found == names | {"tool_use.jinja", "generation_config.json"}


def test_other_weight_files_are_named_in_notes(checkpoint_directory: Path) -> None:
    for name in ("consolidated.safetensors", "pytorch_model.bin", "training_args.bin"):
        (checkpoint_directory / name).touch()
    assert Checkpoint.open(checkpoint_directory).notes == (
        "consolidated.safetensors isn't part of the checkpoint's weights and was not read",
        "pytorch_model.bin isn't part of the checkpoint's weights and was not read",
    )


def test_opening_maps_no_weights(checkpoint_directory: Path) -> None:
    checkpoint = Checkpoint.open(checkpoint_directory)
    mapped = Path("/proc/self/maps").read_text()
    norm = json.loads((checkpoint_directory / "model.safetensors.index.json").read_text())[
        "weight_map"
    ]["model.norm.weight"]
    assert str(checkpoint_directory / norm) not in mapped
    tensor = checkpoint.load("model.norm.weight")
    assert str(checkpoint_directory / norm) in Path("/proc/self/maps").read_text()
    assert tensor.shape == (32,)
