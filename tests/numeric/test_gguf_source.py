"""A GGUF file as a checkpoint: its values, its blocks, its config, and what is refused.

The files are made here from tiny-llama with the `gguf` package's writer, by llama.cpp's conventions
as its converter follows them (rows of q and k interleaved); `tests/slow` has the converter itself.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.gguf.checkpoint import GgufCheckpoint, gguf_file
from spikeinfer.compiler.gguf.rope import llama3_factors, llama3_parameters, wavelengths
from spikeinfer.compiler.ir import Constant, DType, TensorType
from spikeinfer.errors import SpikeError
from spikeinfer.kernels import Format, quantize

Q4_K, Q5_0, Q8_0 = (GGMLQuantizationType[n] for n in ("Q4_K", "Q5_0", "Q8_0"))
TINY = Path(__file__).parents[2] / ".cache" / "models" / "tiny-llama"
Array = np.ndarray[Any, Any]


def types(name: str) -> GGMLQuantizationType | None:
    """As a mix might: K of tiny-llama is 64, and 256 in ffn_down."""
    if name.endswith("down_proj.weight"):
        return Q4_K
    if "norm" in name:
        return None
    return Q8_0 if "v_proj" in name or "embed" in name else Q5_0


def interleaved(weight: Array, heads: int) -> Array:
    """LlamaModel.permute of llama.cpp's conversion/llama.py."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def blocks(values: Array, type: GGMLQuantizationType) -> Array:
    return quantize(values, Format.__args__[Format.__args__.index(type.name.lower())])  # type: ignore[attr-defined]


def write(
    checkpoint: Path, out: Path, change: Callable[[gguf.GGUFWriter], None] = lambda _: None
) -> dict[str, Array]:
    """Writes the file; parameter -> its values as the file's blocks stand for."""
    source = Checkpoint.open(checkpoint)
    config = source.config
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    change(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    expected = {}
    for name in source.parameters:
        values = source.load(name).float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        own = next((count for part, count in heads.items() if part in name), 0)
        stored = interleaved(values, own) if own else values
        target = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        if (type := types(name)) is None:
            writer.add_tensor(target, stored)
            expected[name] = values
        else:
            writer.add_tensor(target, blocks(stored, type), raw_dtype=type)
            rows = quants.dequantize(blocks(values, type), type)  # a row's blocks are its own
            expected[name] = rows.reshape(values.shape)
    rope = config.rope_parameters
    waves = wavelengths(rope["rope_theta"], config.head_dim)
    factors = llama3_factors(waves, rope["factor"], rope["original_max_position_embeddings"])
    writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write(TINY, path)


def test_values_and_config_are_the_checkpoints(made: tuple[Path, Any]) -> None:
    path, expected = made
    ours, theirs = GgufCheckpoint.open(path), Checkpoint.open(TINY)
    assert ours.architecture == "LlamaForCausalLM"
    for name, values in expected.items():
        assert ours.parameters[name].shape == values.shape
        assert np.array_equal(ours.load(name).numpy(), values), name
    found, wanted = ours.config.to_dict(), theirs.config.to_dict()
    unstated = {"_name_or_path", "architectures", "bos_token_id", "eos_token_id"}
    assert {k for k in {*found, *wanted} if found.get(k) != wanted.get(k)} == unstated


def matrix(parameter: str, shape: tuple[int, ...], **options: Any) -> Constant:
    return Constant("w", TensorType(DType.F32, shape), parameter, **options)


def test_blocks_are_the_files_with_rows_in_the_models_order(made: tuple[Path, Any]) -> None:
    path, _ = made
    checkpoint = GgufCheckpoint.open(path)
    for part, type in (("self_attn.q_proj", Q5_0), ("self_attn.v_proj", Q8_0),
                       ("mlp.down_proj", Q4_K)):  # fmt: skip
        name = f"model.layers.1.{part}.weight"
        values = Checkpoint.open(TINY).load(name).float().numpy()
        found = checkpoint.weights.blocks(matrix(name, values.shape))
        assert found is not None
        assert (found.format, found.k) == (type.name.lower(), values.shape[1])
        assert np.array_equal(found.rows, blocks(values, type))
        some = checkpoint.weights.blocks(matrix(name, (4, values.shape[1]), rows=(8, 16, 2)))
        assert some is not None
        assert np.array_equal(some.rows, blocks(values, type)[8:16:2])


def test_what_is_not_the_files_rows_has_no_blocks(made: tuple[Path, Any]) -> None:
    weights = GgufCheckpoint.open(made[0]).weights
    name = "model.layers.0.self_attn.v_proj.weight"
    assert weights.blocks(matrix(name, (64, 64), transposed=True)) is None
    assert weights.blocks(matrix(name, (64, 64), plus=1.0)) is None
    assert weights.blocks(matrix("model.norm.weight", (64,), plus=1.0)) is None
    assert weights.blocks(matrix("no.such.parameter", (64, 64))) is None


def test_the_reference_model_computes_with_the_files_values(made: tuple[Path, Any]) -> None:
    path, expected = made
    model = GgufCheckpoint.open(path).float_model()
    for name, tensor in model.state_dict().items():
        assert np.array_equal(tensor.numpy(), expected[name]), name
    with torch.inference_mode():
        assert bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())


