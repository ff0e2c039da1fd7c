"""`spike golden record|check|diff`: reference sets from the source, engines against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ExitCode, SpikeError
from .options import golden_set, require_build_extra, require_place
from .tables import facts
from .terminal import Terminal

if TYPE_CHECKING:
    from ..compiler.engine import EngineConfig
    from ..compiler.frontend.checkpoint import Checkpoint
    from ..compiler.golden import Prompt, Thresholds

FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
DEFAULT_PROMPTS = 6


def record(
    checkpoint: Path, output: Path, texts: Sequence[str], greedy: int, terminal: Terminal
) -> None:
    """Record a golden set from a checkpoint, with transformers in float32, into `output`.

    Raises SPK817 if it can't be written there, and what reading and running the source raise.
    """
    require_build_extra()
    require_place(output)
    from ..compiler.assembly.source import open_source, rebuilt
    from ..compiler.golden import record as run

    source = open_source(checkpoint).checkpoint
    prompts = _prompts(source, texts, greedy)
    terminal.say(f"running {checkpoint} in float32 over {len(prompts)} prompts")
    made = run(source.path, prompts, output.stem, rebuilt=rebuilt(source))
    path = made.save(output.parent)
    positions = sum(len(p.sequence) - p.first for p in made.prompts)
    text = f"{path}: {len(made.prompts)} prompts, {positions} positions"
    data = {"set": str(path), "prompts": [p.name for p in made.prompts], "positions": positions}
    terminal.answer(text, data)


def _prompts(source: Checkpoint, texts: Sequence[str], greedy: int) -> list[Prompt]:
    """The given texts, or the first paragraphs of our prose; random ids without a tokenizer."""
    from ..compiler.golden import Prompt
    from ..compiler.golden.gate import PROSE
    from ..compiler.golden.record import random_tokens

    if (source.path / "tokenizer.json").is_file():
        prose = PROSE.read_text(encoding="utf-8").split("\n\n")
        chosen = list(texts) or [p.strip() for p in prose if p.strip()][:DEFAULT_PROMPTS]
        return [Prompt(f"p{i}", text=text, greedy=greedy) for i, text in enumerate(chosen)]
    if texts:
        raise SpikeError(
            "SPK547",
            "golden",
            f"{source.path} has no tokenizer.json, so a text can't be recorded.",
            "Leave --prompt out: then fixed random ids are used.",
        )
    width = int(source.config.get_text_config().vocab_size)
    ids = [random_tokens(width, 48, f"p{i}") for i in range(2)]
    return [Prompt(f"p{i}", tokens=tokens, greedy=16) for i, tokens in enumerate(ids)]


def check(engine_path: Path, golden: str, limits: Mapping[str, float], terminal: Terminal) -> int:
    """Hold an engine against a set; exit code 4 if a limit is passed."""
    from ..compiler.engine import EngineDirectory
    from ..compiler.golden import GoldenSet
    from ..compiler.golden import check as run
    from ..runtime import SpikeEngine

    reference = GoldenSet.load(Path(golden_set(golden)))
    config = EngineDirectory.open(engine_path).config
    thresholds = engine_limits(config).override(limits)
    with SpikeEngine(engine_path) as engine:
        report = run(
            reference,
            engine.score,
            thresholds,
            lambda tokens: engine.score(tokens, chunk_tokens=1),
        )
    rows: list[tuple[str, object]] = [
        ("Set", f"{report.golden}, {report.sequences} sequences, {report.positions} positions"),
        ("Mean KL", f"{report.mean_kl:.4g} nats (limit {thresholds.mean_kl:.4g})"),
        ("Median KL", f"{report.median_kl:.4g} nats"),
        ("p99 KL", f"{report.p99_kl:.4g} nats (limit {thresholds.p99_kl:.4g})"),
        ("Worst", f"{report.max_kl:.4g} nats at {report.worst}"),
        ("Top-1", f"{report.top1:.2%} (limit {thresholds.top1:.2%})"),
        ("Perplexity", f"x{report.perplexity_ratio:.5f} (limit x{thresholds.perplexity_ratio})"),
        ("Logit error", f"{report.logit_error:.4g}"),
        ("Prefill-decode", f"{report.decode_error or 0:.4g}"),
        ("Divergent", f"{len(report.divergences)} of {report.sequences} continuations"),
        ("Verdict", "passed" if report.passed else "FAILED: " + "; ".join(report.failures)),
    ]
    terminal.answer(facts(rows), report.to_json())
    return int(ExitCode.OK if report.passed else ExitCode.GOLDEN_FAILED)


def engine_limits(config: EngineConfig) -> Thresholds:
    """Limits for an engine's formats: the looser of weights and cache."""
    from ..compiler.golden import CACHES, thresholds_for

    made = config.pretrained_config.quantization
    algorithm = FLOATS.get(made.quant_algo, made.quant_algo)
    if made.quant_algo in FLOATS and any(w.format not in FLOATS for w in config.spike.weights):
        algorithm = "q8_0"  # blocks kept from the source are exact; their kernels round activations
    weights = thresholds_for(algorithm, "float32")
    if made.kv_cache_quant_algo not in CACHES:
        return weights
    cache = thresholds_for(CACHES[made.kv_cache_quant_algo], "float32")
    return cache if cache.mean_kl > weights.mean_kl else weights


def compare(left: Path, right: Path, tolerance: float, terminal: Terminal) -> int:
    """What differs between two sets; exit code 4 if anything but how they were made does."""
    from ..compiler.golden import GoldenSet, diff

    found = diff(GoldenSet.load(left), GoldenSet.load(right))
    lines = found.lines(tolerance)
    moved = [line for line in lines if not line.startswith("made: ")]
    data: dict[str, Any] = {"differences": lines, "equal": not moved}
    terminal.answer("\n".join(lines) or "no differences", data)
    return int(ExitCode.GOLDEN_FAILED if moved else ExitCode.OK)
