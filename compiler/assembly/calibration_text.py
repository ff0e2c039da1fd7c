"""Text to calibrate on: a file of the user's, or ours. Needs no torch, so that a command can look
at the file before it starts."""

from __future__ import annotations

from pathlib import Path

from ...errors import SpikeError

LONGEST_TEXT = 1 << 16
"""Characters read: far more than the windows take, and quick to tokenize."""
OWN_TEXT = Path(__file__).parents[1] / "analysis" / "calibration.txt"


def text_of(path: Path | None, longest: int = LONGEST_TEXT) -> str:
    """The first `longest` characters of the given file, or of the text that ships.

    That is prose, code, tables, many languages. Raises SPK816 for a file that can't be read or
    has no text.
    """
    try:
        with (path or OWN_TEXT).open(encoding="utf-8") as file:
            text = file.read(longest)
    except OSError as error:
        raise _unusable(path or OWN_TEXT, error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise _unusable(path or OWN_TEXT, f"it isn't UTF-8, a byte is 0x{byte:02x}") from error
    if not text.strip():
        raise _unusable(path or OWN_TEXT, "it holds no text")
    return text


def _unusable(path: Path, why: str) -> SpikeError:
    return SpikeError(
        "SPK816",
        "calibration",
        f"{path} can't be used as calibration text: {why}.",
        "Give a UTF-8 text file, or none: then a text of ours is read.",
    )
