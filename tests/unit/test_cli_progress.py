"""Progress of a build: rates and time left from a clock, as lines, events and bars."""

from __future__ import annotations

import json

import pytest
from spikeinfer.console.progress import (
    BarProgress,
    EventProgress,
    LineProgress,
    TimedProgress,
    progress_for,
)
from spikeinfer.console.tables import amount, duration, facts, size, table
from spikeinfer.console.terminal import LogLevel, Terminal


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_rate_and_time_left() -> None:
    clock = Clock()
    progress = TimedProgress(clock)
    progress.phase("weights", 100_000_000, "bytes")
    assert progress.eta is None
    clock.now += 2
    progress.advance(20_000_000)
    assert (progress.rate, progress.eta) == (10_000_000, 8.0)
    assert progress.status() == "20 MB of 100 MB, 10 MB/s, 8.0 s left"


def test_lines_are_few() -> None:
    clock, lines = Clock(), list[str]()
    with LineProgress(lines.append, clock) as progress:
        progress.phase("weights", 60, "tensors")
        for _ in range(60):
            clock.now += 0.125
            progress.advance(1)
        progress.note("q4_k does not fit 3 tensors")
        progress.phase("publish")
        clock.now += 0.5
    assert lines == [
        "weights: 40 tensors of 60 tensors, 8 tensors/s, 2.5 s left",
        "note: q4_k does not fit 3 tensors",
        "weights: 60 tensors, 7.5 s",
        "publish: 500 ms",
    ]


def test_a_note_after_a_phase_comes_after_its_line() -> None:
    clock, lines = Clock(), list[str]()
    with LineProgress(lines.append, clock) as progress:
        progress.phase("golden gate")
        clock.now += 1
        progress.finish()
        progress.note("it measured 0.02 nats")
        progress.phase("passes")
    assert lines == ["golden gate: 1.0 s", "note: it measured 0.02 nats", "passes: 0 ms"]


def test_a_phase_that_learns_its_total_goes_on() -> None:
    clock, lines = Clock(), list[str]()
    with LineProgress(lines.append, clock) as progress:
        progress.phase("golden gate")
        clock.now += 1
        progress.phase("golden gate", 4, "sequences")
        progress.advance(4)
    assert lines == ["golden gate: 4 sequences, 1.0 s"]


def test_an_error_does_not_claim_the_phase_is_done() -> None:
    lines: list[str] = []
    progress = LineProgress(lines.append, Clock())
    progress.phase("weights", 2, "tensors")
    progress.__exit__(ValueError, ValueError(), None)
    assert lines == []


def test_events(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with EventProgress(Terminal(json=True), clock) as progress:
        progress.phase("weights", 10, "tensors")
        clock.now += 2
        progress.advance(5)
        progress.note("a note")
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert events == [
        {"event": "phase", "name": "weights", "total": 10, "unit": "tensors"},
        {"event": "progress", "name": "weights", "done": 5, "total": 10, "unit": "tensors",
         "rate": 2.5, "eta_seconds": 2.0},
        {"event": "note", "message": "a note"},
        {"event": "phase_end", "name": "weights", "seconds": 2.0},
    ]  # fmt: skip


def test_bars_end_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with BarProgress() as progress:
        progress.phase("weights", 3000, "bytes")
        progress.advance(1500)
        progress.note("[not markup]")
        progress.phase("publish")
    tasks = progress.bars.tasks
    assert [(t.description, t.finished) for t in tasks] == [("weights", True), ("publish", True)]
    assert "[not markup]" in capsys.readouterr().err


def test_the_form_follows_the_output() -> None:
    assert isinstance(progress_for(Terminal(json=True)), EventProgress)
    assert isinstance(progress_for(Terminal()), LineProgress)  # pytest's stderr is no terminal
    assert type(progress_for(Terminal(level=LogLevel.ERROR))) is TimedProgress


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (98_400_000, "98.4 MB"), (999_999, "1 MB"),
     (4_920_000_000, "4.92 GB"), (350e9, "350 GB"), (2.5e12, "2.5 TB")],
)  # fmt: skip
def test_sizes(count: float, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0412, "41 ms"), (4.24, "4.2 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_tables_align() -> None:
    assert amount(3, "passes") == "3 passes"
    assert facts([("a", 1), ("long", "x")]) == "a     1\nlong  x"
    assert table(("Name", "#MB"), [("q", 1.5), ("norms", 100)]).splitlines() == [
        "Name    MB",
        "-----  ---",
        "q      1.5",
        "norms  100",
    ]
