"""A build's progress: bars on a terminal, plain lines elsewhere, JSON events with `--json`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..compiler.assembly.progress import Progress
from .tables import amount, duration
from .terminal import LogLevel, Terminal

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

LINE_EVERY = 5.0
EVENT_EVERY = 0.5
"""Seconds between two reports of one phase."""


class TimedProgress(Progress):
    """Knows what the current phase has done, how fast, and how long it will take.

    Attributes:
        name, total, unit: of the current phase; `name` is empty before the first.
        done: units of work so far.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.name, self.total, self.unit, self.done = "", 0, "", 0
        self.started = self.reported = clock()

    def phase(self, name: str, total: int = 0, unit: str = "") -> None:
        """A phase begins, which ends the one before; told again, it only learns its total."""
        if name == self.name:
            self.total, self.unit = total, unit
            return
        self.finish()
        self.name, self.total, self.unit, self.done = name, total, unit, 0
        self.started = self.reported = self.clock()
        self.begun()

    def advance(self, amount: int) -> None:
        """Count work; shown not more often than a person or a log can bear."""
        self.done += amount
        self.moved()

    @property
    def seconds(self) -> float:
        """Since the phase began."""
        return max(self.clock() - self.started, 1e-9)

    @property
    def rate(self) -> float:
        """Units per second; 0 before the first."""
        return self.done / self.seconds

    @property
    def eta(self) -> float | None:
        """Seconds to the end at this rate; None while unknown."""
        return (self.total - self.done) / self.rate if self.total and self.done else None

    def status(self) -> str:
        """``44 MB of 98 MB, 61 MB/s, 0.9 s left``."""
        if not self.total:
            return ""
        text = f"{amount(self.done, self.unit)} of {amount(self.total, self.unit)}"
        if self.done:
            text += f", {amount(self.rate, self.unit)}/s"
        if self.eta is not None and self.done < self.total:
            text += f", {duration(self.eta)} left"
        return text

    def due(self, interval: float) -> bool:
        """Whether the last report is `interval` seconds old; if so, this is the next one."""
        if self.clock() - self.reported < interval:
            return False
        self.reported = self.clock()
        return True

    def finish(self) -> None:
        """End the current phase."""
        if self.name:
            self.ended()
            self.name = ""

    def begun(self) -> None:
        """A phase began."""

    def moved(self) -> None:
        """Work was done."""

    def ended(self) -> None:
        """The phase is over."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()


class LineProgress(TimedProgress):
    """One line when a phase ends, and one now and then while it lasts."""

    def __init__(
        self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock)
        self.write = write

    def moved(self) -> None:
        if self.done != self.total and self.due(LINE_EVERY):
            self.write(f"{self.name}: {self.status()}")

    def ended(self) -> None:
        work = f"{amount(self.total, self.unit)}, " if self.total else ""
        self.write(f"{self.name}: {work}{duration(self.seconds)}")

    def note(self, message: str) -> None:
        self.write(f"note: {message}")


class EventProgress(TimedProgress):
    """JSON events: phase, progress, phase_end, note."""

    def __init__(self, terminal: Terminal, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self.terminal = terminal

    def begun(self) -> None:
        self.terminal.event("phase", name=self.name, total=self.total, unit=self.unit)

    def moved(self) -> None:
        if self.due(EVENT_EVERY):
            self.terminal.event(
                "progress",
                name=self.name,
                done=self.done,
                total=self.total,
                unit=self.unit,
                rate=round(self.rate, 3),
                eta_seconds=None if self.eta is None else round(self.eta, 3),
            )

    def ended(self) -> None:
        self.terminal.event("phase_end", name=self.name, seconds=round(self.seconds, 3))

    def note(self, message: str) -> None:
        self.terminal.event("note", message=message)


class BarProgress(TimedProgress):
    """One bar per phase on a terminal, with rate and time left."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, SpinnerColumn, TextColumn
        from rich.progress import Progress as Bars

        super().__init__()
        self.bars: Bars = Bars(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description:<12}"),
            BarColumn(30),
            TextColumn("{task.fields[status]}"),
            console=Console(stderr=True),
        )
        self.task: TaskID | None = None

    def begun(self) -> None:
        self.task = self.bars.add_task(self.name, total=self.total or None, status="")

    def moved(self) -> None:
        if self.task is not None:
            self.bars.update(
                self.task, completed=self.done, total=self.total or None, status=self.status()
            )

    def ended(self) -> None:
        if self.task is not None:
            whole = self.total or 1
            work = f"{amount(self.total, self.unit)}, " if self.total else ""
            done = f"{work}{duration(self.seconds)}"
            self.bars.update(self.task, completed=whole, total=whole, status=done)

    def note(self, message: str) -> None:
        self.bars.console.print(f"note: {message}", markup=False, highlight=False)

    def __enter__(self) -> Self:
        self.bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        self.bars.stop()


def progress_for(terminal: Terminal) -> TimedProgress:
    """The form that suits where the output goes."""
    if terminal.json:
        return EventProgress(terminal)
    if terminal.level in (LogLevel.ERROR, LogLevel.WARNING):
        return TimedProgress()
    return BarProgress() if sys.stderr.isatty() else LineProgress(terminal.say)
