"""The TensorRT session against a fake that computes in the addresses and shapes it is given, and
that fake against the real module's names and signatures, where it is installed."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from spikeinfer import SpikeError
from spikeinfer.compiler.engine import (
    AliasSpec,
    BuildConfig,
    EngineConfig,
    PretrainedConfig,
    ProfileSpec,
    QuantizationConfig,
    SpikeConfig,
    StateSpec,
    TensorRtSpec,
)
from spikeinfer.runtime import SpikeEngine
from spikeinfer.runtime.loading import LoadedEngine
from spikeinfer.runtime.tensorrt_session import TensorRtSession, linear_limits

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("tensorrt_fake", HERE / "tensorrt_fake.py")
assert _spec is not None
assert _spec.loader is not None
fake: Any = importlib.util.module_from_spec(_spec)
sys.modules["tensorrt_fake"] = fake
_spec.loader.exec_module(fake)

BATCH, CHUNK, ROWS, LENGTH, CAPACITY = 4, 6, 3, 30, 32
STOP = [2, 15, 22, 23]


def config() -> EngineConfig:
    states = tuple(
        StateSpec(f"layers.0.{n}", f"past.{n}", f"present.{n}", fake.HEADS, fake.WIDTH, "f16", 16)
        for n in ("key", "value")
    )
    return EngineConfig(
        PretrainedConfig("Fake", "fake", "float16", fake.VOCAB, 16, 1, 2, 2, 8, 64,
                         QuantizationConfig("f16", "f16")),
        BuildConfig(CHUNK * 2, BATCH, LENGTH, "continuous", CAPACITY, False),
        SpikeConfig(
            "linear", "tensorrt_rtx", fake.VOCAB, (), states, (),
            tensorrt=TensorRtSpec(
                "1.7.1.116", ("sm89",), "f16", CAPACITY,
                (ProfileSpec("prefill", (1, 1, 1), (1, CHUNK, CHUNK), (1, 1, ROWS)),
                 ProfileSpec("decode", (1, BATCH, BATCH), (1, 1, 1), (1, 1, 1))),
                tuple(AliasSpec(s.name, s.input, s.output) for s in states),
            ),
        ),
    )  # fmt: skip


def session(tmp_path: Path, engine: Any = None, **options: Any) -> TensorRtSession:
    model = tmp_path / "rank0.engine"
    model.write_bytes(b"plan" + bytes(60))
    engine = engine or fake.FakeEngine(BATCH, CHUNK, ROWS, CAPACITY)
    gpu = options.pop("gpu", None) or fake.FakeGpu()
    limits = linear_limits(config(), LENGTH, options.pop("kv_cache_memory", None))
    return TensorRtSession(model, config(), limits, options.pop("trt", fake.FakeTrt(engine)), gpu)


def generated(engine: SpikeEngine, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Tokens of several requests that share steps; a token of STOP ends one."""
    said = engine.generate_batch(prompts, max_tokens=count, stop_token_ids=STOP)
    return [completion.token_ids for completion in said]


