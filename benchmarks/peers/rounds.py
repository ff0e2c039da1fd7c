"""What is measured: runs, and the figures that each gives.

Workers stay loaded and take turns; only `start` begins fresh processes. Prompts come from held-out
text (pseudo-random ids without a tokenizer) and differ from round to round, so that no cache of
earlier prompts can answer.
"""

from __future__ import annotations

import os
import resource
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from compare_llama_cpp import cpu_times
from spikeinfer import kernels
from worker import Worker

CONTEXT = 2304  # most tokens of one sequence: the longest prompt and what follows
START_PROMPT, START_STEPS = 512, 32
TICKS = os.sysconf("SC_CLK_TCK")
Figures = dict[str, float]


@dataclass(frozen=True)
class Run:
    """One call of a worker.

    Attributes:
        prompts, length: how many, of how many tokens.
        decodes: whether tokens after the first are timed.
    """

    prompts: int
    length: int
    decodes: bool


RUNS = {
    "decode 32": Run(1, 32, True),
    "decode 1024": Run(1, 1024, True),
    "prefill 512": Run(1, 512, False),
    "prefill 2048": Run(1, 2048, False),
    "8 streams": Run(8, 32, True),
    "32 streams": Run(32, 32, True),
}
START = "start"


def prompts(ids: Sequence[int], run: Run, turn: int) -> list[list[int]]:
    """Stretches of `ids` that differ from turn to turn and from each other; the first id leads."""
    total = run.prompts * run.length
    shift = (1 + 61 * turn) % max(len(ids) - total, 1)
    body = ids[1 + shift :] if len(ids) - 1 - shift >= total else [*ids[1 + shift :], *ids[1:]]
    step = run.length - 1
    return [[ids[0], *body[i * step : (i + 1) * step]] for i in range(run.prompts)]


def figures(run: Run, steps: int, answer: Mapping[str, float]) -> Figures:
    """Rates and times of one answer."""
    if run.decodes:
        return {"tok/s": run.prompts * steps / answer["decode_seconds"]}
    seconds = answer["prefill_seconds"]
    return {"tok/s": run.length / seconds, "ms": 1e3 * seconds}


def generate(worker: Worker, run: Run, steps: int, ids: Sequence[int], turn: int) -> Figures:
    """One call."""
    steps = steps if run.decodes else 0
    command = {"do": "generate", "prompts": prompts(ids, run, turn), "steps": steps}
    return figures(run, steps, worker.call(command))


def start(
    command: Sequence[str], opening: dict[str, Any], ids: Sequence[int], log: Path
) -> Figures:
    """A fresh process: load, a first token, then a prompt and some tokens for the memory peak."""
    with Worker(command, log) as worker:
        answer = worker.call(opening)
        run = Run(1, START_PROMPT, True)
        worker.call({"do": "generate", "prompts": prompts(ids, run, 0), "steps": START_STEPS})
        return {
            "load s": answer["load_seconds"],
            "first token s": answer["first_token_seconds"],
            "peak MB": peak_bytes(worker.pid) / 1e6,
        }


def peak_bytes(pid: int) -> int:
    """The most resident memory that a process had, mapped files included."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/{pid}/status has no VmHWM")


def stream_rate(data: np.ndarray, threads: int) -> float:
    """GB/s of a plain read; the median of three."""
    rates = []
    for _ in range(3):
        begin = time.perf_counter()
        kernels.stream_read(data, threads)
        rates.append(data.nbytes / (time.perf_counter() - begin) / 1e9)
    return statistics.median(rates)


class ForeignLoad:
    """Share of the machine that went to other programs, the host's included, since it was made."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = list(pids)
        self._machine, self._own = cpu_times(), self.own_ticks()

    def own_ticks(self) -> float:
        """CPU time of this process, its ended children, and the workers that run."""
        total = 0.0
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
            usage = resource.getrusage(who)
            total += (usage.ru_utime + usage.ru_stime) * TICKS
        for pid in self._pids:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    def share(self) -> float:
        """0 on a machine of our own."""
        spent = [b - a for a, b in zip(self._machine, cpu_times(), strict=True)]
        busy = sum(spent) - spent[3] - spent[4]
        return max(0.0, busy - (self.own_ticks() - self._own)) / max(sum(spent), 1)
