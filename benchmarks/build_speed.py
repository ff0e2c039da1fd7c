"""Time and memory of building an 8B-shaped checkpoint, beside llama.cpp's quantiser on its tensors.

    .venv/bin/python benchmarks/build_speed.py [--layers 32] [--rounds 1] [--keep]

Needs about 45 GB of disk under .cache/large for 32 layers; fewer layers give a quicker look. Ours
is the whole of `spike-build` (tracing, passes, quantising, hashing, bringing it to disk) without
the golden gate; llama.cpp's is `llama_model_quantize` alone, from a bf16 GGUF of the same weights.
Both use two threads and take turns. Also: what `--dry-run` says about memory and size, against the
truth.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import large_checkpoint
import peers_llama_cpp

ROOT = Path(__file__).resolve().parent.parent / ".cache" / "large"
BUILD = Path(sys.executable).with_name("spike-build")
THREADS = 2


def build(checkpoint: Path, out: Path, *extra: str) -> tuple[dict[str, object], float, float]:
    """The result event of a build, its seconds, and its peak resident MB."""
    flags = ["--quantization", "q4_k_m", "--enable-streaming", "--golden", "off", "--json"]
    command = [str(BUILD), "--model", str(checkpoint), "--output-dir", str(out), *flags, *extra]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--workers", str(THREADS)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    events = [json.loads(line) for line in process.stdout]
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"spike-build ended with {process.returncode}")
    result = next(event for event in events if event.get("event") == "result")
    return result, time.perf_counter() - begun, usage.ru_maxrss / 1e3 * 1.024


def quantise(peer: peers_llama_cpp.LlamaCpp, source: Path, out: Path) -> float:
    """Seconds of llama.cpp's quantiser."""
    command = {"do": "quantise", "source": str(source), "out": str(out), "kind": "Q4_K_M"}
    with peers_llama_cpp.worker(peer) as worker:
        answer = worker.call({**command, "threads": THREADS})
    return float(answer["seconds"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep what was made")
    options = parser.parse_args()
    checkpoint = ROOT / f"llama-8b-{options.layers}"
    shape = replace(large_checkpoint.SHAPES["8b"], layers=options.layers)
    large_checkpoint.write(checkpoint, shape)
    peer = peers_llama_cpp.install()
    source = peers_llama_cpp.convert(peer, checkpoint, "bf16")
    engine, gguf = ROOT / "engine", ROOT / "peer.gguf"
    said, _, _ = build(checkpoint, engine, "--dry-run")
    ours, theirs, peaks = [], [], []
    for _ in range(options.rounds):
        theirs.append(quantise(peer, source, gguf))
        result, seconds, peak = build(checkpoint, engine)
        ours.append(seconds)
        peaks.append(peak)
    sizes = gguf.stat().st_size / 1e6, (engine / "rank0.weights").stat().st_size / 1e6
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(f"{options.layers} layers, {peer.version()}, {THREADS} threads, {options.rounds} rounds")
    print(f"llama.cpp quantise     {other:8.1f} s   {sizes[0]:8.1f} MB")
    print(f"spike-build, whole     {mine:8.1f} s   {sizes[1]:8.1f} MB   ratio {mine / other:.2f}")
    print(f"peak resident          {max(peaks):8.1f} MB")
    for name, key, truth in (
        ("--dry-run: memory", "peak_memory", max(peaks)),
        ("--dry-run: weights", "weight_bytes", float(str(result["weight_bytes"])) / 1e6),
    ):
        estimate = float(str(said[key])) / 1e6
        print(f"{name:22} {estimate:8.1f} MB   {estimate / truth:.3f} of the truth")
    if not options.keep:
        shutil.rmtree(ROOT)
        source.unlink()


if __name__ == "__main__":
    main()
