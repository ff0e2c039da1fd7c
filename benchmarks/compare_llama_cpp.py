"""SpikeInfer against llama.cpp on one checkpoint: accuracy, size, speed, in the same run.

    python benchmarks/compare_llama_cpp.py --model CKPT [--engine ENGINE] [--format Q4_K_M]

Accuracy as in `accuracy.py`. Decoding speed: greedy, one stream, the same prompt ids, rounds in
turn so that both meet the same state of the machine; medians, and the median of the ratios within a
round. Ratios are ours over llama.cpp's. A side that did not run has no ratio, and no time has one
when other programs took part of the machine: on two busy cores llama.cpp falls to a tenth
of its speed (162 -> 13 tok/s measured), which says nothing about either program.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import accuracy
import peers_llama_cpp
from gguf import GGUFReader
from spikeinfer.compiler.golden.record import random_tokens, tokenize
from worker import Worker

PEER, OURS = "llama.cpp", "spikeinfer"
# Share of all cores that other programs may take while both sides wait for a command.
QUIET = 0.1
CONTEXTS = (32, 1024)
OUR_WORKER = Path(__file__).resolve().parent / "workers" / "spike_worker.py"
# Name and digits; the first five are times or rates.
TIMED = 5
ROWS = [
    ("load s", 3),
    ("load to first token s", 3),
    ("decode tok/s, context 32", 1),
    ("decode tok/s, context 1024", 1),
    ("prefill tok/s, 1024", 1),
    ("weights MB", 1),
    ("on disk MB", 1),
    ("perplexity", 3),
    ("mean KL", 5),
    ("p99 KL", 4),
    ("top-1", 4),
]
Figures = dict[str, float]


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--engine", type=Path, help="engine directory; without: only llama.cpp")
    parser.add_argument("--format", default="Q4_K_M", help="llama.cpp's type")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=48, help="decoded tokens of a round")
    parser.add_argument("--windows", type=int, help="score only so many windows")
    parser.add_argument("--only", choices=["accuracy", "speed"], help="measure only this")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args()


def prompt_ids(checkpoint: Path, count: int) -> list[int]:
    """The first ids of the held-out text; pseudo-random ones without tokenizer."""
    if (checkpoint / "tokenizer.json").is_file():
        ids = tokenize(checkpoint, accuracy.HELD_OUT.read_text(encoding="utf-8"))
        return ids[:count]
    config = json.loads((checkpoint / "config.json").read_text())
    return list(random_tokens(config["vocab_size"], count, "decode"))


def busy_share(seconds: float = 1.0) -> float:
    """Share of the machine's cores in use over a moment; 0 where `/proc/stat` is missing."""
    before = cpu_times()
    time.sleep(seconds)
    after = cpu_times()
    if not before or not after:
        return 0.0
    spent = [b - a for a, b in zip(before, after, strict=True)]
    idle = spent[3] + spent[4]  # idle and waiting for a disk
    return 1.0 - idle / max(sum(spent), 1)


def cpu_times() -> list[int]:
    """The machine's time by state since boot, in ticks: user, nice, system, idle, iowait, ..."""
    path = Path("/proc/stat")
    return [int(x) for x in path.read_text().split("\n")[0].split()[1:9]] if path.is_file() else []


@contextmanager
def running(commands: dict[str, list[str]]) -> Iterator[dict[str, Worker]]:
    """A child per side."""
    workers = {side: Worker(command) for side, command in commands.items()}
    try:
        yield workers
    finally:
        for process in workers.values():
            process.close()


def measure_speed(
    workers: dict[str, Worker], checkpoint: Path, rounds: int, steps: int
) -> tuple[dict[str, Figures], Figures, float]:
    """Median figures per side, median ratios of ours to the peer within a round, busiest moment."""
    samples: dict[str, dict[str, list[float]]] = {side: {} for side in workers}
    busy = busy_share()
    for context in CONTEXTS:
        prompts = [prompt_ids(checkpoint, context)]
        command = {"do": "generate", "prompts": prompts, "steps": steps}
        for turn in range(rounds + 1):
            for side, process in workers.items():
                answer = process.call(command)
                if turn == 0:
                    continue  # warms caches and threads
                key = f"decode tok/s, context {context}"
                samples[side].setdefault(key, []).append(steps / answer["decode_seconds"])
                if context == CONTEXTS[-1]:
                    key = f"prefill tok/s, {context}"
                    samples[side].setdefault(key, []).append(context / answer["prefill_seconds"])
        busy = max(busy, busy_share())
    medians = {
        side: {key: statistics.median(values) for key, values in figures.items()}
        for side, figures in samples.items()
    }
    ratios: Figures = {}
    if len(workers) == 2:
        for key, values in samples[OURS].items():
            pairs = zip(values, samples[PEER][key], strict=True)
            ratios[key] = statistics.median(ours / theirs for ours, theirs in pairs)
    return medians, ratios, busy


