"""The commands as a user runs them, in processes of their own, on a tiny checkpoint."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from spikeinfer import SpikeEngine
from spikeinfer.console.tables import size

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
QUICK = ("--enable-streaming", "--max-seq-len", "128", "--golden", "off")

Done = subprocess.CompletedProcess[str]
NO_TORCH = """
import sys
from spikeinfer.cli import main
sys.argv = {words!r}
try:
    main()
finally:
    assert not {{"torch", "transformers", "onnx"}} & set(sys.modules)
"""


def call(command: str, *words: object, **options: Any) -> Done:
    """Run one of our two commands."""
    arguments = [str(BIN / command), *map(str, words)]
    return subprocess.run(arguments, capture_output=True, text=True, timeout=600, **options)


@pytest.fixture(scope="session")
def checkpoint() -> Path:
    """tiny-llama: random weights, byte tokenizer, chat template."""
    script = ROOT / "benchmarks" / "models.py"
    command = [sys.executable, str(script), "tiny-llama"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])


@pytest.fixture(scope="session")
def built(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A streaming engine in float32 with its golden gate run, and what building it printed."""
    path = tmp_path_factory.mktemp("cli") / "tiny"
    words = ("--model", checkpoint, "--output-dir", path, "--enable-streaming-llm", "--json")
    done = call("spike-build", *words)
    assert done.returncode == 0, done.stderr
    return path, done


@pytest.fixture
def engine(built: tuple[Path, Done]) -> Path:
    return built[0]


def test_a_build_as_events(built: tuple[Path, Done]) -> None:
    path, done = built
    events = [json.loads(line) for line in done.stdout.splitlines()]
    phases = [e["name"] for e in events if e["event"] == "phase"]
    assert phases == ["start", "checkpoint", "trace", "passes", "weights", "engine",
                      "golden gate", "publish"]  # fmt: skip
    assert phases == [e["name"] for e in events if e["event"] == "phase_end"]
    result = events[-1]
    assert result["event"] == "result"
    assert result["engine"] == str(path)
    assert result["golden"]["status"] == "passed"
    assert result["passes"]["raise-attention"] == 2
    manifest = json.loads((path / "manifest.json").read_text())
    assert result["engine_id"] == manifest["engine_id"]


def test_a_build_as_lines(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--model", checkpoint, "--output-dir", tmp_path / "E", "-q", "q8_0", *QUICK)
    done = call("spike", "build", *words)
    assert done.returncode == 0, done.stderr
    assert "weights: " in done.stderr
    assert "\x1b" not in done.stderr
    assert f"Engine     {tmp_path / 'E'}, built in " in done.stdout
    weights = size((tmp_path / "E" / "rank0.weights").stat().st_size)
    assert re.search(rf"\nWeights    {weights} \([\d.]+ kB of it pads to pages\), ", done.stdout)
    assert "Golden     not checked (--golden off)" in done.stdout


def test_a_dry_run_writes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    words = ("--model", checkpoint, "--recipe", "smollm2-135m-q4_k_m", "--max-seq-len", "128")
    done = call("spike-build", *words, "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Storage (q4_k_m)" in done.stdout
    assert "nothing was written" in done.stdout
    assert re.search(r"\nMemory of one step\n[\d.]+ [kM]B of temporaries for \d+ ", done.stdout)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_gate_publishes_nothing(checkpoint: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "strict.yaml"
    recipe.write_text("version: 1\ngolden:\n  set: tiny-llama\n  thresholds: {mean_kl: 1.0e-9}\n")
    words = ("--model", checkpoint, "-o", tmp_path / "E", "-q", "q8_0", "--enable-streaming")
    done = call("spike-build", *words, "--recipe", recipe, "--json", "--keep-failed")
    error = json.loads(done.stderr)
    assert (done.returncode, error["code"], error["exit_code"]) == (4, "SPK580", 4)
    assert "mean KL" in error["what"]
    assert "Try --quantization none: models of random weights" in error["remedy"]
    assert "thresholds" in error["remedy"]
    assert not (tmp_path / "E").exists()
    assert (tmp_path / "E.failed").is_dir()


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        (["--max-seq-len", "4096"], "SPK803"),
        (["--recipe", "{tmp}/unknown-pass.yaml"], "SPK301"),
    ],
)
def test_errors_leave_no_output(
    checkpoint: Path, tmp_path: Path, extra: list[str], code: str
) -> None:
    recipe = "version: 1\npasses: {without: [raise-rop]}\n"
    (tmp_path / "unknown-pass.yaml").write_text(recipe)
    words = [word.replace("{tmp}", str(tmp_path)) for word in extra]
    done = call("spike-build", "--model", checkpoint, "-o", tmp_path / "E", *words)
    assert done.returncode == 3
    assert f"error {code} in " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "E").exists()


def test_run_says_what_the_engine_says(engine: Path) -> None:
    with SpikeEngine(engine) as loaded:
        plain = loaded.generate("Hello", max_tokens=12)
        chat = loaded.generate("Hello", max_tokens=12, chat=True)
    assert plain != chat
    done = call("spike", "run", engine, "Hello", "--no-chat", "--max-tokens", 12)
    assert (done.returncode, done.stdout) == (0, plain + "\n")
    assert "5 prompt tokens, TTFT " in done.stderr
    done = call("spike", "run", engine, "--max-tokens", 12, input="Hello")
    assert (done.returncode, done.stdout) == (0, chat + "\n")


