"""`spike calibrate`: importances of a checkpoint's matrices, to a file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..compiler.assembly.calibration_text import text_of
from ..errors import SpikeError
from .options import require_build_extra, require_place, unusable_output
from .progress import progress_for
from .tables import duration, facts
from .terminal import Terminal

if TYPE_CHECKING:
    from ..compiler.assembly.calibrate import Importance


def calibrate(
    checkpoint: Path,
    texts: Sequence[Path],
    output: Path,
    sizes: tuple[int, int],
    threads: int,
    terminal: Terminal,
) -> None:
    """Collect importances and write them.

    Args:
        sizes: tokens to read, and tokens of a window.

    Raises: SPK816 for a text, SPK817 for an output that would be lost, and what reading and tracing
    raise.
    """
    require_build_extra()
    require_place(output)
    for text in texts:
        text_of(text)
    begun = time.monotonic()
    with progress_for(terminal) as progress:
        progress.phase("start")
        from ..compiler.assembly.calibrate import calibrate as run
        from ..compiler.assembly.calibrate import write_imatrix

        _require_free(output)
        found = run(checkpoint, texts, *sizes, threads, progress)
        write_imatrix(output, found)
    seconds = time.monotonic() - begun
    if terminal.json:
        terminal.event("result", **_data(output, found, seconds))
    else:
        print(_text(output, found, seconds), flush=True)


def _require_free(output: Path) -> None:
    """Raises SPK817 rather than replace a file that holds something else, a model perhaps."""
    from ..compiler.assembly.calibrate import read_imatrix

    if not output.exists():
        return
    try:
        read_imatrix(output)
    except SpikeError as error:
        raise unusable_output(f"{output} exists and holds no importances.") from error


def _text(output: Path, found: Importance, seconds: float) -> str:
    tokens = found.chunks * found.chunk_tokens
    rows = [
        ("File", str(output)),
        ("Read", f"{tokens} tokens of {', '.join(found.datasets)}, in {duration(seconds)}"),
        ("Windows", f"{found.chunks} of {found.chunk_tokens} tokens"),
        ("Tensors", str(len(found.entries))),
    ]
    if unseen := found.unseen:
        count = sum(map(len, unseen.values()))
        rows.append(("Experts", f"{count} without a token, in {len(unseen)} tensors: give more "
                     "text; until then they count as the mean of the others"))  # fmt: skip
    rows.append(("Use it", f"spike-build --model ... --quantization q4_k_m --imatrix {output}"))
    return facts(rows)


def _data(output: Path, found: Importance, seconds: float) -> dict[str, object]:
    return {
        "file": str(output),
        "datasets": list(found.datasets),
        "windows": found.chunks,
        "window_tokens": found.chunk_tokens,
        "tensors": len(found.entries),
        "experts_without_tokens": found.unseen,
        "seconds": round(seconds, 3),
    }
