"""The two real GGUF files: into engines and back, and what llama.cpp makes of the result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.frontend.checkpoint import Checkpoint
from spikeinfer.compiler.gguf.checkpoint import GgufCheckpoint
from spikeinfer.compiler.gguf.export import export_gguf
from spikeinfer.compiler.gguf.reader import GgufFile
from spikeinfer.driver import BuildRequest, build
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
CONVERTED = {"smollm2": "SmolLM2-135M-Instruct", "gemma3": "gemma-3-270m"}
PEER = ROOT / ".cache" / "peers" / "llama_cpp" / "built"
FETCH = "import sys, models; print(models.packaged_gguf(sys.argv[1]))"


@pytest.fixture(scope="module", params=CONVERTED)
def real(request: pytest.FixtureRequest) -> tuple[Path, Path]:
    """A real file, and the directory that transformers' own reader made of it."""
    command = [sys.executable, "-c", FETCH, request.param]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = Path(done.stdout.split()[-1])
    return path, ROOT / ".cache" / "models" / CONVERTED[request.param]


@pytest.fixture(scope="module")
def engine(real: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the golden gate."""
    output = tmp_path_factory.mktemp("real") / "engine"
    build(BuildRequest(real[0], output, enable_streaming=True, max_seq_len=1024))
    return output


def test_the_checkpoint_is_transformers_conversion(real: tuple[Path, Path]) -> None:
    ours, theirs = GgufCheckpoint.open(real[0]), Checkpoint.open(real[1])
    found, wanted = ours.config.to_dict(), theirs.config.to_dict()
    differing = {k for k in {*found, *wanted} if found.get(k) != wanted.get(k)}
    assert differing == {"_name_or_path", "architectures"}
    assert ours.parameters.keys() == theirs.parameters.keys()
    for name in theirs.parameters:
        assert torch.equal(ours.load(name), theirs.load(name)), name
    prose = (ROOT / "compiler" / "golden" / "prose.txt").read_text()
    left, right = (Tokenizer.from_file(str(c.path / "tokenizer.json")) for c in (ours, theirs))
    for text in (prose, "Hello 2+3  = 5,\n\n  world 12345 naïve — 日本 don't", "<bos>a<|im_end|>"):
        assert left.encode(text).ids == right.encode(text).ids


def test_the_gate_sees_rounded_activations_only(engine: Path) -> None:
    evidence = EngineDirectory.open(engine).path / "evidence.json"
    assert '"status": "passed"' in evidence.read_text()


def test_a_round_trip_changes_no_tensor(
    real: tuple[Path, Path], engine: Path, tmp_path: Path
) -> None:
    export_gguf(EngineDirectory.open(engine), tmp_path / "x.gguf")
    before, after = GgufFile(real[0]), GgufFile(tmp_path / "x.gguf")
    assert after.tensors.keys() == before.tensors.keys()
    for name, entry in before.tensors.items():
        assert after.tensors[name].type == entry.type
        assert after.tensors[name].shape == entry.shape
        assert after.raw(name).tobytes() == before.raw(name).tobytes(), name


@pytest.mark.skipif(not PEER.is_file(), reason="llama.cpp isn't built in .cache/peers")
def test_llama_cpp_answers_as_the_engine(engine: Path, tmp_path: Path) -> None:
    export_gguf(EngineDirectory.open(engine), tmp_path / "x.gguf")
    command = [sys.executable, "gguf_export.py", str(engine), str(tmp_path / "x.gguf")]
    done = subprocess.run(command, cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
