"""The command line: arguments, errors, exit codes. In process; engines are in tests/engine."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from spikeinfer import ExitCode, SpikeError, cli, kernels
from spikeinfer.console import explain
from spikeinfer.console.guard import block, run
from spikeinfer.console.terminal import LogLevel, Terminal

ROOT = Path(__file__).resolve().parents[2]
BUILD = ["build", "--model", "M", "--output-dir", "E"]
INT4_CACHE = ["--enable-streaming", "--kv-cache-dtype", "int4"]
CODE = re.compile(r"""["'](SPK\d{3})["']""")

Outcome = tuple[int, str, str]


@pytest.fixture
def spike(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Runs `spike WORDS`: exit code, stdout, stderr."""

    def call(*words: str, app: typer.Typer = cli.app) -> Outcome:
        code = run(typer.main.get_command(app), "spike", words)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def app_that(action: Callable[[], Any]) -> typer.Typer:
    """A command line of one command that does `action`."""
    app = typer.Typer(rich_markup_mode=None, add_completion=False)

    @app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
    def command() -> None:
        action()

    return app


def raises(error: BaseException) -> typer.Typer:
    def action() -> None:
        raise error

    return app_that(action)


def test_help_lists_the_commands(spike: Callable[..., Outcome]) -> None:
    code, out, _ = spike("--help")
    assert code == 0
    for name in ("build", "run", "golden", "verify", "inspect", "explain", "doctor", "serve"):
        assert re.search(rf"^  {name} ", out, re.MULTILINE), name


@pytest.mark.parametrize("words", [["--nope"], ["nope"], ["run"], ["run", "E", "--top-k", "x"]])
def test_usage_errors(spike: Callable[..., Outcome], words: list[str]) -> None:
    code, out, err = spike(*words)
    assert code == ExitCode.USAGE
    assert out == ""
    assert "error: " in err
    assert "--help" in err


def test_a_usage_error_names_the_nearest_option(spike: Callable[..., Outcome]) -> None:
    code, _, err = spike(*BUILD, "--max-num-token", "3")
    assert code == ExitCode.USAGE
    assert "--max-num-tokens" in err


def test_a_usage_error_as_json(spike: Callable[..., Outcome]) -> None:
    code, out, err = spike(*BUILD, "--json", "--nope")
    assert (code, out) == (ExitCode.USAGE, "")
    assert json.loads(err)["code"] == "SPK800"


@pytest.mark.parametrize(
    ("words", "code", "exit_code"),
    [
        ("-q q4_k_x", "SPK401", ExitCode.USAGE),
        ("-q nvfp4", "SPK402", ExitCode.UNSUPPORTED),
        ("-q q4_k_m --imatrix {tmp}/none", "SPK126", ExitCode.BAD_INPUT),
        ("-q q4_k_m --calibration {tmp}/none", "SPK816", ExitCode.BAD_INPUT),
        ("-q q4_k_m --calibration {tmp}/latin-1", "SPK816", ExitCode.BAD_INPUT),
        ("-o {tmp}/latin-1", "SPK504", ExitCode.BAD_INPUT),
        ("-o {tmp}", "SPK504", ExitCode.BAD_INPUT),
        ("-o {tmp}/latin-1/deep/E", "SPK817", ExitCode.USAGE),
    ],
)
def test_what_is_wrong_is_said_before_torch_is_imported(
    spike: Callable[..., Outcome], tmp_path: Path, words: str, code: str, exit_code: ExitCode
) -> None:
    (tmp_path / "latin-1").write_bytes(b"caf\xe9")
    found, out, err = spike(*BUILD[:-1], "E", *words.format(tmp=tmp_path).split())
    assert (found, out) == (exit_code, "")
    assert err.startswith(f"error {code} in ")  # no phase before it
    assert "Errno" not in err
    assert [p.name for p in tmp_path.iterdir()] == ["latin-1"]


@pytest.mark.parametrize("command", ["calibrate", "golden record", "export"])
def test_outputs_have_one_rule(spike: Callable[..., Outcome], tmp_path: Path, command: str) -> None:
    """Missing directories are made when something is written; what is no directory is refused."""
    (tmp_path / "file").write_text("not a directory")
    code, _, err = spike(
        *command.split(), "nothing-there", "-o", str(tmp_path / "file" / "a" / "b")
    )
    assert (code, "SPK817" in err) == (ExitCode.USAGE, True)
    assert f"{tmp_path / 'file'} is no directory" in err


@pytest.mark.parametrize(
    "words",
    [
        [*BUILD, "--kv-cache-type", "disabled"],
        [*BUILD, "--profiling-verbosity", "detailed"],
        ["serve", "ENGINE", "--port", "1"],
        ["bench", "ENGINE"],
        ["diff", "A", "B"],
    ],
    ids=" ".join,
)
def test_what_is_not_in_this_version_says_so(
    spike: Callable[..., Outcome], words: list[str]
) -> None:
    code, _, err = spike(*words)
    assert code == ExitCode.UNSUPPORTED
    assert "SPK802" in err
    assert "is not in this version" in err


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ([*BUILD, "--dtype", "int3"], "SPK801", "--dtype is 'int3'"),
        ([*BUILD, "--max-batch-size", "0"], "SPK801", "--max-batch-size is 0"),
        ([*BUILD, "--kv-cache-type", "paged"], "SPK801", "--enable-streaming"),
        ([*BUILD, "--calibration", "T", "--quantizer", "plain"], "SPK818", "--dtype auto"),
        ([*BUILD, "--quantizer", "gptq"], "SPK801", "one of auto, plain, feedback"),
        (
            [*BUILD, *INT4_CACHE, "--tokens-per-block", "48"],
            "SPK430",
            "--tokens-per-block is 48",
        ),
        (["build", "--model", "M"], "SPK807", "--output-dir DIR"),
        ([*BUILD, "--max-kl", "0"], "SPK801", "--max-kl is 0.0"),
        ([*BUILD, "--max-size", "90 apples"], "SPK801", "90MB"),
        ([*BUILD, "--max-kl", "0.1", "-q", "q4_k_m"], "SPK821", "q4_k_m is a fixed mix"),
        ([*BUILD, "--max-bpw", "4", "--dry-run"], "SPK821", "--dry-run"),
        (["explain", "SPK000"], "SPK805", "SPK000"),
        (["inspect", "E", "presicion"], "SPK807", "Did you mean precision?"),
        (["inspect", "overflow", "M", "--dtype", "float32"], "SPK807", "float16, bfloat16"),
        (["run", "E", "--token-ids", "1,x"], "SPK807", "'1,x'"),
        (["run", "E", "--logit-bias", "3=1", "--logit-bias", "4"], "SPK807", "'3=1 4'"),
        (["run", "E", "--logit-bias", "a=1"], "SPK807", "ID=NUMBER"),
        (["run", "E", "--json-schema", "@/missing"], "SPK807", "--json-schema '@/missing'"),
    ],
)
def test_wrong_values(
    spike: Callable[..., Outcome], words: list[str], code: str, text: str
) -> None:
    exit_code, _, err = spike(*words)
    assert exit_code == ExitCode.USAGE
    assert code in err
    assert text in err


@pytest.mark.parametrize(
    "words", [["run", "E", "--no-chat", "--system", "x"], ["run", "E", "p", "--token-ids", "1"]]
)
def test_contradictions(spike: Callable[..., Outcome], words: list[str]) -> None:
    assert spike(*words)[0] == ExitCode.USAGE


@pytest.mark.parametrize("alias", ["--enable-streaming", "--enable-streaming-llm"])
def test_flags_become_a_request(
    spike: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, alias: str
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("spikeinfer.console.build.run_build", lambda *given: seen.append(given))
    words = ["-q", "q6_k", alias, "--workers", "1", "--tokens-per-block", "16", "--keep-failed",
             "--kv-cache-type", "paged", "--kv-cache-dtype", "int8", "--dump-ir", "D", "--golden",
             "off", "--verify-passes", "--json", "--log-level", "debug"]  # fmt: skip
    assert spike(*BUILD, *words)[0] == 0
    [(request, terminal)] = seen
    assert terminal == Terminal(True, LogLevel.DEBUG)
    assert (request.model, request.output_dir, request.dump_ir) == (Path("M"), Path("E"), Path("D"))
    assert (request.quantization, request.workers, request.tokens_per_block) == ("q6_k", 1, 16)
    assert request.enable_streaming
    assert request.keep_failed
    assert request.verify_passes
    assert not request.dry_run
    assert (request.kv_cache_type, request.kv_cache_dtype, request.golden) == (
        "paged", "int8", "off",
    )  # fmt: skip


def test_a_budget_becomes_a_request(
    spike: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("spikeinfer.console.build.run_build", lambda *given: seen.append(given))
    assert spike(*BUILD, "--max-kl", "0.02", "--max-size", "90MB")[0] == 0
    assert spike(*BUILD, "--max-bpw", "4.5")[0] == 0
    both, bits = (request for request, _ in seen)
    assert (both.max_kl, both.size_limit, both.budgeted) == (0.02, 90_000_000, True)
    assert (bits.max_bpw, bits.max_kl) == (4.5, None)


def test_spike_build_is_spike_build(
    spike: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("spikeinfer.console.build.run_build", lambda *given: seen.append(given))
    assert spike(*BUILD[1:], app=cli.build_app)[0] == 0
    assert spike(*BUILD)[0] == 0
    assert seen[0] == seen[1]


def test_an_error_is_one_block(spike: Callable[..., Outcome]) -> None:
    error = SpikeError("SPK104", "checkpoint", "a shard is missing.", "Download it again.")
    code, out, err = spike(app=raises(error))
    assert (code, out) == (3, "")
    assert err.splitlines() == [
        "error SPK104 in checkpoint",
        "  a shard is missing.",
        "  What to do: Download it again.",
        "  More: spike explain SPK104",
    ]


def test_an_error_comes_back_from_another_process_whole() -> None:
    """One that can't be unpickled leaves a multiprocessing pool waiting for ever."""
    error = SpikeError("SPK580", "golden gate", "far.", "Look.", ExitCode.GOLDEN_FAILED)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == ("SPK580 golden gate: far. Look.", vars(error))


def test_an_error_as_json(spike: Callable[..., Outcome]) -> None:
    error = SpikeError("SPK580", "golden gate", "far.", "Look.", ExitCode.GOLDEN_FAILED)
    code, out, err = spike("--json", app=raises(error))
    assert (code, out) == (4, "")
    assert json.loads(err) == {
        "event": "error", "code": "SPK580", "where": "golden gate", "what": "far.",
        "remedy": "Look.", "exit_code": 4,
    }  # fmt: skip


def test_our_bug_is_a_short_block_and_a_file(spike: Callable[..., Outcome]) -> None:
    code, _, err = spike(app=raises(ValueError("planted")))
    assert code == ExitCode.INTERNAL
    assert "Traceback" not in err
    assert "an unexpected ValueError in test_cli.py:" in err
    [path] = re.findall(r"in (/\S+\.log)\.", err)
    assert "ValueError: planted" in Path(path).read_text()
    Path(path).unlink()


def test_debug_shows_the_traceback(spike: Callable[..., Outcome]) -> None:
    code, _, err = spike("--log-level=debug", app=raises(ValueError("planted")))
    assert code == ExitCode.INTERNAL
    assert "Traceback" in err
    for path in re.findall(r"in (/\S+\.log)\.", err):
        Path(path).unlink()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
        (BrokenPipeError(), 141),
        (MemoryError(), 5),
        (PermissionError(13, "Permission denied", "/root/x"), 3),
    ],
)
def test_other_ends(spike: Callable[..., Outcome], error: BaseException, code: int) -> None:
    found, _, err = spike(app=raises(error))
    assert found == code
    assert "Traceback" not in err


