"""The commands `spike` and `spike-build`: arguments and dispatch. `console/` does the rest.

Commands import what they need when they run: `spike --help` must not wait for a model runtime, and
only building (and recording golden sets) needs torch.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from .console.guard import Command, run
from .console.terminal import LogLevel, Terminal

SETTINGS: dict[str, Any] = {"rich_markup_mode": None, "add_completion": False}
app = typer.Typer(
    help="Compile Hugging Face checkpoints into small streaming engines, and run them.",
    no_args_is_help=True,
    **SETTINGS,
)
golden_app = typer.Typer(help="Reference sets: record the source, check engines against it.",
                         no_args_is_help=True, **SETTINGS)  # fmt: skip
app.add_typer(golden_app, name="golden")
build_app = typer.Typer(**SETTINGS)

Flag = typer.Option
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output on stdout.")]
Level = Annotated[LogLevel, typer.Option("--log-level", help="How much stderr says.")]
Engine = Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine directory.")]
Set = Annotated[str, typer.Argument(metavar="SET", help="Golden set: its .yaml, or a shipped name")]


class View(StrEnum):
    """What `spike inspect` shows."""

    REPORT = "report"
    WEIGHTS = "weights"
    PRECISION = "precision"
    PASSES = "passes"
    QUANTIZATION = "quantization"
    OVERFLOW = "overflow"


def version(value: bool) -> None:
    """`--version`."""
    if value:
        from . import __version__

        print(f"spikeinfer {__version__}")
        raise typer.Exit


@app.callback()
def top(
    show_version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Compile Hugging Face checkpoints into small streaming engines, and run them."""


