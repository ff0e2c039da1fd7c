"""Engines built with --quantizer: closer to their source, and the same bytes every time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from spikeinfer import SpikeEngine, SpikeError
from spikeinfer.compiler.assembly import footprint
from spikeinfer.compiler.assembly.feedback import TOKENS
from spikeinfer.compiler.golden import Reference
from spikeinfer.compiler.golden.metrics import row_metrics
from spikeinfer.driver import BuildRequest, BuildResult, Progress, build

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
LLAMA = MODELS / "tiny-llama"


class Notes(Progress):
    """Keeps what a user would read."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


def words(seed: int, count: int) -> str:
    """Text of a few hundred made-up words, more often the first ones."""
    rng = np.random.default_rng(seed)
    letters = list("etaoinshrdlu")
    lexicon = ["".join(np.random.default_rng(i).choice(letters, 2 + i % 6)) for i in range(300)]
    return " ".join(lexicon[i] for i in np.minimum(rng.geometric(0.02, count), 300) - 1)


def engine(tmp_path: Path, name: str, **options: object) -> tuple[BuildResult, list[str]]:
    notes = Notes()
    request = BuildRequest(
        LLAMA, tmp_path / name, quantization="q4_k_m", enable_streaming=True, golden="off",
        **options,  # type: ignore[arg-type]
    )  # fmt: skip
    return build(request, notes), notes.notes


def text(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "text.txt"
    path.write_text(words(0, 1500))
    return path


def mean_kl(directory: Path) -> float:
    """Against the source, on text that calibration has not seen."""
    with Reference.load(LLAMA) as source, SpikeEngine(directory) as ours:
        ids = ours.encode(words(7, 120))[:384]
        return float(row_metrics(source.score(ids), ours.score(ids)).kl.mean())


def test_feedback_halves_the_divergence_of_the_plain_engine_at_the_same_size(
    tmp_path: Path,
) -> None:
    plain, _ = engine(tmp_path, "plain")
    fed, notes = engine(tmp_path, "fed", calibration=text(tmp_path))
    assert fed.weight_bytes == plain.weight_bytes
    assert fed.plan.formats == plain.plan.formats
    assert mean_kl(fed.output_dir) < 0.6 * mean_kl(plain.output_dir)
    assert any("matrices quantised to" in note for note in notes)
    assert fed.manifest is not None
    assert {p.name for p in fed.output_dir.iterdir()} == {
        p.name for p in plain.output_dir.iterdir()
    }


def test_the_same_bytes_for_any_number_of_workers_and_in_any_directory(tmp_path: Path) -> None:
    files = []
    for workers in (1, 2, 4):
        folder = tmp_path / f"of {workers}"
        result, _ = engine(folder, "engine", calibration=text(folder), workers=workers)
        files.append((result.output_dir / "rank0.weights").read_bytes())
    assert files[0] == files[1] == files[2]


def test_a_dry_run_counts_what_feedback_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the plain quantiser: at least the residual stream of all calibration tokens."""
    monkeypatch.setattr(footprint, "_status", lambda field: 0)  # what this process has used
    peaks = {}
    for quantizer in ("plain", "feedback"):
        request = BuildRequest(
            LLAMA, tmp_path / "x", quantization="q8_0", quantizer=quantizer, dry_run=True
        )
        peaks[quantizer] = build(request).peak_memory or 0
    assert peaks["feedback"] > peaks["plain"] + TOKENS * 96 * 4


def test_nothing_in_blocks_is_told(tmp_path: Path) -> None:
    request = BuildRequest(
        LLAMA, tmp_path / "x", quantization="none", quantizer="feedback", golden="off"
    )
    with pytest.raises(
        SpikeError, match="no matrix of this build is quantised to blocks"
    ) as caught:
        build(request)
    assert caught.value.code == "SPK417"
    assert not (tmp_path / "x").exists()
