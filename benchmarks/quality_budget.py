"""What the quality solver gains over the fixed mix q4_k_m: the same size, and the same KL.

    python benchmarks/quality_budget.py .cache/models/SmolLM2-135M-Instruct --windows 8

Three engines of one checkpoint: q4_k_m; the solver's under the size of its rank0.weights; the
solver's under the KL that it measures on the golden gate's text. All are then measured on
`data/heldout_prose.txt`, which neither calibration nor the gate has seen. Engines are kept in
--work and used again. `--quantizer feedback` is for the solver's engines.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from accuracy import HELD_OUT, Accuracy, measure
from spikeinfer import SpikeEngine
from spikeinfer.compiler.assembly.evidence import BUDGET_TOKENS
from spikeinfer.compiler.engine import EngineDirectory
from spikeinfer.compiler.golden import gate, thresholds_for
from spikeinfer.compiler.golden.sets import Float32
from spikeinfer.driver import BuildRequest, build

BASE = "q4_k_m"


@dataclass(frozen=True)
class Row:
    """One engine: bytes of rank0.weights, KL on the gate's text, and held-out accuracy."""

    name: str
    bytes: int
    bits_per_weight: float
    formats: dict[str, int]
    gate_kl: float
    held_out: Accuracy
    seconds: float


@dataclass(frozen=True)
class Engine:
    """A built engine and how long that took; 0 if it was there."""

    path: Path
    seconds: float

    @property
    def bytes(self) -> int:
        """Of its weights."""
        return (self.path / "rank0.weights").stat().st_size


def engine(request: BuildRequest) -> Engine:
    """Builds, unless an earlier run did."""
    if (request.output_dir / "manifest.json").is_file():
        return Engine(request.output_dir, 0.0)
    begun = time.monotonic()
    build(request)
    return Engine(request.output_dir, time.monotonic() - begun)


def gate_kl(checkpoint: Path, path: Path) -> float:
    """Mean KL on the text that a budget is measured on."""
    with SpikeEngine(path) as running:
        report = gate(
            checkpoint, running.score, thresholds_for("mixed", "float32"),
            max_tokens=BUDGET_TOKENS, max_length=running.max_seq_len,
        )  # fmt: skip
    return report.mean_kl


def engines(checkpoint: Path, work: Path, quantizer: str) -> dict[str, Engine]:
    """The three engines by name; the solver's quantised by `quantizer`, the mix plainly."""

    def made(name: str, **options: Any) -> Engine:
        return engine(BuildRequest(checkpoint, work / name, enable_streaming=True, **options))

    base = made(BASE, quantization=BASE, golden="off")
    same_size = made("same-size", max_size=str(base.bytes), quantizer=quantizer)
    same_kl = made("same-kl", max_kl=gate_kl(checkpoint, base.path), quantizer=quantizer)
    return {BASE: base, "same size": same_size, "same KL": same_kl}


def rows(checkpoint: Path, found: dict[str, Engine], windows: int | None) -> list[Row]:
    """All engines on held-out text, window by window in turn."""
    with ExitStack() as stack:
        running = {n: stack.enter_context(SpikeEngine(e.path)) for n, e in found.items()}
        scorers = {n: partial(_tail, e) for n, e in running.items()}
        _, figures = measure(checkpoint, scorers, HELD_OUT.read_text(encoding="utf-8"), windows)
    return [_row(name, e, gate_kl(checkpoint, e.path), figures[name]) for name, e in found.items()]


def _tail(engine: SpikeEngine, tokens: list[int], first: int) -> Float32:
    return engine.score(tokens)[first:]


def _row(name: str, engine: Engine, kl: float, held_out: Accuracy) -> Row:
    spike = EngineDirectory.open(engine.path).config.spike
    matrices = [w for w in spike.weights if len(w.shape) > 1]
    bits = 8 * sum(w.bytes for w in matrices) / sum(prod(w.shape) for w in matrices)
    formats = dict(sorted(Counter(w.format for w in matrices).items()))
    return Row(name, engine.bytes, bits, formats, kl, held_out, engine.seconds)


def table(found: list[Row]) -> str:
    """Markdown, each row against the first."""
    base = found[0]
    lines = [
        "| engine | MB | size | bits | gate KL | held-out KL | of base | p99 | top-1 | formats |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        formats = ", ".join(f"{count} {name}" for name, count in row.formats.items())
        lines.append(
            f"| {row.name} | {row.bytes / 1e6:.2f} | {row.bytes / base.bytes - 1:+.1%} "
            f"| {row.bits_per_weight:.2f} | {row.gate_kl:.4f} | {row.held_out.mean_kl:.4f} "
            f"| {row.held_out.mean_kl / base.held_out.mean_kl:.2f} | {row.held_out.p99_kl:.3f} "
            f"| {row.held_out.top1:.1%} | {formats} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Builds, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="checkpoint directory")
    parser.add_argument("--work", type=Path, help="where engines are kept; default: nowhere")
    parser.add_argument("--windows", type=int, help="score only so many windows of 512 tokens")
    parser.add_argument("--quantizer", choices=["plain", "feedback"], default="plain")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        found = engines(given.model, given.work or Path(temporary), given.quantizer)
        measured = rows(given.model, found, given.windows)
    positions = measured[0].held_out.positions
    print(f"{given.model.name}, {positions} held-out positions, {date.today()}, "
          f"{platform.machine()}\n\n{table(measured)}")  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in measured], indent=1) + "\n")


if __name__ == "__main__":
    main()