@app.command("build")
@build_app.command("spike-build")
def build(
    model: Annotated[Path, Flag("--model", "-m", help="Checkpoint directory, or a .gguf file.")],
    output_dir: Annotated[
        Path | None, Flag("--output-dir", "-o", help="Engine directory to write.")
    ] = None,
    recipe: Annotated[
        str | None, Flag(help="YAML file, or the name of a shipped recipe; flags override it.")
    ] = None,
    model_type: Annotated[
        str | None, Flag(help="The checkpoint's type, if its config.json states none.")
    ] = None,
    dtype: Annotated[
        str | None,
        Flag(help="Matrices and, where that is safe, values: auto, float32, float16, bfloat16."),
    ] = None,
    quantization: Annotated[
        str | None,
        Flag(
            "--quantization",
            "-q",
            help="none, q2_k, q3_k_m, q4_k_s, q4_k_m, q5_k_m, q6_k, q8_0, f16, bf16, f32; the old "
            "q4_0, q4_1, q5_0, q5_1; int4_sym for tensorrt.",
        ),
    ] = None,
    quantizer: Annotated[
        str | None,
        Flag(help="plain, feedback; auto = feedback with --calibration, else plain."),
    ] = None,
    enable_streaming: Annotated[
        bool | None,
        Flag(
            "--enable-streaming/--no-enable-streaming",
            "--enable-streaming-llm/--no-enable-streaming-llm",
            help="Ragged steps over a paged KV cache, instead of batch, sequence and past.",
        ),
    ] = None,
    max_num_tokens: Annotated[int | None, Flag(help="Tokens of one step.")] = None,
    max_batch_size: Annotated[int | None, Flag(help="Sequences of one step.")] = None,
    max_seq_len: Annotated[
        int | None, Flag(help="Tokens of one sequence, prompt and output together.")
    ] = None,
    kv_cache_type: Annotated[str | None, Flag(help="auto, paged, continuous.")] = None,
    kv_cache_dtype: Annotated[str | None, Flag(help="auto, f32, f16, int8, int4.")] = None,
    tokens_per_block: Annotated[int | None, Flag(help="Block size of the paged cache.")] = None,
    workers: Annotated[int | None, Flag(help="Threads of the quantiser; 0 = one per CPU.")] = None,
    backend: Annotated[str | None, Flag(help="onnxruntime, tensorrt.")] = None,
    golden: Annotated[
        str | None, Flag(help="Golden gate: auto, off, or a golden set's file or name.")
    ] = None,
    dry_run: Annotated[
        bool | None, Flag("--dry-run", help="Trace and plan; read no weights, write nothing.")
    ] = None,
    verify_passes: Annotated[
        bool | None, Flag("--verify-passes", help="Run the graph before and after each pass.")
    ] = None,
    dump_ir: Annotated[Path | None, Flag(help="Write the graph after each phase here.")] = None,
    keep_failed: Annotated[
        bool | None, Flag("--keep-failed", help="Keep an engine that fails, as OUTPUT.failed.")
    ] = None,
    profiling_verbosity: Annotated[
        Literal["none", "layer_names_only", "detailed"] | None, Flag(help="Only none, so far.")
    ] = None,
    max_kl: Annotated[
        float | None,
        Flag(help="Choose formats: the smallest engine whose measured mean KL is at most this."),
    ] = None,
    max_bpw: Annotated[
        float | None, Flag(help="Choose formats: the least KL in so many bits per weight.")
    ] = None,
    max_size: Annotated[
        str | None, Flag(help="Choose formats: the least KL in a size such as 90MB.")
    ] = None,
    calibration: Annotated[
        Path | None,
        Flag(help="Text to quantise to, to observe half precision on, and for quality budgets."),
    ] = None,
    imatrix: Annotated[
        Path | None, Flag(help="Importances by spike calibrate: weigh the quantiser's errors.")
    ] = None,
    target_sm: Annotated[
        str | None, Flag(help="GPUs of a TensorRT engine: sm89,sm120; current = the one here.")
    ] = None,
    plan_only: Annotated[
        bool | None, Flag("--plan-only", help="Write a TensorRT network's plan, no engine.")
    ] = None,
    weight_streaming: Annotated[
        bool | None,
        Flag("--weight-streaming", help="Let a TensorRT engine keep weights in host memory."),
    ] = None,
    timing_cache: Annotated[
        Path | None, Flag(help="(TensorRT for RTX has no use for one.)")
    ] = None,
    json: Json = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Compile a checkpoint into an engine directory, checked against its source."""
    flags = dict(locals())  # the first statement: exactly the parameters
    from .console.build import run_build
    from .console.options import request_from

    terminal = Terminal(flags.pop("json"), flags.pop("log_level"))
    run_build(request_from(flags, flags.pop("recipe")), terminal)


@app.command("run")
def run_engine(
    engine: Annotated[Path, typer.Argument(metavar="ENGINE", help="Engine, checkpoint or .gguf.")],
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text; - or a pipe reads stdin.")
    ] = None,
    chat: Annotated[
        bool | None, Flag(help="Use the chat template (default: if the engine has one).")
    ] = None,
    system: Annotated[str | None, Flag(help="System message of the chat.")] = None,
    token_ids: Annotated[str | None, Flag(help="The prompt as ids: 1,2,3.")] = None,
    max_tokens: Annotated[int, Flag(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, Flag(help="0 = always the likeliest token.")] = 0.0,
    max_entropy: Annotated[
        float | None, Flag(help="Lower the temperature where there is more, bits.")
    ] = None,
    top_k: Annotated[int, Flag(help="Draw from the k likeliest; 0 = off.")] = 0,
    top_p: Annotated[float, Flag(help="Draw from the likeliest up to this mass.")] = 1.0,
    min_p: Annotated[float, Flag(help="Draw from those this close to the best; 0 = off.")] = 0.0,
    typical_p: Annotated[float, Flag(help="Draw from the most typical up to this mass.")] = 1.0,
    mirostat_tau: Annotated[float | None, Flag(help="Steer surprise to so many bits.")] = None,
    repetition_penalty: Annotated[float, Flag(help="Above 1: what came comes less.")] = 1.0,
    logit_bias: Annotated[
        list[str] | None, Flag(metavar="ID=NUMBER", help="Add to a logit; may be repeated.")
    ] = None,
    seed: Annotated[int | None, Flag(help="Same seed, same text.")] = None,
    stop: Annotated[list[str] | None, Flag(help="End at this text; may be repeated.")] = None,
    logprobs: Annotated[int | None, Flag(help="Show them, and so many beside each.")] = None,
    json_schema: Annotated[str | None, Flag(help="Answer in JSON of it; @FILE reads it.")] = None,
    regex: Annotated[str | None, Flag(help="An answer that matches; @FILE reads it.")] = None,
    grammar: Annotated[str | None, Flag(help="Lark or GBNF; @FILE reads it.")] = None,
    speculative: Annotated[
        Literal["off", "prompt_lookup", "auto"], Flag(help="Drafts from the text so far.")
    ] = "off",
    max_seq_len: Annotated[int | None, Flag(help="Reserve cache for fewer tokens.")] = None,
    threads: Annotated[int | None, Flag(help="CPU threads; default one per core.")] = None,
    json: Json = False,
    log_level: Level = LogLevel.INFO,
) -> int:
    """Generate text: one answer to PROMPT, or a conversation."""
    flags = dict(locals())  # the first statement: exactly the parameters
    from .console import generate
    from .console.sampling import sampling_options

    if system is not None and chat is False:
        raise typer.BadParameter("--system needs the chat template; leave --no-chat out")
    if token_ids is not None and (prompt is not None or chat):
        raise typer.BadParameter("--token-ids takes the place of PROMPT and of the chat template")
    ask = generate.Ask(prompt, token_ids, chat, system)
    loading = {"max_seq_len": max_seq_len, "threads": threads}
    terminal = Terminal(json, log_level)
    return generate.generate(engine, ask, sampling_options(flags), loading, terminal)


@app.command()
def inspect(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[VIEW] ENGINE", help=f"What to show: {', '.join(View)}."),
    ],
    dtype: Annotated[str, Flag(help="For overflow: float16 or bfloat16.")] = "float16",
    calibration: Annotated[
        Path | None, Flag(help="For overflow: text to run; default: text of ours.")
    ] = None,
    json: Json = False,
) -> None:
    """Show what is in an engine: sizes, formats, precision, passes, golden figures.

    The view overflow takes a checkpoint: it names the first node that exceeds a format.
    """
    from .console.options import view_and_path

    view, path = view_and_path(words, tuple(View))
    if view == View.OVERFLOW:
        from .console.precision import overflow

        overflow(path, dtype, calibration, Terminal(json))
    else:
        from .console.inspect import show

        show(path, view, Terminal(json))


@app.command()
def verify(
    engine: Engine,
    on_device: Annotated[
        bool, Flag("--on-device", help="Run a TensorRT engine here; record whether it agrees.")
    ] = False,
    json: Json = False,
) -> int:
    """Hash every file of an engine and compare with its manifest."""
    from .console.inspect import verify as verify_engine

    if on_device:
        from .console.verify_device import verify_on_device

        return verify_on_device(engine, Terminal(json))

    return verify_engine(engine, Terminal(json))


@app.command()
def export(
    engine: Engine,
    output: Annotated[Path, Flag("--output", "-o", help="File to write.")],
    format: Annotated[str, Flag("--format", "-f", help="gguf, for llama.cpp.")] = "gguf",
    json: Json = False,
) -> None:
    """Write an engine's model as a file of another program: its weights bit for bit."""
    from .console.export import export as write

    write(engine, format, output, Terminal(json))


@golden_app.command("record")
def golden_record(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT")],
    output: Annotated[Path, Flag("--output", "-o", help="NAME.yaml; NAME.npz goes beside it.")],
    prompt: Annotated[
        list[str] | None, Flag(help="A text to record; may be repeated. Default: prose of ours.")
    ] = None,
    greedy: Annotated[int, Flag(min=0, help="Tokens to continue each text by.")] = 32,
    json: Json = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Record what a checkpoint says, run by transformers in float32."""
    from .console.golden import record

    record(checkpoint, output, prompt or [], greedy, Terminal(json, log_level))


@golden_app.command("check")
def golden_check(
    engine: Engine,
    golden_set: Set,
    max_mean_kl: Annotated[float | None, Flag(help="Limit; default: by the formats.")] = None,
    max_p99_kl: Annotated[float | None, Flag(help="Limit; default: by the formats.")] = None,
    min_top1: Annotated[float | None, Flag(help="Limit; default: by the formats.")] = None,
    json: Json = False,
) -> int:
    """Hold an engine against a golden set (needs neither torch nor the checkpoint)."""
    from .console.golden import check

    limits = {"mean_kl": max_mean_kl, "p99_kl": max_p99_kl, "top1": min_top1}
    given = {name: value for name, value in limits.items() if value is not None}
    return check(engine, golden_set, given, Terminal(json))


@golden_app.command("diff")
def golden_diff(
    left: Annotated[Path, typer.Argument(metavar="SET")],
    right: Annotated[Path, typer.Argument(metavar="SET")],
    tolerance: Annotated[float, Flag(help="Log-probabilities this close are equal, nats.")] = 1e-4,
    json: Json = False,
) -> int:
    """Show what differs between two golden sets."""
    from .console.golden import compare

    return compare(left, right, tolerance, Terminal(json))


@app.command()
def calibrate(
    checkpoint: Annotated[Path, typer.Argument(metavar="CHECKPOINT")],
    output: Annotated[Path, Flag("--output", "-o", help="GGUF file of importances to write.")],
    text: Annotated[
        list[Path] | None, Flag(help="Text to read; may be repeated. Default: text of ours.")
    ] = None,
    tokens: Annotated[int, Flag(min=1, help="Tokens to read.")] = 32768,
    window: Annotated[int, Flag(min=1, help="Tokens of one sequence.")] = 512,
    workers: Annotated[int, Flag(min=0, help="Threads; 0 = one per CPU.")] = 0,
    json: Json = False,
    log_level: Level = LogLevel.INFO,
) -> None:
    """Measure which input channels of each matrix matter, for spike-build --imatrix."""
    from .console.calibrate import calibrate as run

    run(checkpoint, text or [], output, (tokens, window), workers, Terminal(json, log_level))


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(metavar="CODE", help="SPK104, or 104.")] = None,
    json: Json = False,
) -> None:
    """Explain an error code; without one, list them all."""
    from .console import explain as pages

    Terminal(json).answer(*(pages.overview() if code is None else pages.explain(code)))


@app.command()
def doctor(json: Json = False) -> int:
    """Show what this machine has and whether engines can run and be built here."""
    from .console.doctor import examine

    return examine(Terminal(json))


ANYTHING = {"ignore_unknown_options": True, "allow_extra_args": True}


def _later(name: str, remedy: str) -> None:
    """Register a command of a later version: known, and clear about it."""

    @app.command(name, context_settings=ANYTHING, help="(not in this version)")
    def command() -> None:
        from .console.options import later

        raise later(f"spike {name}", remedy)


_later("serve", "Use `spike run`, or SpikeEngine from Python.")
_later("bench", "The scripts in benchmarks/ measure an engine side by side with its peers.")
_later("diff", "`spike inspect ENGINE --json` of both engines can be compared; "
               "`spike golden diff` compares golden sets.")  # fmt: skip


def main() -> NoReturn:
    """Entry point of `spike`."""
    sys.exit(run(_command(app), "spike", sys.argv[1:]))


def main_build() -> NoReturn:
    """Entry point of `spike-build`."""
    sys.exit(run(_command(build_app), "spike-build", sys.argv[1:]))


def _command(of: typer.Typer) -> Command:
    command: Command = typer.main.get_command(of)
    return command
