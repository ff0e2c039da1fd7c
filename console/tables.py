"""Aligned text tables and human units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def size(count: float) -> str:
    """Bytes in decimal units with three digits: ``98.4 MB``."""
    for factor, name in _UNITS:
        if count >= 0.9995 * factor:  # so that three digits never round to 1000 of the unit below
            digits = 2 if count < 9.995 * factor else 1 if count < 99.95 * factor else 0
            text = f"{count / factor:.{digits}f}"
            return f"{text.rstrip('0').rstrip('.') if digits else text} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """``840 ms``, ``4.2 s``, ``3 min 20 s``, ``2 h 05 min``."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def amount(count: float, unit: str) -> str:
    """`count` of `unit`; bytes get their own units, small rates two digits."""
    if unit == "bytes":
        return size(count)
    return f"{count:.0f} {unit}".rstrip() if count >= 10 else f"{count:.2g} {unit}".rstrip()


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; one whose header starts with ``#`` is right-aligned."""
    cells = [[name.lstrip("#") for name in header], *([str(c) for c in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = []
    for line in cells:
        padded = [
            cell.rjust(width) if name.startswith("#") else cell.ljust(width)
            for cell, width, name in zip(line, widths, header, strict=True)
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def facts(rows: Iterable[tuple[str, object]]) -> str:
    """``name  value`` lines with the values aligned."""
    pairs = [(name, str(value)) for name, value in rows]
    width = max((len(name) for name, _ in pairs), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in pairs)


def section(title: str, body: str) -> str:
    """A titled block, or nothing where there is no body."""
    return f"{title}\n{body}" if body else ""


def sections(parts: Iterable[str]) -> str:
    """Blocks with an empty line between, empty ones left out."""
    return "\n\n".join(part for part in parts if part)
