"""A JSON object from a checkpoint's file, or an error that says what is wrong with the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...errors import SpikeError
from .safetensors_file import is_lfs_pointer, lfs_pointer_error, unreadable


def read_json_object(path: Path, code: str) -> dict[str, Any]:
    """Parse `path` as one JSON object.

    Raises: `code` if it isn't one; SPK107 for a git-LFS pointer; SPK126 if it can't be read.
    """
    if path.is_fifo():  # reading a named pipe would block for ever
        raise _invalid(path, code, "is a named pipe, not a file")
    try:
        if is_lfs_pointer(path):
            raise lfs_pointer_error(path)
        value = json.loads(path.read_bytes().decode())
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise _invalid(path, code, f"isn't valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise _invalid(path, code, f"holds a JSON {type(value).__name__}, not an object")
    return value


def _invalid(path: Path, code: str, what: str) -> SpikeError:
    return SpikeError(
        code,
        "checkpoint",
        f"{path.name} in {path.parent} {what}.",
        "Download the file again, or correct it.",
    )
