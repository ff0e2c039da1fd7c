"""Runs SpikeInfer; commands as in `worker.py`, the same as those of `llama_cpp_worker.py`.

open      model, threads, context        -> seconds to load, seconds to the first token
score     tokens, first                  -> shape, then raw float32 logits
decode    tokens, steps                  -> seconds of prefill and of `steps` further tokens
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
from spikeinfer import SpikeEngine
from spikeinfer.runtime import SchedulingPolicy


def open_engine(command: dict[str, Any]) -> tuple[SpikeEngine, dict[str, Any]]:
    """Load an engine directory and produce one token."""
    start = time.perf_counter()
    plain = SchedulingPolicy(prefix_cache=False)  # a prompt is measured again and again
    engine = SpikeEngine(command["model"], threads=command["threads"], scheduling=plain)
    loaded = time.perf_counter()
    engine.complete([1], max_tokens=1, ignore_eos=True)
    return engine, {
        "load_seconds": loaded - start,
        "first_token_seconds": time.perf_counter() - start,
    }


def decode(engine: SpikeEngine, command: dict[str, Any]) -> dict[str, Any]:
    """Greedy; decoding is what comes after the first token."""
    steps = command["steps"]
    completion = engine.complete(command["tokens"], max_tokens=steps + 1, ignore_eos=True)
    if len(completion.token_ids) != steps + 1:
        raise ValueError(f"{len(completion.token_ids)} tokens came, not {steps + 1}")
    timings = completion.timings
    return {"prefill_seconds": timings.prefill, "decode_seconds": timings.decode}


def score(engine: SpikeEngine, command: dict[str, Any], out: int) -> None:
    """Write the shape, then the logits of the wanted rows."""
    rows = np.ascontiguousarray(engine.score(command["tokens"])[command["first"] :])
    os.write(out, json.dumps({"shape": list(rows.shape)}).encode() + b"\n")
    with os.fdopen(os.dup(out), "wb") as pipe:
        pipe.write(rows.tobytes())


def main() -> None:
    """Serve commands until the input ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    engine: SpikeEngine | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "open":
                engine, answer = open_engine(command)
            elif command["do"] == "decode" and engine:
                answer = decode(engine, command)
            elif command["do"] == "score" and engine:
                score(engine, command, out)
                continue
            else:
                answer = {"error": f"{command['do']} is unknown or comes before open"}
        except Exception as error:  # whatever it was, the other side must hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
        os.write(out, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main()