def test_run_with_ids_a_seed_and_a_stop(engine: Path) -> None:
    sampling = ("--temperature", 1.5, "--top-p", 0.95, "--seed", 3, "--max-tokens", 20, "--json")
    words = ("run", engine, "--token-ids", "72,101,108", *sampling)
    first, second = (json.loads(call("spike", *words).stdout.splitlines()[-1]) for _ in range(2))
    assert first["token_ids"] == second["token_ids"]
    assert first["prompt_tokens"] == 3
    stop = first["text"][4:6]
    stopped = json.loads(call("spike", *words, "--stop", stop).stdout.splitlines()[-1])
    assert stopped["text"] == first["text"][: first["text"].index(stop)]


def test_run_with_a_grammar_and_log_probabilities(engine: Path) -> None:
    words = ("run", engine, "Hello", "--regex", "(yes|no), [0-9]{3}", "--logprobs", 2)
    done = call("spike", *words)
    assert re.fullmatch("(yes|no), [0-9]{3}\n", done.stdout)
    assert "logprob" in done.stderr
    last = json.loads(call("spike", *words, "--json").stdout.splitlines()[-1])
    assert last["text"] + "\n" == done.stdout
    assert len(last["logprobs"]) == len(last["token_ids"])


def test_run_tells_what_is_wrong(engine: Path, tmp_path: Path) -> None:
    done = call("spike", "run", tmp_path, "x")
    assert (done.returncode, done.stdout) == (3, "")
    assert "SPK601" in done.stderr
    done = call("spike", "run", engine, "x" * 600, "--no-chat")
    assert done.returncode == 3
    assert "SPK606" in done.stderr
    assert "--max-seq-len" in done.stderr


def test_a_reader_that_goes_away(engine: Path) -> None:
    command = [str(BIN / "spike"), "run", str(engine), "Hello", "--max-tokens", "400"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 141
    assert b"Traceback" not in err
    assert b"BrokenPipe" not in err


@pytest.mark.parametrize(
    "words",
    [
        ["run", "{engine}", "Hi", "--max-tokens", "3"],
        ["verify", "{engine}"],
        ["inspect", "{engine}"],
        ["golden", "check", "{engine}", "tiny-llama"],
        ["golden", "diff", "{golden}/tiny-llama.yaml", "{golden}/tiny-llama.yaml"],
        ["explain", "104"],
        ["doctor"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_no_command_on_an_engine_imports_torch(engine: Path, words: list[str]) -> None:
    argv = ["spike", *(w.format(engine=engine, golden=ROOT / "golden") for w in words)]
    code = NO_TORCH.format(words=argv)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _plan(report: Any) -> Any:
    return report["config"]["spike"]["report"]["memory plan"]


@pytest.mark.parametrize(
    ("view", "text", "pick"),
    [
        ("report", "Weights by role", lambda d: d["evidence"]["status"] == "passed"),
        ("report", "Memory of one step", lambda d: _plan(d)["peak"] >= _plan(d)["lower bound"] > 0),
        ("weights", "model.layers.0.mlp.down_proj.weight", lambda d: d[0]["offset"] % 4096 == 0),
        ("precision", "cached rows", lambda d: d[0]["dtype"] == "f32"),
        ("passes", "Bytes saved", lambda d: any("saved" in e["facts"] for e in d)),
        ("passes", "raise-rope", lambda d: any(e["name"] == "alias-kv" for e in d)),
        ("quantization", "base format", lambda d: d["quant_algo"] == "f32"),
        (
            "quantization",
            "Rel. error",
            lambda d: {m["relative_error"] for m in d["matrices"]} == {0},
        ),
        ("quantization", "not measured", lambda d: d["matrices"][0]["share_of_kl"] is None),
    ],
)
def test_inspect(engine: Path, view: str, text: str, pick: Callable[[Any], bool]) -> None:
    done = call("spike", "inspect", view, engine)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout
    assert call("spike", "inspect", engine, view).stdout == done.stdout
    assert pick(json.loads(call("spike", "inspect", engine, view, "--json").stdout))


def test_verify_finds_a_changed_byte(engine: Path, tmp_path: Path) -> None:
    whole = call("spike", "verify", engine)
    assert whole.returncode == 0
    assert "is whole" in whole.stdout
    copy = tmp_path / "copy"
    shutil.copytree(engine, copy)
    weights = copy / "rank0.weights"
    data = bytearray(weights.read_bytes())
    data[100] ^= 1
    weights.write_bytes(data)
    done = call("spike", "verify", copy)
    assert done.returncode == 3
    assert next(line for line in done.stdout.splitlines() if "DIFFERS" in line).startswith(
        "rank0.weights"
    )
    assert "SPK508" in done.stderr
    assert "model.embed_tokens.weight" in done.stderr


def test_golden_check_and_its_limits(engine: Path) -> None:
    passed = call("spike", "golden", "check", engine, "tiny-llama", "--json")
    report = json.loads(passed.stdout)
    assert (passed.returncode, report["passed"]) == (0, True)
    failed = call("spike", "golden", "check", engine, "tiny-llama", "--max-mean-kl", "1e-30")
    assert failed.returncode == 4
    assert "FAILED: mean KL" in failed.stdout
    other = call("spike", "golden", "check", engine, "tiny-gpt2")
    assert other.returncode == 3
    assert "SPK544" in other.stderr


def test_golden_record_and_diff(checkpoint: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    for path, text in ((one, "Hello"), (two, "Hallo")):
        words = ("record", checkpoint, "-o", path, "--prompt", text, "--greedy", 4)
        done = call("spike", "golden", *words)
        assert done.returncode == 0, done.stderr
        assert "1 prompts" in done.stdout
    assert call("spike", "golden", "diff", one, one).stdout == "no differences\n"
    done = call("spike", "golden", "diff", one, two)
    assert (done.returncode, done.stdout) == (4, "p0: tokenised differently\n")