def test_words_after_a_double_dash_are_no_options() -> None:
    assert Terminal.of(["run", "--", "--json"]) == Terminal()
    assert Terminal.of(["--json", "--log-level", "error"]) == Terminal(True, LogLevel.ERROR)
    assert Terminal.of(["--log-level", "loud"]) == Terminal()


def codes_in_source() -> dict[str, str]:
    """Each code in the package and one file that has it."""
    parts = ("compiler", "passes", "runtime", "kernels", "console", "driver.py", "cli.py")
    files = [f for part in parts for f in ([ROOT / part] if "." in part
             else (ROOT / part).rglob("*.py"))]  # fmt: skip
    return {code: str(f.relative_to(ROOT)) for f in files for code in CODE.findall(f.read_text())}


def test_every_code_is_explained_and_every_explanation_used() -> None:
    in_source, explained = codes_in_source(), set(explain.read())
    assert {c: f for c, f in in_source.items() if c not in explained} == {}
    assert explained - set(in_source) == set()


def test_each_row_of_the_page_is_read() -> None:
    page = explain.PAGE.read_text(encoding="utf-8")
    assert len(re.findall(r"^\| SPK", page, re.MULTILINE)) == len(explain.read())


@pytest.mark.parametrize("typed", ["SPK104", "spk104", "104"])
def test_explain(spike: Callable[..., Outcome], typed: str) -> None:
    code, out, _ = spike("explain", typed)
    assert code == 0
    assert out.startswith("SPK104: A shard is missing")
    assert "What to do: Download the shard again" in out


