"""Half-precision engines: outliers keep exactly their subpaths in f32, and the engine rounds.

The planted checkpoints compute the same function as tiny-llama: a power of two moves from one
matrix to the next, so float32 does not change by a bit, and only half precision can tell.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from spikeinfer import ExitCode, SpikeEngine, SpikeError
from spikeinfer.compiler.assembly.calibration_text import LONGEST_TEXT, text_of
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.ir import Graph, Interpreter, parse_graph
from spikeinfer.console import inspect
from spikeinfer.console.precision import overflow
from spikeinfer.console.terminal import LogLevel, Terminal
from spikeinfer.driver import BuildRequest, BuildResult, build

MODELS = Path(__file__).parents[2] / ".cache" / "models"
LLAMA = MODELS / "tiny-llama"
MEAN_KL = 1e-4
"""Nats to transformers in float32; rounding every value of a real model measures 6e-6."""
HALF_KL = 5e-3
"""The golden gate's own limit for bfloat16."""


def planted(folder: Path, scales: dict[str, float]) -> Path:
    """tiny-llama with some matrices multiplied."""
    path = folder / "planted"
    shutil.copytree(LLAMA, path)
    weights = load_file(path / "model.safetensors")
    for name, factor in scales.items():
        weights[f"model.layers.{name}.weight"] *= factor
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return path


OUTLIERS = {
    "0.self_attn.v_proj": 2.0**16,
    "0.self_attn.o_proj": 2.0**-16,
    "1.self_attn.q_proj": 2.0**16,
    "1.self_attn.k_proj": 2.0**-16,
}


def half(source: Path, output: Path, dtype: str, **options: object) -> BuildResult:
    request = {"dtype": dtype, "enable_streaming": True, **options}
    return build(BuildRequest(source, output, **request))  # type: ignore[arg-type]


def kept(result: BuildResult) -> set[tuple[str, str]]:
    """(module, op) of the values that stay f32."""
    assert result.config is not None
    table = result.config.spike.precision
    return {(p.scope or p.value, p.op) for p in table if p.op and p.dtype == "f32"}


def formats(result: BuildResult) -> dict[str, str]:
    assert result.config is not None
    return {s.name: s.format for s in result.config.spike.states}


def mean_kl(result: BuildResult) -> float:
    return {m.name: m.value for m in result.evidence.measurements}["mean KL (nats)"]


ALWAYS = {
    ("model.rotary_emb", "cast"),
    ("model.rotary_emb", "mul"),
    ("model.rotary_emb", "concat"),
    ("lm_head", "linear"),
}
"""Positions and angles; logits, which leave the graph."""
WEIGHTS = {"model.layers.0.self_attn.o_proj.weight", "model.layers.1.self_attn.k_proj.weight"}
"""So small that f16 would store subnormal numbers."""
VALUES = {
    ("model.layers.0.self_attn", "qkv"),
    ("model.layers.0.self_attn", "reshape"),
    ("model.layers.0.self_attn", "paged_attention"),
}
QUERIES = {
    ("model.layers.1.self_attn", "qkv"),
    ("model.layers.1.self_attn", "reshape"),
    ("model.layers.1.self_attn", "rope"),
}


def test_outliers_keep_exactly_their_subpaths_in_f32(tmp_path: Path) -> None:
    plain = half(LLAMA, tmp_path / "plain", "float16")
    assert kept(plain) == ALWAYS
    assert set(formats(plain).values()) == {"f16"}
    result = half(planted(tmp_path, OUTLIERS), tmp_path / "engine", "float16")
    assert kept(result) == ALWAYS | VALUES | QUERIES | {(w, "parameter") for w in WEIGHTS}
    assert formats(result) == {
        "layers.0.key": "f32",
        "layers.0.value": "f32",
        "layers.1.key": "f16",
        "layers.1.value": "f16",
    }
    assert result.evidence.status == "passed"
    assert mean_kl(result) <= MEAN_KL


def test_without_the_analysis_the_golden_gate_fails(tmp_path: Path) -> None:
    source = planted(tmp_path, OUTLIERS)
    blind = {"assign-precision": {"analysis": False}}
    with pytest.raises(SpikeError) as caught:
        half(source, tmp_path / "engine", "float16", pass_options=blind)
    assert (caught.value.code, caught.value.exit_code) == ("SPK580", ExitCode.GOLDEN_FAILED)
    assert not (tmp_path / "engine").exists()


def test_bfloat16_has_the_range_but_an_f16_cache_has_not(tmp_path: Path) -> None:
    result = half(planted(tmp_path, OUTLIERS), tmp_path / "engine", "bfloat16")
    assert ("model.layers.0.self_attn.v_proj", "linear") not in kept(result)
    assert kept(result) >= ALWAYS
    assert formats(result)["layers.0.value"] == "f32"
    assert mean_kl(result) <= HALF_KL