def greedy(prompt: list[int], count: int) -> list[int]:
    """What the small model says, by its definition alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(fake.logits_of(tokens).argmax()))
        if tokens[-1] in STOP:
            break
    return tokens[len(prompt) :]


PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2], [8, 4], [6, 2, 6, 4, 3], [7, 7]]


def test_many_sequences_say_what_each_says_alone(tmp_path: Path) -> None:
    """Chunked prompts, rows that come and go, idle rows between busy ones."""
    opened = session(tmp_path)
    with SpikeEngine.from_loaded(LoadedEngine(opened)) as engine:
        said = generated(engine, PROMPTS, 12)
    assert said == [greedy(p, 12) for p in PROMPTS]
    assert len({len(tokens) for tokens in said}) > 2  # they end at different times


def test_decode_is_one_captured_run_from_row_0(tmp_path: Path) -> None:
    engine = fake.FakeEngine(BATCH, CHUNK, ROWS, CAPACITY)
    opened = session(tmp_path, engine)
    with SpikeEngine.from_loaded(LoadedEngine(opened)) as running:
        generated(running, PROMPTS[:3], 5)
    prefill, decode = engine.contexts
    assert (prefill.profile, prefill.captured) == (0, False)
    assert (decode.profile, decode.captured) == (1, True)
    assert all(batch == 1 for batch, _ in prefill.runs)
    assert all(size == 1 for _, size in decode.runs)
    assert max(batch for batch, _ in decode.runs) > 1
    assert engine.budget == 800  # of streamed weights, set before the contexts


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_every_row_of_a_prompt_can_be_read(tmp_path: Path, chunk: int | None) -> None:
    """More rows than the engine gives at a time, in chunks of any size."""
    tokens = PROMPTS[2]
    with SpikeEngine.from_loaded(LoadedEngine(session(tmp_path))) as engine:
        logits = engine.score(tokens, chunk_tokens=chunk)
    expected = [fake.logits_of(tokens[: i + 1]) for i in range(len(tokens))]
    np.testing.assert_array_equal(logits, np.stack(expected))


def test_a_full_cache_row_keeps_its_last_token(tmp_path: Path) -> None:
    """The scratch place of idle rows is none that a sequence uses."""
    with SpikeEngine.from_loaded(LoadedEngine(session(tmp_path))) as engine:
        long, short = list(range(1, 21)), [2]
        said = generated(engine, [long, short], 10)
    assert said == [greedy(long, 10), greedy(short, 10)]
    assert len(said[0]) == 10


def test_memory_for_fewer_sequences(tmp_path: Path) -> None:
    row = 2 * fake.HEADS * CAPACITY * 16
    opened = session(tmp_path, kv_cache_memory=2 * row + 5)
    assert opened.limits.num_blocks == opened.limits.max_batch_size == 2
    with SpikeEngine.from_loaded(LoadedEngine(opened)) as engine:
        said = generated(engine, PROMPTS, 3)
    assert said == [greedy(p, 3) for p in PROMPTS]
    with pytest.raises(SpikeError, match="don't hold the cache of one sequence") as refused:
        session(tmp_path, kv_cache_memory=row - 1)
    assert refused.value.code == "SPK615"


def test_too_little_device_memory(tmp_path: Path) -> None:
    gpu = fake.FakeGpu(most=1000)
    with pytest.raises(SpikeError, match="GPU has too little memory") as refused:
        session(tmp_path, gpu=gpu)
    assert refused.value.code == "SPK624"
    assert gpu.closed


@pytest.mark.parametrize(
    ("trt", "words"),
    [
        (fake.FakeTrt(None), "CUDA initialization failure"),
        (fake.FakeTrt(None, flags=3), "version mismatch, unsupported cc"),
    ],
)
def test_tensorrt_refuses(tmp_path: Path, trt: Any, words: str) -> None:
    gpu = fake.FakeGpu()
    with pytest.raises(SpikeError, match=words) as refused:
        session(tmp_path, trt=trt, gpu=gpu)
    assert refused.value.code == "SPK623"
    assert gpu.closed


def break_names(engine: Any) -> None:
    engine.names[5] = "past.other"


def break_alias(engine: Any) -> None:
    engine.get_aliased_input_tensor = lambda name: "tokens"


def break_dtype(engine: Any) -> None:
    engine.get_tensor_dtype = lambda name: "BF16"


def break_profile(engine: Any) -> None:
    engine.profiles[1]["tokens"][-1] = (BATCH + 1, 1)


def break_profiles(engine: Any) -> None:
    engine.profiles.pop()


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (break_names, "past.key, past.other"),
        (break_alias, "present.key, present.value"),
        (break_dtype, "kv_lens, logit_rows, logits"),
        (break_profile, "profile decode"),
        (break_profiles, "profiles"),
    ],
)
def test_an_engine_of_another_interface(tmp_path: Path, damage: Any, named: str) -> None:
    engine = fake.FakeEngine(BATCH, CHUNK, ROWS, CAPACITY)
    damage(engine)
    with pytest.raises(SpikeError, match=f"disagree about {named}") as refused:
        session(tmp_path, engine)
    assert refused.value.code == "SPK614"


def test_a_failed_step_ends_its_requests_only(tmp_path: Path) -> None:
    engine = fake.FakeEngine(BATCH, CHUNK, ROWS, CAPACITY)
    with SpikeEngine.from_loaded(LoadedEngine(session(tmp_path, engine))) as running:
        engine.fails = True
        with pytest.raises(SpikeError, match="did not run the prefill step"):
            running.complete(PROMPTS[0], max_tokens=3)
        engine.fails = False
        assert running.complete(PROMPTS[0], max_tokens=3).token_ids == greedy(PROMPTS[0], 3)


def test_no_gpu_is_one_clear_error(tmp_path: Path) -> None:
    from spikeinfer.runtime import cuda

    class NoGpu:
        """A driver that answers, and has nothing."""

        def __getattr__(self, name: str) -> Any:
            class Function:
                def __call__(self, *arguments: Any) -> int:
                    return 0

            function = Function()
            setattr(self, name, function)
            return function

    with pytest.raises(SpikeError, match="driver finds no GPU") as refused:
        cuda.Gpu(NoGpu())
    assert refused.value.code == "SPK621"
    assert refused.value.exit_code == 5


# --- the fake against the real module ------------------------------------------------------------


def real_module() -> Any:
    try:
        version("tensorrt_rtx")
    except PackageNotFoundError:
        pytest.skip("tensorrt-rtx is not installed: the fake's calls are not held against it")
    import tensorrt_rtx

    return tensorrt_rtx


def signatures(documented: str, name: str) -> list[list[str]]:
    """Argument types, without self, of each overload that a pybind docstring lists."""
    found = re.findall(rf"{name}\(self: [\w.]+(?:, )?(.*?)\) -> ", documented)
    return [re.findall(r"\w+: ([\w.:]+)", arguments) for arguments in found]


ACCEPTED = {
    "int": ("typing.SupportsInt",),
    "str": ("str",),
    "tuple": ("tuple",),
    "mmap": ("typing_extensions.Buffer",),
    "SimpleNamespace": ("IRuntimeConfig",),
    "LastError": ("ILogger",),
}
"""Type of an argument in the fake -> what the real signature may call it."""


def test_every_call_is_one_of_the_real_module(tmp_path: Path) -> None:
    trt = real_module()
    fake.CALLS.clear()
    test_many_sequences_say_what_each_says_alone(tmp_path)
    assert len(fake.CALLS) > 15
    for kind, name, count, types in sorted(fake.CALLS):
        attribute = getattr(getattr(trt, kind), name)
        if count < 0:
            assert isinstance(attribute, property), (kind, name)
            continue
        overloads = signatures(attribute.__doc__, name)
        fitting = [
            found
            for found in overloads
            if len(found) == count
            and all(
                any(theirs.endswith(word) for word in ACCEPTED[ours])
                for ours, theirs in zip(types, found, strict=True)
            )
        ]
        assert fitting, (kind, name, types, overloads)


def test_every_constant_is_one_of_the_real_module() -> None:
    trt = real_module()
    for name in ("INPUT", "OUTPUT"):
        assert name in trt.TensorIOMode.__members__
    for name in ("INT32", "FLOAT", "HALF", "BF16"):
        assert name in trt.DataType.__members__
    for name in ("DISABLED", "WHOLE_GRAPH_CAPTURE"):
        assert name in trt.CudaGraphStrategy.__members__
    assert "INVALID" in trt.EngineValidity.__members__
    assert {m.name: m.value for m in fake.Diagnostics}.items() <= {
        n: v.value for n, v in trt.EngineInvalidityDiagnostics.__members__.items()
    }.items()
    for name in ("INTERNAL_ERROR", "ERROR"):
        assert isinstance(getattr(trt.ILogger, name), trt.ILogger.Severity)
    for name in ("streamable_weights_size", "weight_streaming_budget_v2"):
        assert isinstance(getattr(trt.ICudaEngine, name), property)


def test_the_real_module_refuses_a_file_that_is_no_engine(tmp_path: Path) -> None:
    """Its own `get_engine_validity` answers without a GPU."""
    trt = real_module()
    model = tmp_path / "rank0.engine"
    model.write_bytes(b"no engine" * 100)
    with pytest.raises(SpikeError, match="malformed engine") as refused:
        TensorRtSession(model, config(), linear_limits(config(), LENGTH, None), trt, fake.FakeGpu())
    assert refused.value.code == "SPK623"


def test_a_config_for_more_than_the_cache_holds() -> None:
    """One row per sequence: a block is a row, and a request always fits into one."""
    limits = linear_limits(replace(config()), LENGTH, None)
    assert (limits.num_blocks, limits.block_size, limits.group_tokens) == (BATCH, CAPACITY, 0)