def test_explain_lists_all(spike: Callable[..., Outcome]) -> None:
    _, out, _ = spike("explain")
    assert all(code in out for code in explain.read())


def test_doctor(spike: Callable[..., Outcome]) -> None:
    code, out, _ = spike("doctor", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["ok"]
    assert found["checks"]["kernels"].startswith("ok, ")
    assert found["packages"]["runtime"]["onnxruntime"]


FEATURES = [
    kernels.CpuFeature("avx2", "avx2", True),
    kernels.CpuFeature("avx512f", "avx512", True),
    kernels.CpuFeature("avx512_vnni", "avx512", False),
]


@pytest.mark.parametrize(
    ("used", "best", "said"),
    [
        ("avx2", "avx2", "ok, avx2; avx512 needs avx512_vnni"),
        ("scalar", "avx2", "ok, scalar: SPIKE_CPU lowers it, this CPU has avx2"),
        (
            "avx512",
            "avx512_bf16",
            "ok, avx512; SPIKE_CPU=avx512_bf16 is faster for long prompts, and less exact",
        ),
    ],
)
def test_doctor_says_why_no_better_instructions(
    spike: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, used: str, best: str, said: str
) -> None:
    monkeypatch.setattr(kernels, "cpu_features", lambda: FEATURES)
    monkeypatch.setattr(kernels, "best_tier", lambda names: best if "avx2" in names else "")
    monkeypatch.setattr(kernels, "cpu_tier", lambda: used)
    assert json.loads(spike("doctor", "--json")[1])["checks"]["kernels"] == said


def test_a_bug_asks_to_be_reported() -> None:
    text = block(SpikeError("SPK390", "passes", "broke.", "A bug.", ExitCode.INTERNAL))
    assert "report it" in text
    assert "explain" not in text
