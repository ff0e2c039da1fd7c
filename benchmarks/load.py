"""Time from opening an engine to its first token, each time in a fresh process; its memory.

    .venv/bin/python benchmarks/load.py .cache/engines/smollm2 [--runs 15]

The engine's files are in the page cache after the first run, which does not count. Prints the
median and the range in milliseconds, and the private memory of a process while another one has the
same engine open: weights are mapped and shared, so none of theirs may be private. Last comes the
peak of resident memory after a prompt of 512 tokens (or what the engine holds) and 64 tokens more,
less the weights and the cache of those tokens: what serving needs besides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from spikeinfer.compiler.engine.cache import token_bytes
from spikeinfer.compiler.engine.directory import EngineDirectory

WORKER = """
import json, sys, time
begin = time.perf_counter()
from spikeinfer import SpikeEngine
imported = time.perf_counter()
engine = SpikeEngine(sys.argv[1])
loaded = time.perf_counter()
prompt = "The sky is" if engine.has_tokenizer else [1, 2, 3]
engine.complete(prompt, max_tokens=1)
first = time.perf_counter()
private, of_weights, mapping = 0, 0, ""
for line in open("/proc/self/smaps"):
    if "-" in line.split()[0]:
        mapping = line
    elif line.startswith("Private_"):
        size = int(line.split()[1])
        private += size
        of_weights += size if "rank0.weights" in mapping else 0
print(json.dumps({
    "import": 1e3 * (imported - begin),
    "load": 1e3 * (loaded - imported),
    "load to first token": 1e3 * (first - imported),
    "private MB": private / 1e3,
    "private MB of weights": of_weights / 1e3,
}), flush=True)
if sys.stdin.readline().startswith("serve"):
    size = min(512, engine.max_seq_len - 65)
    engine.complete([1 + i % 200 for i in range(size)], max_tokens=64, ignore_eos=True)
    peak = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM"))
    print(json.dumps({"peak MB": peak * 1024 / 1e6, "tokens": size + 63}), flush=True)
sys.stdin.read()
"""


def measure(engine: Path, serve: bool = False) -> dict[str, float]:
    """One fresh process."""
    with start(engine) as process:
        return finish(process, serve)


def start(engine: Path) -> subprocess.Popen[str]:
    """A process that opens the engine, reports, and keeps it open until its input ends."""
    command = [sys.executable, "-P", "-c", WORKER, str(engine)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str], serve: bool = False) -> dict[str, float]:
    """What the process measured, also after serving a request; then lets it end."""
    assert process.stdin is not None
    assert process.stdout is not None
    figures: dict[str, float] = json.loads(process.stdout.readline())
    if serve:
        process.stdin.write("serve\n")
        process.stdin.flush()
        figures |= json.loads(process.stdout.readline())
    process.stdin.close()
    process.wait()
    return figures


def measure_beside_another(engine: Path) -> dict[str, float]:
    """One fresh process while another one has the engine open."""
    with start(engine) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdout.readline()
        figures = measure(engine)
        other.stdin.close()
    return figures


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    measure(options.engine)
    runs = [measure(options.engine) for _ in range(options.runs)]
    for name in ("import", "load", "load to first token"):
        values = sorted(run[name] for run in runs)
        span = f"({values[0]:.1f} - {values[-1]:.1f})"
        print(f"{name:22} {statistics.median(values):7.1f} ms  {span}")
    weights = (options.engine / "rank0.weights").stat().st_size / 1e6
    second = measure_beside_another(options.engine)
    print(f"second process         {second['private MB']:7.1f} MB private")
    print(f"of the weights' {weights:.1f} MB {second['private MB of weights']:5.1f} MB private")
    served = measure(options.engine, serve=True)
    cache = served["tokens"] * token_bytes(EngineDirectory.open(options.engine).config) / 1e6
    rest = served["peak MB"] - weights - cache
    print(
        f"peak of a serving one  {served['peak MB']:7.1f} MB: weights {weights:.1f}, cache "
        f"{cache:.1f}, the rest {rest:.1f}"
    )


if __name__ == "__main__":
    main()
