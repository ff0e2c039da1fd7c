"""The divergence that quantising costs: llama.cpp's mix and ours, in the same run.

    python benchmarks/quantization.py --model CKPT [--format Q4_K_M] [--windows N]

Rows: llama.cpp without importance matrix, llama.cpp with one, and our engines by quantiser. The
importance matrix and ours come from the same calibration text (`calibration_text.py`), which shares
no phrase with the text that is scored (`accuracy.py`). The importance matrix is measured on the
float model over 64 windows of 512 tokens; as llama-imatrix does, it leaves the head out.

Engines and GGUF files are kept in `.cache` and made again when missing. `--engine` adds a row.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import accuracy
import calibration_text
import numpy as np
import peers_llama_cpp
from compare_llama_cpp import cpu_lines
from gguf import GGUFReader
from peers_llama_cpp import LlamaCpp
from spikeinfer.compiler.calibrate import read_imatrix
from worker import Worker

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".cache" / "quantization"
OURS = ("plain", "imatrix", "feedback")
HEADS = ("output.weight", "token_embd.weight")
TOKENS, WINDOW = 32768, 512


@dataclass(frozen=True)
class Row:
    """One quantised model: its file or directory, its worker, and its tensors' bytes."""

    name: str
    path: Path
    command: Sequence[str]
    megabytes: float


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--format", default="Q4_K_M", help="llama.cpp's type; ours has its name")
    parser.add_argument("--windows", type=int, help="score only so many windows")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quantizers", nargs="*", default=OURS, choices=OURS)
    parser.add_argument("--engine", action="append", default=[], help="NAME=DIR: one more row")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def importances(checkpoint: Path, text: Path) -> Path:
    """The importance matrix, as `spike calibrate` writes it; cached."""
    out = CACHE / f"{checkpoint.resolve().name}-imatrix.gguf"
    if not out.is_file():
        options = ["--text", str(text), "--tokens", str(TOKENS), "--window", str(WINDOW)]
        command = [script("spike"), "calibrate", str(checkpoint), "-o", str(out), *options]
        subprocess.run(command, check=True)
    return out


def means(file: Path) -> Path:
    """Mean squares by llama.cpp's tensor names, as .npz beside the importance matrix."""
    out = file.with_suffix(".npz")
    if not out.is_file():
        entries = read_imatrix(file).entries
        np.savez(out, **{
            name: np.ravel(entry.sums / np.maximum(entry.counts.reshape(-1, 1), 1)).astype("<f4")
            for name, entry in entries.items()
            if name not in HEADS
        })  # fmt: skip
    return out


def script(name: str) -> str:
    """A console script of the running interpreter's environment."""
    return str(Path(sys.executable).with_name(name))


def theirs(peer: LlamaCpp, checkpoint: Path, kind: str, text: Path) -> Iterator[Row]:
    """llama.cpp without and with an importance matrix."""
    worker = peers_llama_cpp.worker_command(peer)
    plain = peers_llama_cpp.quantise(peer, checkpoint, kind)
    weighted = peers_llama_cpp.quantise(
        peer, checkpoint, kind, means(importances(checkpoint, text))
    )
    for name, path in (("llama.cpp", plain), ("llama.cpp, imatrix", weighted)):
        size = sum(int(tensor.n_bytes) for tensor in GGUFReader(str(path)).tensors)
        yield Row(name, path, worker, size / 1e6)


def engine(checkpoint: Path, kind: str, quantizer: str, text: Path) -> Path:
    """Our engine; cached."""
    out = CACHE / f"{checkpoint.resolve().name}-{kind.lower()}-{quantizer}"
    if not out.is_dir():
        command = [script("spike-build"), "--model", str(checkpoint), "-o", str(out)]
        command += ["--quantization", kind.lower(), "--enable-streaming", "--golden", "off"]
        command += ["--max-seq-len", "1024"]
        if quantizer == "imatrix":
            command += ["--imatrix", str(importances(checkpoint, text))]
        elif quantizer == "feedback":
            command += ["--calibration", str(text)]
        start = time.perf_counter()
        subprocess.run(command, check=True)
        print(f"built {out.name} in {time.perf_counter() - start:.0f} s", flush=True)
    return out


def our_row(name: str, path: Path) -> Row:
    """An engine as a row."""
    worker = [sys.executable, str(peers_llama_cpp.HERE / "workers" / "spike_worker.py")]
    weights = json.loads((path / "config.json").read_text())["spike"]["weights"]
    return Row(name, path, worker, sum(int(weight["bytes"]) for weight in weights) / 1e6)


def measure(
    rows: Sequence[Row], checkpoint: Path, threads: int, windows: int | None
) -> tuple[float, dict[str, accuracy.Accuracy]]:
    """The source's perplexity, and every row's accuracy; the source is scored once for all."""
    text = accuracy.HELD_OUT.read_text(encoding="utf-8")
    with ExitStack() as stack:
        scorers = {}
        for row in rows:
            worker = stack.enter_context(Worker(row.command))
            opening = {"do": "open", "model": str(row.path), "threads": threads, "context": 1024}
            worker.call(opening)
            scorers[row.name] = worker.score
        return accuracy.measure(checkpoint, scorers, text, windows)


def table(rows: Sequence[Row], measured: dict[str, accuracy.Accuracy]) -> str:
    """Aligned text; ratios of mean KL to llama.cpp's two rows."""
    base = [measured[row.name].mean_kl for row in rows[:2]]
    header = ("MB", "mean KL", "p99 KL", "top-1", "perplexity", "KL / plain", "KL / imatrix")
    lines = [f"{'':26}" + "".join(f"{name:>13}" for name in header)]
    for row in rows:
        found = measured[row.name]
        cells = [f"{row.megabytes:.3f}", f"{found.mean_kl:.5f}", f"{found.p99_kl:.4f}"]
        cells += [f"{found.top1:.4f}", f"{found.perplexity:.3f}"]
        cells += [f"{found.mean_kl / kl:.3f}" for kl in base]
        lines.append(f"{row.name:26}" + "".join(f"{cell:>13}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    """Make what is missing, measure all rows in turn, print the table."""
    arguments = parse()
    checkpoint, kind = arguments.model, arguments.format
    text = calibration_text.write(CACHE / "calibration.txt")
    rows = list(theirs(peers_llama_cpp.install(), checkpoint, kind, text))
    for quantizer in arguments.quantizers:
        rows.append(our_row(f"ours, {quantizer}", engine(checkpoint, kind, quantizer, text)))
    for extra in arguments.engine:
        name, _, path = extra.partition("=")
        rows.append(our_row(name, Path(path)))
    source, measured = measure(rows, checkpoint, arguments.threads, arguments.windows)
    cpu = next((x.split(":")[1].strip() for x in cpu_lines() if "model name" in x), "")
    print(f"{checkpoint.resolve().name}, {kind}, {cpu or platform.processor()}")
    positions = measured[rows[0].name].positions
    print(f"source perplexity {source:.3f}, {positions} scored positions")
    print(table(rows, measured))
    if arguments.json:
        figures = {row.name: {**vars(measured[row.name]), "MB": row.megabytes} for row in rows}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