def test_a_residual_outlier_keeps_the_stream_behind_it_in_f32(tmp_path: Path) -> None:
    source = planted(tmp_path, {"0.mlp.down_proj": 2.0**12})
    result = half(source, tmp_path / "engine", "float16")
    stream = {
        ("model.layers.0", "gated_mlp"),
        ("model.layers.1", "linear_residual"),
        ("model.layers.1", "gated_mlp"),
    }
    assert stream <= kept(result)
    assert all(
        op in ("gated_mlp", "linear_residual", "index_select") for _, op in kept(result) - ALWAYS
    )
    assert mean_kl(result) <= MEAN_KL


def test_inspect_shows_the_certificates_and_the_culprit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = planted(tmp_path, OUTLIERS)
    half(source, tmp_path / "engine", "float16", golden="off")
    inspect.show(tmp_path / "engine", "precision", Terminal())
    shown = capsys.readouterr().out
    (row,) = (line for line in shown.splitlines() if " qkv " in line and " f32 " in line)
    assert "observed, x4 exceeds 65504" in row
    assert "model.layers.*.self_attn" in row
    overflow(source, "float16", None, Terminal(json=True))
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (report["found"][0]["op"], report["found"][0]["scope"]) == (
        "linear",
        "model.layers.0.self_attn.v_proj",
    )
    assert report["reaches_output"]
    overflow(LLAMA, "float16", None, Terminal(level=LogLevel.ERROR))
    assert "None of 139 values exceeds float16" in capsys.readouterr().out


def test_other_text_by_calibration(tmp_path: Path) -> None:
    text = tmp_path / "mine.txt"
    text.write_text("0 1 2 3 " * 300)
    plain = half(LLAMA, tmp_path / "a", "float16", golden="off")
    other = half(LLAMA, tmp_path / "b", "float16", golden="off", calibration=text)
    assert kept(other) == ALWAYS
    assert plain.config is not None
    assert other.config is not None
    assert plain.config.spike.precision != other.config.spike.precision
    missing = tmp_path / "missing.txt"
    for dry_run in (False, True):
        with pytest.raises(SpikeError) as caught:
            half(LLAMA, tmp_path / "c", "float16", calibration=missing, dry_run=dry_run)
        assert (caught.value.code, caught.value.exit_code) == ("SPK816", ExitCode.BAD_INPUT)


def test_of_a_large_text_only_the_beginning_is_read(tmp_path: Path) -> None:
    text = tmp_path / "large.txt"
    text.write_text("word " * 1_000_000)
    assert len(text_of(text)) == LONGEST_TEXT


def test_default_engines_have_no_casts(tmp_path: Path) -> None:
    for options in ({}, {"quantization": "q4_k_m"}):
        result = build(
            BuildRequest(LLAMA, tmp_path / str(len(options)), enable_streaming=True,
                         golden="off", **options)  # type: ignore[arg-type]
        )  # fmt: skip
        assert kept(result) == set()
        model = onnx.load(result.output_dir / "rank0.engine", load_external_data=False)
        halves = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
        casts = [n for n in model.graph.node if n.op_type == "Cast"]
        assert not any(a.i in halves for n in casts for a in n.attribute)


def _logits(graph: Graph, checkpoint: Checkpoint, ids: list[int]) -> np.ndarray:
    """The functional graph by the interpreter, with matrices stored in float16."""

    def stored(name: str) -> torch.Tensor:
        values = checkpoint.load(name)
        return values.half().float() if values.dim() > 1 else values.float()

    empty = {
        s.name: torch.zeros([d if isinstance(d, int) else 1 for d in s.type.shape]).narrow(
            s.axis, 0, 0
        )
        for s in graph.states.values()
    }
    given = {"tokens": torch.tensor([ids]), "positions": torch.arange(len(ids))[None]}
    return Interpreter(graph, stored, dict(empty)).run(given)[0][0].numpy()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gemma3", "tiny-qwen3", "tiny-gpt2"])
def test_interpreter_and_engine_round_alike(name: str, tmp_path: Path) -> None:
    half(
        MODELS / name, tmp_path / "engine", "float16",
        enable_streaming=False, golden="off", dump_ir=tmp_path / "ir",
    )  # fmt: skip
    (placed,) = (tmp_path / "ir").glob("*-place.ir")
    graph = parse_graph(placed.read_text())
    assert any(v.precision for v in graph.values())
    ids = np.random.default_rng(0).integers(5, graph.outputs[0].shape[-1], 24).tolist()
    checkpoint = Checkpoint.open(MODELS / name)
    rounded = _logits(graph, checkpoint, ids)
    for value in graph.values():
        value.precision = None
    exact = _logits(graph, checkpoint, ids)
    with SpikeEngine(tmp_path / "engine") as engine:
        found = engine.score(ids)
    # A row is equal up to the order of sums until one falls to the other side of a rounding step;
    # later rows attend to it. Without the roundings no row is equal.
    assert np.abs(found - rounded).max(1).min() < 1e-5
    assert np.abs(found - exact).max(1).min() > 1e-4
    assert np.abs(found - rounded).mean() < 0.6 * np.abs(found - exact).mean()
