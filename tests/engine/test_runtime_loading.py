"""Engine directories on disk: both ABIs through ONNX Runtime, and what does not fit.

The models are toys of standard ONNX operators. Streaming: every logit is the sum of all pool bytes
plus ten times the row's token. Functional: the running sum of token * (position + 1).
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from spikeinfer import SpikeEngine, SpikeError
from spikeinfer.compiler.engine import (
    BuildConfig,
    EngineConfig,
    EngineWriter,
    Evidence,
    PretrainedConfig,
    Provenance,
    QuantizationConfig,
    SpikeConfig,
    StateSpec,
)
from spikeinfer.runtime import build_cache
from spikeinfer.runtime.batch import Chunk, step_inputs
from spikeinfer.runtime.blocks import BlockPool

VOCAB, BLOCK, CAPACITY = 100, 4, 24


def streaming_model() -> onnx.ModelProto:
    i32, u8, f32 = TensorProto.INT32, TensorProto.UINT8, TensorProto.FLOAT
    pool_shape = ["NB", BLOCK, 1, 1]
    shapes: dict[str, list[str]] = {
        "tokens": ["T"],
        "positions": ["T"],
        "slots": ["T"],
        "seq_starts": ["B1"],
        "kv_lens": ["B"],
        "block_tables": ["B", "M"],
        "logit_rows": ["R"],
        "wanted_logits": ["F"],
    }
    nodes = [
        helper.make_node("Reshape", ["pool", "flat_shape"], ["flat"]),
        helper.make_node("Cast", ["tokens"], ["bytes"], to=u8),
        helper.make_node("Cast", ["slots"], ["slots64"], to=TensorProto.INT64),
        helper.make_node("Unsqueeze", ["slots64", "last"], ["index"]),
        helper.make_node("ScatterND", ["flat", "index", "bytes"], ["written"]),
        helper.make_node("Shape", ["pool"], ["pool_shape"]),
        helper.make_node("Reshape", ["written", "pool_shape"], ["pool_out"]),
        helper.make_node("Cast", ["written"], ["values"], to=f32),
        helper.make_node("ReduceSum", ["values"], ["total"], keepdims=0),
        helper.make_node("Gather", ["tokens", "logit_rows"], ["chosen"]),
        helper.make_node("Cast", ["chosen"], ["chosen_f"], to=f32),
        helper.make_node("Unsqueeze", ["chosen_f", "last"], ["column"]),
        helper.make_node("Mul", ["column", "ten_row"], ["wide"]),
        helper.make_node("Add", ["wide", "total"], ["all"]),
        helper.make_node("Gather", ["all", "wanted_logits"], ["logits"]),
        helper.make_node("ReduceMax", ["all", "last"], ["best_logits"], keepdims=0),
        helper.make_node("ArgMax", ["all"], ["best_ids64"], axis=-1, keepdims=0),
        helper.make_node("Cast", ["best_ids64"], ["best_ids"], to=i32),
    ]
    constants = {
        "flat_shape": np.array([-1], np.int64),
        "last": np.array([-1], np.int64),
        "ten_row": np.full((1, VOCAB), 10, np.float32),
    }
    inputs = [helper.make_tensor_value_info(n, i32, s) for n, s in shapes.items()]
    inputs.append(helper.make_tensor_value_info("pool", u8, pool_shape))
    outputs = [
        helper.make_tensor_value_info("logits", f32, ["F", VOCAB]),
        helper.make_tensor_value_info("best_ids", i32, ["R"]),
        helper.make_tensor_value_info("best_logits", f32, ["R"]),
        helper.make_tensor_value_info("pool_out", u8, pool_shape),
    ]
    return model_of(nodes, inputs, outputs, constants)


def functional_model() -> onnx.ModelProto:
    i32, f32 = TensorProto.INT32, TensorProto.FLOAT
    nodes = [
        helper.make_node("Cast", ["tokens"], ["ids"], to=f32),
        helper.make_node("Cast", ["positions"], ["places"], to=f32),
        helper.make_node("Add", ["places", "one"], ["counted"]),
        helper.make_node("Mul", ["ids", "counted"], ["weighted"]),
        helper.make_node("Unsqueeze", ["weighted", "axes"], ["new"]),
        helper.make_node("Concat", ["past", "new"], ["present"], axis=2),
        helper.make_node("CumSum", ["present", "axis"], ["sums"]),
        helper.make_node("Shape", ["past"], ["start"], start=2, end=3),
        helper.make_node("Slice", ["sums", "start", "far", "two"], ["recent"]),
        helper.make_node("Squeeze", ["recent", "first"], ["rows"]),
        helper.make_node("Mul", ["rows", "ones_row"], ["logits"]),
    ]
    constants = {
        "one": np.array(1, np.float32),
        "axes": np.array([1, 3], np.int64),
        "axis": np.array(2, np.int64),
        "two": np.array([2], np.int64),
        "far": np.array([1 << 40], np.int64),
        "first": np.array([1], np.int64),
        "ones_row": np.ones((1, 1, VOCAB), np.float32),
    }
    inputs = [helper.make_tensor_value_info(n, i32, ["B", "S"]) for n in ("tokens", "positions")]
    inputs.append(helper.make_tensor_value_info("past", f32, ["B", 1, "P", 1]))
    outputs = [
        helper.make_tensor_value_info("logits", f32, ["B", "S", VOCAB]),
        helper.make_tensor_value_info("present", f32, ["B", 1, "Q", 1]),
    ]
    return model_of(nodes, inputs, outputs, constants)


def model_of(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    constants: dict[str, np.ndarray],
) -> onnx.ModelProto:
    stored = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    graph = helper.make_graph(nodes, "toy", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def write_engine(
    path: Path, abi: str = "streaming", graph: bytes | None = None, **names: str
) -> Path:
    streaming = abi == "streaming"
    state = StateSpec("kv", "pool", "pool_out", 1, 1, "bytes", 1)
    if not streaming:
        state = StateSpec("kv", "past", "present", 1, 1, "f32", 4)
    formats = QuantizationConfig("f16", "int4" if streaming else "f32")
    pretrained = PretrainedConfig("Toy", "toy", "float32", VOCAB, 1, 1, 1, 1, 1, 64, formats)
    kind = "paged" if streaming else "continuous"
    build = BuildConfig(8, 4, CAPACITY, kind, BLOCK, streaming)
    spike = SpikeConfig(abi, "onnxruntime", VOCAB, (99,), (state,), ())
    model = streaming_model() if streaming else functional_model()
    with EngineWriter(path, version="0") as writer:
        with writer.weights():
            pass
        writer.write("rank0.engine", model.SerializeToString() if graph is None else graph)
        for name, text in names.items():
            writer.write(f"{name}.json", text.encode())
        writer.stage(EngineConfig(pretrained, build, spike), Provenance("0"))
        writer.publish(Evidence("off"))
    return path


@pytest.fixture(scope="module")
def streaming(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("toys") / "streaming")


@pytest.fixture(scope="module")
def functional(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_engine(tmp_path_factory.mktemp("toys") / "functional", "functional")


@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_the_streaming_pools_keep_what_was_written(streaming: Path, chunk: int) -> None:
    tokens = list(range(1, CAPACITY + 1))
    with SpikeEngine(streaming, threads=1) as engine:
        logits = engine.score(tokens, chunk_tokens=chunk)
    ends = [min(CAPACITY, (t // chunk + 1) * chunk) for t in range(CAPACITY)]
    expected = [sum(tokens[:end]) + 10 * token for end, token in zip(ends, tokens, strict=True)]
    np.testing.assert_array_equal(logits[:, 0], expected)


def test_steps_without_wanted_logits_and_with_many(streaming: Path) -> None:
    with SpikeEngine(streaming, threads=1) as engine:
        done = engine.generate_batch([[3] * 20, [4], [5, 6]], max_tokens=2)
    # All logits of a row are equal, so the arg max is id 0.
    assert [c.token_ids for c in done] == [[0, 0]] * 3


@pytest.mark.parametrize("chunk", [1, 5, 8])
def test_the_functional_engine_behind_the_same_interface(functional: Path, chunk: int) -> None:
    tokens = [(7 * i) % 90 for i in range(CAPACITY)]
    with SpikeEngine(functional, threads=1) as engine:
        logits = engine.score(tokens, chunk_tokens=chunk)
    sums = np.cumsum(np.array(tokens) * np.arange(1, CAPACITY + 1))
    np.testing.assert_array_equal(logits, np.repeat(sums[:, None], VOCAB, 1))


def test_the_functional_engine_keeps_sequences_apart(functional: Path) -> None:
    with SpikeEngine(functional, threads=1) as engine:
        session, pool = engine._loaded.session, BlockPool(20, BLOCK)
        tables = [pool.table(), pool.table()]
        for start, stop in ((0, 3), (3, 7)):
            index = range(start, stop)
            assert [table.grow(start, stop) for table in tables] == [[], []]
            chunks = [
                Chunk([k for _ in index], start, table, [stop - start - 1])
                for k, table in zip((1, 2), tables, strict=True)
            ]
            logits = session.step(step_inputs(chunks))
    np.testing.assert_array_equal(logits[:, 0], [28, 56])  # 1 + ... + 7, and twice that


def test_a_step_that_fails_is_a_runtime_error(streaming: Path) -> None:
    with SpikeEngine(streaming, threads=1) as engine:
        table = BlockPool(1000, BLOCK).table()
        table.grow(0, 1)
        inputs = step_inputs([Chunk([1], 0, table, [0])])
        inputs.slots[:] = 1 << 20
        with pytest.raises(SpikeError) as caught:
            engine._loaded.session.step(inputs)
    assert (caught.value.code, caught.value.exit_code) == ("SPK616", 70)


@pytest.mark.parametrize("graph", [b"no model", None], ids=["damaged", "other interface"])
def test_a_model_that_can_not_be_loaded(tmp_path: Path, graph: bytes | None) -> None:
    other = functional_model().SerializeToString() if graph is None else graph
    with pytest.raises(SpikeError) as caught:
        SpikeEngine(write_engine(tmp_path / "engine", graph=other))
    assert caught.value.code == "SPK614"
    assert graph is not None or "block_tables" in caught.value.what


def test_the_announced_snippet_on_an_engine_path(streaming: Path) -> None:
    with pytest.warns(UserWarning, match="max_seq_len=8192 is more than the 24 tokens"):
        engine = SpikeEngine(
            model_path=str(streaming),
            quant_config={"kv_cache": "int4", "linear": "fp16"},
            max_seq_len=8192,
            device_map="auto",
        )
    done = engine.complete(prompt=[1, 2], temperature=0.7, top_p=0.95)
    assert (done.finish_reason, len(done.token_ids)) in {("length", CAPACITY - 2), ("stop", 1)} or (
        done.token_ids[-1] == 99
    )
    engine.close()


def test_formats_the_engine_was_not_built_with(streaming: Path) -> None:
    with pytest.raises(SpikeError, match=r"'int8' was asked for.*built with kv_cache 'int4'") as e:
        SpikeEngine(streaming, quant_config={"kv_cache": "int8"})
    assert e.value.code == "SPK602"
    with pytest.raises(SpikeError, match=r"'q4_k_m' was asked for.*built with linear 'f16'"):
        SpikeEngine(streaming, quant_config={"linear": "q4_k_m"})
    with pytest.raises(SpikeError, match="'attention'") as e:
        SpikeEngine(streaming, quant_config={"attention": "int8"})
    assert e.value.code == "SPK603"


def test_a_smaller_max_seq_len_holds(streaming: Path) -> None:
    with SpikeEngine(streaming, max_seq_len=6) as engine:
        assert engine.max_seq_len == 6
        assert len(engine.complete([1] * 4, max_tokens=None).token_ids) == 2
        with pytest.raises(SpikeError, match="SPK606"):
            engine.complete([1] * 6)


def test_other_devices_and_paths(streaming: Path, tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match="'cuda' is not available") as caught:
        SpikeEngine(streaming, device_map="cuda")
    assert caught.value.code == "SPK604"
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SpikeError, match=str(path)) as caught:
            SpikeEngine(path)
        assert caught.value.code == "SPK601"
    with pytest.raises(TypeError, match="one path"):
        SpikeEngine(streaming, model_path=streaming)


def test_kv_memory(streaming: Path) -> None:
    with pytest.raises(SpikeError, match="Give at least 24 bytes") as caught:
        SpikeEngine(streaming, kv_cache_memory=23)
    assert caught.value.code == "SPK615"
    with SpikeEngine(streaming, kv_cache_memory=24) as engine:
        assert len(engine.generate_batch([[1]] * 3, max_tokens=2)) == 3


def test_eos_is_the_union_and_defaults_are_only_offered(tmp_path: Path) -> None:
    generation = '{"eos_token_id": [7, 8], "do_sample": true, "top_p": 0.9}'
    path = write_engine(tmp_path / "engine", generation_config=generation)
    with SpikeEngine(path) as engine:
        assert engine.eos_token_ids == {7, 8, 99}
        assert engine.generation_defaults == {"temperature": 1.0, "top_k": 50, "top_p": 0.9}
        assert engine.complete([1], max_tokens=2).token_ids == [0, 0]  # greedy all the same


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    path = write_engine(tmp_path / "engine", tokenizer="{}")
    with pytest.raises(SpikeError, match=r"tokenizer\.json can't be read") as caught:
        SpikeEngine(path)
    assert caught.value.code == "SPK610"


class FakeDriver:
    """Stands in for the compiler; notes what it was asked to build."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []

    def BuildRequest(self, **fields: Any) -> dict[str, Any]:
        return fields

    def build(self, request: dict[str, Any]) -> None:
        self.requests.append(request)
        write_engine(request["output_dir"])


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeDriver:
    fake = FakeDriver()
    monkeypatch.setattr(build_cache, "_driver", lambda: fake)
    monkeypatch.setenv("SPIKE_CACHE_DIR", str(tmp_path / "cache"))
    return fake


