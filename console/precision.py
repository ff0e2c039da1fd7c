"""`spike inspect precision` and `overflow`: certificates grouped for a person; where f16 breaks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiler.engine import EngineDirectory, PrecisionEntry
from .options import require_build_extra, usage
from .progress import progress_for
from .tables import section, sections, table
from .terminal import Terminal

if TYPE_CHECKING:
    from ..compiler.assembly.overflow import OverflowReport

HALVES = ("float16", "bfloat16")
NODES_SHOWN = 12
_LAYER = re.compile(r"\.(\d+)(?=\.|$)")


def precision_text(engine: EngineDirectory) -> str:
    """Values of all layers with the same place and decision in one row, with their extremes."""
    entries = engine.config.spike.precision
    values = [e for e in entries if e.op]
    rest = [(e.scope, e.value, e.dtype, e.reason) for e in entries if not e.op]
    header = ("Where", "Layers", "Op", "#Values", "#Observed", "#Bound", "#Error", "As", "Why")
    return sections(
        [
            table(("Where", "Value", "Precision", "Why"), rest),
            section(
                "Values (error: units of rounding at the end of the subpath; --json lists each)",
                table(header, map(_row, _groups(values))) if values else "",
            ),
            _tally(values),
        ]
    )


def _groups(values: Sequence[PrecisionEntry]) -> Iterable[list[PrecisionEntry]]:
    """By place in a layer, op and decision, in the graph's order."""
    groups: dict[tuple[str, str, str], list[PrecisionEntry]] = {}
    for entry in values:
        place = _LAYER.sub(".*", entry.scope)
        groups.setdefault((place, entry.op, entry.dtype), []).append(entry)
    return groups.values()


def _row(group: list[PrecisionEntry]) -> tuple[object, ...]:
    worst = max(group, key=lambda e: (_size(e.observed), e.units or 0.0))
    seen = [e.observed for e in group if e.observed]
    bounds, units = ([getattr(e, n) for e in group] for n in ("bound", "units"))
    ends = (min(low for low, _ in seen), max(high for _, high in seen)) if seen else ()
    return (
        _LAYER.sub(".*", worst.scope) or "the model",
        _ranges({int(n) for e in group for n in _LAYER.findall(e.scope)[:1]}),
        worst.op,
        len(group),
        " .. ".join(f"{end:.4g}" for end in ends),
        _largest(bounds),
        _largest(units),
        worst.dtype,
        worst.reason,
    )


def _size(observed: Sequence[float]) -> float:
    return max(map(abs, observed), default=0.0)


def _largest(figures: Sequence[float | None]) -> str:
    known = [f for f in figures if f is not None]
    return f"{max(known):.4g}" if len(known) == len(figures) else "none"


def _ranges(numbers: set[int]) -> str:
    """{0, 1, 2, 5} as ``0-2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def _tally(values: Sequence[PrecisionEntry]) -> str:
    if not values:
        return ""
    low = sum(e.dtype != "f32" for e in values)
    dtype = next((e.dtype for e in values if e.dtype != "f32"), "half precision")
    return f"{low} of {len(values)} values are {dtype}, {len(values) - low} stay f32."


def overflow(checkpoint: Path, dtype: str, calibration: Path | None, terminal: Terminal) -> None:
    """Name the first node of a checkpoint's model that exceeds a format.

    Raises SPK807 for a dtype that isn't half precision, and what reading and tracing raise.
    """
    if dtype not in HALVES:
        raise usage(f"--dtype is {dtype!r}.", f"Give one of {', '.join(HALVES)}.")
    require_build_extra()
    with progress_for(terminal) as progress:
        progress.phase("start")
        from ..compiler.assembly.overflow import find_overflow

        report = find_overflow(checkpoint, dtype, calibration, progress)
    data = {"checkpoint": str(checkpoint), "dtype": dtype, **dataclasses.asdict(report)}
    if terminal.json:
        terminal.event("result", **data)
    else:
        print(overflow_text(report, dtype), flush=True)


def overflow_text(report: OverflowReport, dtype: str) -> str:
    """The culprit, what becomes of it, and the other nodes."""
    if not report.found:
        return f"None of {report.nodes} values exceeds {dtype} on the calibration text."
    first = report.found[0]
    if report.reaches_output:
        fate = "Computed in it, the model's output is not finite."
    else:
        places = ", ".join(f"{op} in {scope}" for op, scope in report.absorbed[:3])
        fate = f"Computed in it, the output stays finite and hides this: absorbed by {places}."
    kind = "in float32 already: NaN or infinite" if first.broken else f"up to {first.largest:.5g}"
    rows = [
        (o.scope, o.value, o.op, f"{o.largest:.5g}", f"{o.elements} of {o.total}")
        for o in report.found[:NODES_SHOWN]
    ]
    more = len(report.found) - len(rows)
    return sections(
        [
            f"First overflow of {dtype}: %{first.value} = {first.op}(...) in "
            f"{first.scope or 'the model'}, {kind}.\n{fate}",
            table(("Where", "Value", "Op", "#Largest", "#Elements"), rows),
            f"and {more} more (--json lists all)" if more > 0 else "",
        ]
    )