def test_hashes_follow_the_file(made: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = made
    first, again = GgufCheckpoint.open(path), GgufCheckpoint.open(path)
    assert first.source_hash() == again.source_hash()
    assert first.fingerprint() == again.fingerprint()
    other = tmp_path / path.name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1  # in some weight
    other.write_bytes(data)
    assert GgufCheckpoint.open(other).source_hash() != first.source_hash()


def test_what_lies_beside_wins(made: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copyfile(made[0], tmp_path / "m.gguf")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / name, tmp_path / name)
    checkpoint = GgufCheckpoint.open(tmp_path)
    assert checkpoint.config.bos_token_id == 256
    assert {p.name for p in checkpoint.tokenizer_files()} >= {"tokenizer.json"}
    assert GgufCheckpoint.open(tmp_path / "m.gguf").config.bos_token_id is None


def test_which_file_a_path_means(tmp_path: Path) -> None:
    assert gguf_file(TINY) is None
    assert gguf_file(tmp_path) is None
    assert gguf_file(tmp_path / "missing.gguf") == tmp_path / "missing.gguf"
    for name, data, expected in (("blob", b"GGUF", True), ("other", b"GGML", False)):
        (tmp_path / name).write_bytes(data)
        assert (gguf_file(tmp_path / name) is not None) == expected
    for name in ("a-00001-of-00002.gguf", "a-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert gguf_file(tmp_path) == tmp_path / "a-00001-of-00002.gguf"
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    with pytest.raises(SpikeError, match=r"SPK139.* holds 2 GGUF files"):
        gguf_file(tmp_path)


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], str]] = {
    "architecture": (lambda w: w.add_string("general.architecture", "rwkv9"),
                     "SPK135.*'rwkv9'; those that can be built are llama, qwen2"),
    "unknown key": (lambda w: w.add_float32("llama.attention.clamp_kqv", 8.0),
                    "SPK136.*llama.attention.clamp_kqv = 8.0"),
    "text for a number": (lambda w: w.add_string("llama.block_count", "two"),
                          "SPK136.*llama.block_count is 'two', not a whole number"),
    "no such size": (lambda w: w.add_uint32("llama.embedding_length", 128), "SPK109"),
    "rope scaling": (lambda w: w.add_string("llama.rope.scaling.type", "longrope"),
                     "SPK136.*rope_freqs.weight isn't the scaling"),
    "partial rotation": (lambda w: w.add_uint32("llama.rope.dimension_count", 16),
                         "SPK136.*rope.dimension_count is 16, but keys have 32"),
    "one layer too few": (lambda w: w.add_uint32("llama.block_count", 1),
                          "SPK136.*block_count = 1 and has 2 layers"),
    "a billion layers": (lambda w: w.add_uint32("llama.block_count", 10**9),
                         "SPK136.*block_count = 1000000000 and has 2 layers"),
    "an unknown tensor": (lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, "f4")),
                          "SPK137.*first: blk.0.attn_sinks.weight"),
}  # fmt: skip