def measure_sizes(gguf: Path, engine: Path | None) -> dict[str, Figures]:
    """Bytes of the tensors alone, and of everything on disk."""
    tensors = sum(int(tensor.n_bytes) for tensor in GGUFReader(str(gguf)).tensors)
    disk = gguf.stat().st_size
    sizes = {PEER: {"weights MB": tensors / 1e6, "on disk MB": disk / 1e6}}
    if engine:
        weights = json.loads((engine / "config.json").read_text())["spike"]["weights"]
        files = sum(file.stat().st_size for file in engine.iterdir())
        total = sum(int(weight["bytes"]) for weight in weights)
        sizes[OURS] = {"weights MB": total / 1e6, "on disk MB": files / 1e6}
    return sizes


def measure_accuracy(
    workers: dict[str, Worker], checkpoint: Path, limit: int | None
) -> tuple[float, dict[str, Figures]]:
    """The source's perplexity; accuracy figures per side."""
    scorers = {side: process.score for side, process in workers.items()}
    text = accuracy.HELD_OUT.read_text(encoding="utf-8")
    source, measured = accuracy.measure(checkpoint, scorers, text, limit)
    names = {"perplexity": "perplexity", "mean_kl": "mean KL", "p99_kl": "p99 KL", "top1": "top-1"}
    return source, {
        side: {names[key]: value for key, value in asdict(figures).items() if key in names}
        for side, figures in measured.items()
    }


def versions(peer: peers_llama_cpp.LlamaCpp, threads: int) -> dict[str, str]:
    """What ran."""
    cpu = next(
        (line.split(":")[1].strip() for line in cpu_lines() if line.startswith("model name")),
        platform.processor(),
    )
    libraries = ("spikeinfer", "onnxruntime", "transformers", "torch")
    found = {name: importlib.metadata.version(name) for name in libraries}
    return {**found, "peer": peer.version(), "cpu": cpu, "threads": str(threads)}


def cpu_lines() -> list[str]:
    """`/proc/cpuinfo`, where there is one."""
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


def table(figures: dict[str, Figures], ratios: Figures, quiet: bool) -> str:
    """Aligned text; a ratio only where both sides ran, for times only on a quiet machine."""
    sides = [PEER, OURS]
    lines = [f"{'':28}" + "".join(f"{side:>14}" for side in sides) + f"{'ratio':>9}"]
    for row, (name, digits) in enumerate(ROWS):
        values = [figures.get(side, {}).get(name) for side in sides]
        if values == [None, None]:
            continue
        cells = "".join(f"{'did not run' if v is None else f'{v:.{digits}f}':>14}" for v in values)
        ratio = ratios.get(name)
        if ratio is None and values[0] and values[1] is not None:
            ratio = values[1] / values[0]
        if row < TIMED and not quiet:
            ratio = None
        lines.append(f"{name:28}{cells}" + (f"{ratio:9.3f}" if ratio is not None else f"{'-':>9}"))
    return "\n".join(lines)


def main() -> None:
    """Run both sides and print the table."""
    arguments = parse()
    peer = peers_llama_cpp.install()
    gguf = peers_llama_cpp.quantise(peer, arguments.model, arguments.format)
    commands = {PEER: peers_llama_cpp.worker_command(peer)}
    models = {PEER: str(gguf)}
    if arguments.engine:
        commands[OURS] = [sys.executable, str(OUR_WORKER)]
        models[OURS] = str(arguments.engine)
    figures: dict[str, Figures] = measure_sizes(gguf, arguments.engine)
    ratios: Figures = {}
    result: dict[str, Any] = {"versions": versions(peer, arguments.threads), "figures": figures}
    busy = busy_share()
    with running(commands) as workers:
        for side, process in workers.items():
            opening = {"do": "open", "model": models[side], "threads": arguments.threads}
            answer = process.call({**opening, "context": 2048})
            figures[side]["load s"] = answer["load_seconds"]
            figures[side]["load to first token s"] = answer["first_token_seconds"]
        if arguments.only != "accuracy":
            speed, ratios, during = measure_speed(
                workers, arguments.model, arguments.rounds, arguments.steps
            )
            busy = max(busy, during)
            for side, values in speed.items():
                figures[side].update(values)
        if arguments.only != "speed":
            source, measured = measure_accuracy(workers, arguments.model, arguments.windows)
            result["source perplexity"] = source
            for side, values in measured.items():
                figures[side].update(values)
    quiet = busy <= QUIET
    result.update({"busy": busy, "ratios": ratios if quiet else {}})
    print(f"{arguments.model.resolve().name}, llama.cpp {arguments.format}")
    print(", ".join(f"{name} {value}" for name, value in result["versions"].items()))
    if "source perplexity" in result:
        print(f"source (transformers float32): perplexity {result['source perplexity']:.3f}")
    if not quiet:
        print(f"other programs took up to {busy:.0%} of the cores: times have no ratio")
    print(table(figures, ratios, quiet))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
