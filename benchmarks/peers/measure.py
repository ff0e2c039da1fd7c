"""Rounds of all sides in turn, written one by one, until there are enough or time is up."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import accuracy
import numpy as np
from environment import CACHE
from record import QUIET, Record
from rounds import CONTEXT, RUNS, START, Figures, ForeignLoad, generate, start, stream_rate
from sides import Made
from worker import Worker

# Other programs' threads that still wait actively go to sleep in this time.
SETTLE = 0.3


@dataclass
class Bench:
    """One model on all sides.

    Attributes:
        record: the file.
        model: its name there.
        made: what each side runs.
        ids: tokens for prompts.
        threads, steps: of every side; decoded tokens of a run.
        deadline: `time.monotonic` after which no round begins.
    """

    record: Record
    model: str
    made: Mapping[str, Made]
    ids: Sequence[int]
    threads: int
    steps: int
    deadline: float
    stream: np.ndarray = field(default_factory=lambda: np.ones(256_000_000, np.uint8))

    def measure(self, runs: Sequence[str], rounds: int) -> None:
        """What is missing of `rounds` rounds of each run."""
        missing = {
            run: rounds - len(self.record.rounds(self.model, run, list(self.made))) for run in runs
        }
        if missing.get(START, 0) > 0:
            self.starts(missing[START])
        rest = [run for run in runs if run != START and missing[run] > 0]
        if rest and not self.late(0):
            with self.workers() as (workers, failed):
                for run in rest:
                    self.turns(run, missing[run], workers, failed)

    def late(self, seconds: float) -> bool:
        """Whether there is no time left for something that takes `seconds`."""
        return time.monotonic() + seconds > self.deadline

    def opening(self, made: Made) -> dict[str, object]:
        """The command that loads a model."""
        return {"do": "open", "model": str(made.path), "threads": self.threads, "context": CONTEXT}

    def log(self, side: str) -> Path:
        """Where a worker's error output goes."""
        return CACHE / "logs" / f"{side.replace(' ', '-')}-{self.model}.log"

    @contextmanager
    def workers(self) -> Iterator[tuple[dict[str, Worker], dict[str, str]]]:
        """A loaded worker for each side, and why the others aren't there."""
        workers: dict[str, Worker] = {}
        failed: dict[str, str] = {}
        try:
            for side, made in self.made.items():
                workers[side] = Worker(made.command, self.log(side))
                try:
                    workers[side].call(self.opening(made))
                except RuntimeError as error:
                    failed[side] = str(error)
                    workers.pop(side).close()
            yield workers, failed
        finally:
            for worker in workers.values():
                worker.close()

    def starts(self, rounds: int) -> None:
        """Rounds of fresh processes; the first one only fills the page cache."""
        taken = 0.0
        for turn in range(rounds + 1):
            if self.late(taken):
                return
            begin = time.monotonic()
            figures: dict[str, Figures] = {}
            failed: dict[str, str] = {}
            foreign = ForeignLoad([])
            for side, made in self.made.items():
                try:
                    log = self.log(side)
                    figures[side] = start(made.command, self.opening(made), self.ids, log)
                except RuntimeError as error:
                    failed[side] = str(error)
            taken = time.monotonic() - begin
            if turn:
                self.add(START, figures, failed, foreign.share())

    def turns(
        self, run: str, rounds: int, workers: Mapping[str, Worker], unable: Mapping[str, str]
    ) -> None:
        """Rounds of one run; the first one warms caches and threads up and does not count."""
        taken = 0.0
        done = len(self.record.model(self.model)["rounds"])
        for turn in range(rounds + 1):
            if self.late(taken):
                return
            begin = time.monotonic()
            figures: dict[str, Figures] = {}
            failed = dict(unable)
            foreign = ForeignLoad(worker.pid for worker in workers.values())
            for side in rotated(list(workers), turn):
                time.sleep(SETTLE)
                try:
                    figures[side] = generate(
                        workers[side], RUNS[run], self.steps, self.ids, done + turn
                    )
                except RuntimeError as error:
                    failed[side] = str(error)
            taken = time.monotonic() - begin
            if turn:
                self.add(run, figures, failed, foreign.share())

    def add(
        self, run: str, figures: dict[str, Figures], failed: dict[str, str], foreign: float
    ) -> None:
        """Write a round down."""
        found = {
            "run": run,
            "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "stream GB/s": stream_rate(self.stream, self.threads),
            "foreign": round(foreign, 3),
            "figures": figures,
            "failed": failed,
        }
        self.record.model(self.model)["rounds"].append(found)
        self.record.save()
        state = "" if foreign <= QUIET else f", does not count: others took {foreign:.0%}"
        print(f"{self.model}, {run}: {brief(figures)}{state}", flush=True)

    def fidelity(self, checkpoint: Path, windows: int | None) -> None:
        """Accuracy of each side that has none in the file; speed plays no part."""
        known = self.record.model(self.model)["fidelity"]
        with self.workers() as (workers, failed):
            scorers = {side: w.score for side, w in workers.items() if side not in known}
            for side in scorers:
                try:
                    scorers[side]([1, 2, 3], 0)
                except RuntimeError as error:
                    failed[side] = str(error)
            able = {side: scorer for side, scorer in scorers.items() if side not in failed}
            text = accuracy.HELD_OUT.read_text(encoding="utf-8")
            if able:
                source, found = accuracy.measure(checkpoint, able, text, windows)
                known.update({side: vars(figures) for side, figures in found.items()})
                known["source"] = {"perplexity": source}
        for side, why in failed.items():
            known.setdefault(side, {"why": why})
        self.record.save()


def rotated(names: list[str], turn: int) -> list[str]:
    """Each round begins with another side: none always runs after the same one's heat."""
    turn %= max(len(names), 1)
    return names[turn:] + names[:turn]


def brief(figures: Mapping[str, Figures]) -> str:
    """The first figure of each side."""
    return ", ".join(f"{side} {next(iter(f.values())):.4g}" for side, f in figures.items())
