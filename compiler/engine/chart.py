"""The solver's points as a chart in report.html: divergence over size, plain SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from .pareto import Pareto, ParetoPoint

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 44
FLOOR = 1e-6
"""Nats; a smaller divergence is drawn here."""


def pareto_chart(pareto: Pareto) -> str:
    """An SVG element: bytes to the right, KL upwards in powers of ten."""
    points = [p for p in pareto.points if _drawn(p) > 0]
    if not points:
        return ""
    figures = [_drawn(p) for p in points] + ([pareto.max_kl] if pareto.max_kl is not None else [])
    low = math.floor(math.log10(max(FLOOR, min(figures))))
    high = max(low + 1, math.ceil(math.log10(max(FLOOR, *figures))))
    sizes = [p.bytes for p in points]
    first, last = min(sizes), max(max(sizes), min(sizes) + 1)

    def x(size: float) -> float:
        return LEFT + (size - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(kl: float) -> float:
        share = (math.log10(max(FLOOR, kl)) - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)

    parts = [
        *_grid(y, low, high),
        *_sizes(x, first, last),
        *([_limit(y(pareto.max_kl))] if pareto.max_kl is not None else []),
        _line([(x(p.bytes), y(_drawn(p))) for p in points if p.measured_kl is None]),
        *(_dot(x(p.bytes), y(_drawn(p)), p) for p in points if p.measured_kl is not None),
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" font-size="12" fill="currentColor" '
        'aria-label="mean KL over size">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _drawn(point: ParetoPoint) -> float:
    """Measured where it was built, predicted elsewhere."""
    return point.predicted_kl if point.measured_kl is None else point.measured_kl


def _grid(y: Callable[[float], float], low: int, high: int) -> Iterator[str]:
    for power in range(low, high + 1):
        at = y(10.0**power)
        yield (
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
            'stroke="currentColor" stroke-opacity=".15"/>'
        )
        yield f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">1e{power}</text>'
    yield f'<text x="4" y="{TOP - 4}">mean KL (nats)</text>'


def _sizes(x: Callable[[float], float], first: float, last: float) -> Iterator[str]:
    for step in range(5):
        size = first + (last - first) * step / 4
        yield (
            f'<text x="{x(size):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">'
            f"{size / 1e6:.4g} MB</text>"
        )
    yield (
        f'<text x="{LEFT}" y="{HEIGHT - 6}">line: predicted; dots: built and measured; '
        "large dot: this engine</text>"
    )


def _limit(at: float) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" '
        'stroke="#b00020" stroke-dasharray="6 4"/>'
    )


def _line(points: list[tuple[float, float]]) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="currentColor" stroke-width="1.5"/>'


def _dot(x: float, y: float, point: ParetoPoint) -> str:
    radius = 6 if point.chosen else 3.5
    label = f"{point.bytes / 1e6:.2f} MB, {point.measured_kl:.3g} nats"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}"><title>{label}</title></circle>'
