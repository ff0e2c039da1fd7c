"""`spike explain CODE`: what docs/errors.md says about an error code.

That page is the one source: people read it, this reads its table rows, a test holds it against the
codes in the source.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ExitCode, SpikeError
from .tables import sections, table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "errors.md"
_ROW = re.compile(r"^\| (SPK\d{3}) \| (.+?) \| (.+?) \| (.+?) \| (\d+) \|$", re.MULTILINE)


@dataclass(frozen=True)
class Explanation:
    """One row of the page: `exit_code` is the process's."""

    code: str
    title: str
    cause: str
    remedy: str
    exit_code: int


def read(page: Path = PAGE) -> dict[str, Explanation]:
    """Every explanation by code."""
    text = page.read_text(encoding="utf-8")
    return {
        row[0]: Explanation(row[0], row[1], row[2], row[3], int(row[4]))
        for row in _ROW.findall(text)
    }


def explain(code: str) -> tuple[str, Explanation]:
    """(text, data) of a code as users type it: ``SPK104``, ``spk104`` or ``104``.

    Raises:
        SpikeError: SPK805 with the nearest codes.
    """
    known = read()
    wanted = code.strip().upper()
    wanted = wanted if wanted.startswith("SPK") else f"SPK{wanted}"
    if wanted not in known:
        near = difflib.get_close_matches(wanted, known, 3)
        raise SpikeError(
            "SPK805",
            "command line",
            f"there is no error code {code!r}.",
            f"Near: {', '.join(near)}." if near else "`spike explain` lists all codes.",
            ExitCode.USAGE,
        )
    found = known[wanted]
    text = [f"{found.code}: {found.title}", found.cause, f"What to do: {found.remedy}",
            f"Exit code {found.exit_code}."]  # fmt: skip
    return sections(part.replace("`", "") for part in text), found


def overview() -> tuple[str, list[Explanation]]:
    """(text, data) of all codes."""
    known = list(read().values())
    return table(("Code", "Meaning"), [(e.code, e.title.replace("`", "")) for e in known]), known
