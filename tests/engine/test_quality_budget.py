"""Builds under a quality budget: the limit is kept, the files tell how, every run is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from spikeinfer import ExitCode, SpikeError
from spikeinfer.compiler.assembly.calibration_text import OWN_TEXT
from spikeinfer.compiler.assembly.evidence import mean_kl
from spikeinfer.compiler.assembly.overrides import Override
from spikeinfer.compiler.assembly.weights import ARRAY, parameters
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.gguf.export import export_gguf
from spikeinfer.compiler.golden.gate import PROSE
from spikeinfer.compiler.solve.segments import segments
from spikeinfer.compiler.solve.sensitivity import measure
from spikeinfer.console.inspect_quantization import quantization_data
from spikeinfer.driver import BuildRequest, BuildResult, Progress, _place, _trace, build


class Notes(Progress):
    """Keeps what a build remarks."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


TINY = Path(__file__).parents[2] / ".cache" / "models" / "tiny-llama"
LIMIT = 0.02


def built(output: Path, **options: Any) -> BuildResult:
    return build(BuildRequest(TINY, output, enable_streaming=True, **options))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build with a budget and an override."""
    path = tmp_path_factory.mktemp("budget") / "engine"
    built(path, max_kl=LIMIT, formats=(Override("f16", role="attn_v"),), workers=1)
    return path


def test_the_measured_kl_keeps_the_limit(engine: Path) -> None:
    evidence = json.loads((engine / "evidence.json").read_text())
    [kl] = [m for m in evidence["measurements"] if m["name"] == "mean KL (nats)"]
    assert evidence["status"] == "passed"
    assert 0.5 * LIMIT < kl["value"] <= LIMIT == kl["limit"]


def test_pareto_json_and_the_chart(engine: Path) -> None:
    pareto = json.loads((engine / "pareto.json").read_text())
    [chosen] = [p for p in pareto["points"] if p["chosen"]]
    assert chosen["bytes"] == (engine / "rank0.weights").stat().st_size
    assert chosen["measured_kl"] <= pareto["max_kl"] == LIMIT
    assert len(pareto["points"]) > 5
    directory = EngineDirectory.open(engine, verify=True)
    assert "pareto.json" in directory.manifest.files
    assert directory.config.pretrained_config.quantization.quant_algo == "mixed"
    page = (engine / "report.html").read_text()
    assert "<svg" in page
    assert "this engine" in page


def test_every_matrix_has_its_share(engine: Path) -> None:
    matrices = quantization_data(EngineDirectory.open(engine))["matrices"]
    assert sum(m["share_of_kl"] for m in matrices) == pytest.approx(1, abs=1e-3)
    assert len({m["format"] for m in matrices}) > 2
    assert {m["format"] for m in matrices if m["role"] == "attn_v"} == {"f16"}
    worst = max(matrices, key=lambda m: m["relative_error"])
    assert worst["relative_error"] > 0.01


def test_the_same_bytes_from_other_threads_and_elsewhere(engine: Path, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3 if before != 3 else 2)
    try:
        built(
            tmp_path / "other", max_kl=LIMIT, formats=(Override("f16", role="attn_v"),), workers=3
        )
    finally:
        torch.set_num_threads(before)
    for name in ("rank0.weights", "rank0.engine", "config.json"):
        assert (engine / name).read_bytes() == (tmp_path / "other" / name).read_bytes(), name


def test_a_size_is_kept_and_its_kl_said(tmp_path: Path) -> None:
    result = built(tmp_path / "small", max_size="230kB")
    assert (tmp_path / "small" / "rank0.weights").stat().st_size <= 230_000
    assert any(m.name == "mean KL (nats)" for m in result.evidence.measurements)


def test_what_cannot_be_reached_publishes_nothing(tmp_path: Path) -> None:
    for options in ({"max_kl": 1e-9}, {"max_bpw": 1.0}):
        with pytest.raises(SpikeError) as caught:
            built(tmp_path / "none", **options)
        assert (caught.value.code, caught.value.exit_code) == ("SPK420", ExitCode.GOLDEN_FAILED)
        assert "bytes" in caught.value.what
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_as_source(tmp_path: Path) -> None:
    """Its values are the reference; where the solver wants the file's own format, its blocks."""
    build(BuildRequest(TINY, tmp_path / "first", quantization="q8_0", golden="off"))
    file = tmp_path / "tiny.gguf"
    export_gguf(EngineDirectory.open(tmp_path / "first"), file)
    notes = Notes()
    request = BuildRequest(file, tmp_path / "engine", enable_streaming=True, max_kl=LIMIT)
    result = build(request, notes)
    assert mean_kl(result.evidence) <= LIMIT
    assert any("storing them as mixed quantises them again" in note for note in notes.notes)
    assert result.plan.bytes < build(replace(request, max_kl=None, dry_run=True)).plan.bytes


@pytest.mark.parametrize("streaming", [True, False])
def test_sensitivities_of_a_model_in_segments(tmp_path: Path, streaming: bool) -> None:
    """Attention over a paged cache and over a past, cut between any two matrices."""
    request = BuildRequest(TINY, tmp_path / "none", enable_streaming=streaming)
    traced = _trace(request, Progress())
    graph = _place(request, traced, traced.graph, Progress()).graph
    matrices = [c for c in parameters(graph) if c.format != ARRAY]
    windows = [list(range(3 * i, 3 * i + 40)) for i in range(2)]
    assert len(segments(graph, 1)) > 10
    whole, cut = (
        measure(graph, traced.source.checkpoint.load, matrices, windows, weight_bytes=size)
        for size in (1 << 30, 1)
    )
    for name, curvature in whole.items():
        # Sums in another order; margins are kept to 20 bits.
        np.testing.assert_allclose(cut[name].rows, curvature.rows, rtol=1e-4)
        np.testing.assert_allclose(cut[name].columns, curvature.columns, rtol=1e-4)


def test_calibration_and_held_out_text_differ() -> None:
    """No run of five words of one is in the other."""

    def runs(path: Path) -> set[tuple[str, ...]]:
        words = path.read_text(encoding="utf-8").split()
        return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}

    assert runs(OWN_TEXT).isdisjoint(runs(PROSE))


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        ({"max_kl": 0.0}, "SPK801", "--max-kl"),
        ({"max_bpw": 40.0}, "SPK801", "--max-bpw"),
        ({"max_size": "90 apples"}, "SPK801", "90MB"),
        ({"max_size": "0MB"}, "SPK801", "90MB"),
        ({"max_size": "90MB", "max_bpw": 4.0}, "SPK821", "one of them"),
        ({"max_kl": 0.1, "golden": "off"}, "SPK821", "--golden off"),
        ({"max_kl": 0.1, "quantization": "q4_k_m"}, "SPK821", "formats"),
        ({"max_kl": 0.1, "dry_run": True}, "SPK821", "--dry-run"),
    ],
)
def test_contradictions(options: dict[str, Any], code: str, word: str) -> None:
    with pytest.raises(SpikeError) as caught:
        BuildRequest(TINY, Path("E"), **options)
    assert caught.value.code == code
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "limit"),
    [("90MB", 90_000_000), ("1.5 GiB", 3 << 29), ("1000", 1000), ("12kb", 12_000)],
)
def test_sizes(text: str, limit: int) -> None:
    assert BuildRequest(TINY, Path("E"), max_size=text).size_limit == limit