def overriding(change: Callable[[gguf.GGUFWriter], None]) -> Callable[[gguf.GGUFWriter], None]:
    """A change that wins over the keys that are there."""

    def apply(writer: gguf.GGUFWriter) -> None:
        before = {key: value for part in writer.kv_data for key, value in part.items()}
        for part in writer.kv_data:
            part.clear()
        change(writer)
        own = {key: value for part in writer.kv_data for key, value in part.items()}
        writer.kv_data[0] = {**before, **own}

    return apply


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_refused(case: str, tmp_path: Path) -> None:
    change, message = REFUSED[case]

    write(TINY, tmp_path / "x.gguf", overriding(change))
    with pytest.raises(SpikeError, match=message):
        GgufCheckpoint.open(tmp_path / "x.gguf")


SIZES = (
    *("context_length", "block_count", "embedding_length", "feed_forward_length"),
    *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
    *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.dimension_count"),
)
VALID = {"context_length": (3,), "attention.layer_norm_rms_epsilon": (3, 2**31, 2.5)}
HOSTILE = (0, -1, 3, 2**31, 2.5, float("nan"), float("inf"), True, "x", [1, 2])


@pytest.mark.parametrize("key", SIZES)
def test_hostile_numbers_are_refused(key: str, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for value in HOSTILE:
        kind = gguf.GGUFValueType.get_type(value) if value != 2**31 else gguf.GGUFValueType.UINT32
        sub = gguf.GGUFValueType.INT32 if isinstance(value, list) else None
        change = overriding(
            lambda w, v=value, k=kind, s=sub: w.add_key_value(f"llama.{key}", v, k, s)
        )
        write(TINY, path, change)
        code = ""
        try:
            GgufCheckpoint.open(path)
        except SpikeError as error:
            code = error.code
        assert code or value in VALID.get(key, ()), (key, value)


def split(path: Path, tmp_path: Path, parts: int) -> list[Path]:
    """The file in parts, as llama.cpp's gguf-split makes them."""
    reader = gguf.GGUFReader(str(path))
    names = [tmp_path / f"s-{i + 1:05}-of-{parts:05}.gguf" for i in range(parts)]
    for number, name in enumerate(names):
        writer = gguf.GGUFWriter(str(name), "llama")
        for key, field in reader.fields.items():
            if number == 0 and not key.startswith(("GGUF.", "general.architecture")):
                writer.add_key_value(key, field.contents(), field.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return names


def test_a_split_file_is_one_checkpoint(made: tuple[Path, Any], tmp_path: Path) -> None:
    names = split(made[0], tmp_path, 3)
    checkpoint = GgufCheckpoint.open(names[0])
    for name, values in made[1].items():
        assert np.array_equal(checkpoint.load(name).numpy(), values)
    assert checkpoint.weight_files() == names
    names[1].unlink()
    with pytest.raises(SpikeError, match=r"SPK134.* 1 of 3 parts are missing, first: s-00002-of"):
        GgufCheckpoint.open(names[0])
    shutil.copyfile(names[0], names[1])
    with pytest.raises(SpikeError, match=r"SPK134"):
        GgufCheckpoint.open(names[0])


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (4.0, 100)])
def test_llama3_scaling_is_found_again(factor: float, original: int) -> None:
    factors = llama3_factors(wavelengths(500000.0, 128), factor, original)
    found = llama3_parameters(factors.astype(np.float32).astype(np.float64), 500000.0)
    assert found is not None
    assert (found["factor"], found["original_max_position_embeddings"]) == (factor, original)
    assert llama3_parameters(factors * np.linspace(1, 1.01, len(factors)), 500000.0) is None