def write_checkpoint(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"max_position_embeddings": 2048}')
    (path / "model.safetensors").write_bytes(bytes(range(256)))
    return path


def test_a_checkpoint_is_built_once_for_its_contents(driver: FakeDriver, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    for _ in range(2):
        SpikeEngine(checkpoint).close()
    assert len(driver.requests) == 1
    assert driver.requests[0]["model"] == checkpoint
    assert driver.requests[0]["enable_streaming"] is True
    assert driver.requests[0]["output_dir"].parent == tmp_path / "cache" / "engines"

    (checkpoint / "model.safetensors").write_bytes(bytes(range(1, 256)) + b"\0")
    SpikeEngine(checkpoint).close()
    (checkpoint / "README.md").write_text("not part of the model")
    SpikeEngine(checkpoint).close()
    assert len(driver.requests) == 2


def test_options_are_part_of_the_key(driver: FakeDriver, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    quant_config = {"kv_cache": "int4", "linear": "fp16"}
    with pytest.warns(UserWarning, match="24 are used"):
        SpikeEngine(checkpoint, quant_config=quant_config, max_seq_len=8192).close()
    asked = driver.requests[0]
    assert (asked["quantization"], asked["kv_cache_dtype"]) == ("f16", "int4")
    assert asked["max_seq_len"] == 2048  # what the model was made for
    SpikeEngine(checkpoint, quant_config=quant_config).close()
    assert "max_seq_len" not in driver.requests[1]
    SpikeEngine(checkpoint).close()
    assert len({str(request["output_dir"]) for request in driver.requests}) == 3


def test_without_the_compiler_a_checkpoint_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPIKE_CACHE_DIR", str(tmp_path / "cache"))

    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(build_cache, "importlib", SimpleNamespace(import_module=missing))
    with pytest.raises(SpikeError, match=r"needs torch.*spikeinfer\[build\]") as caught:
        SpikeEngine(write_checkpoint(tmp_path / "model"))
    assert (caught.value.code, caught.value.exit_code) == ("SPK613", 5)


@pytest.mark.parametrize("abi", ["streaming", "functional"])
def test_serving_imports_no_compiler_libraries(abi: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(abi)
    code = f"""
        import sys
        import spikeinfer
        assert not {{"numpy", "onnxruntime", "tokenizers"}} & set(sys.modules), "spikeinfer alone"
        for name in ("torch", "transformers", "onnx", "safetensors", "gguf"):
            sys.modules[name] = None  # an import raises
        engine = spikeinfer.SpikeEngine({str(path)!r})
        engine.generate_batch([[1, 2, 3], [4]], max_tokens=3, temperature=0.5)
        engine.score([1, 2])
        loaded = [name for name in sys.modules if name.startswith("spikeinfer.")]
        unwanted = ("passes", "frontend", "quantize", "backends", "assembly", ".ir", "driver")
        assert not [name for name in loaded if any(word in name for word in unwanted)], loaded
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
