"""`spike calibrate` on small checkpoints: its file, its messages, the same bytes every time."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from spikeinfer import ExitCode, cli
from spikeinfer.compiler.calibrate import read_imatrix
from spikeinfer.console.guard import run

MODELS = Path(__file__).resolve().parents[2] / ".cache" / "models"
LLAMA = MODELS / "tiny-llama"
Outcome = tuple[int, str, str]


@pytest.fixture
def calibrate(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `spike calibrate WORDS`: exit code, stdout, stderr."""

    def call(*words: object) -> Outcome:
        code = run(typer.main.get_command(cli.app), "spike", ["calibrate", *map(str, words)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def text(folder: Path, count: int = 3000) -> Path:
    path = folder / "mine.txt"
    path.write_text(" ".join(str(i * 7919 % 1000) for i in range(count)))
    return path


def test_a_checkpoints_importances_are_written(
    tmp_path: Path, calibrate: Callable[..., Outcome]
) -> None:
    output = tmp_path / "made" / "for it" / "out.gguf"
    words = (LLAMA, "--text", text(tmp_path), "-o", output, "--tokens", 500, "--window", 32)
    code, out, _ = calibrate(*words, "--json")
    assert code == 0
    result = json.loads(out.splitlines()[-1])
    assert (result["windows"], result["window_tokens"], result["tensors"]) == (15, 32, 15)
    found = read_imatrix(output)
    assert list(found.datasets) == ["mine.txt"]
    assert found.entries["blk.1.ffn_down.weight"].sums.shape == (256,)
    assert found.entries["output.weight"].counts.tolist() == [15 * 32]


def test_the_same_bytes_in_another_directory_and_on_other_threads(
    tmp_path: Path, calibrate: Callable[..., Outcome]
) -> None:
    files = []
    for name, workers in (("a", 1), ("b", 3)):
        folder = tmp_path / name
        folder.mkdir()
        words = ("--text", text(folder), "-o", folder / "out.gguf", "--window", 64)
        assert calibrate(LLAMA, *words, "--workers", workers)[0] == 0
        files.append((folder / "out.gguf").read_bytes())
    assert files[0] == files[1]


def test_what_is_refused(tmp_path: Path, calibrate: Callable[..., Outcome]) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF a model")
    code, _, err = calibrate(LLAMA, "-o", model)
    assert (code, "SPK817" in err, model.read_bytes()) == (2, True, b"GGUF a model")
    engine = tmp_path / "engine"
    engine.mkdir()
    for name in ("manifest.json", "rank0.engine", "config.json"):
        (engine / name).write_text("{}")
    code, _, err = calibrate(engine, "-o", tmp_path / "x.gguf")
    assert (code, f"{engine} is an engine" in err, "SPK145" in err) == (3, True, True)
    short = ("--text", text(tmp_path, 5), "-o", tmp_path / "x.gguf", "--window", 64)
    code, _, err = calibrate(LLAMA, *short)
    assert (code, "SPK414" in err, "not one window of 64" in err) == (3, True, True)
    code, _, err = calibrate(LLAMA, "--text", tmp_path / "none", "-o", tmp_path / "x.gguf")
    assert (code, "SPK816" in err) == (3, True)
    assert calibrate(LLAMA, "-o", tmp_path / "x.gguf", "--tokens", 0)[0] == ExitCode.USAGE
    assert not (tmp_path / "x.gguf").exists()
