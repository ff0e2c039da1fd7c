"""`spike export`: an engine's model in another program's format."""

from __future__ import annotations

from pathlib import Path

from .options import require_build_extra, require_place, unusable_output, usage
from .tables import facts, size
from .terminal import Terminal

FORMATS = ("gguf",)


def export(engine: Path, format: str, output: Path, terminal: Terminal) -> None:
    """Write an engine's model to a file.

    Raises SPK807 for a format we don't write, SPK817 for an output that would be lost, SPK590-594
    from the export, SPK804 without the build extra (names of tensors come from there).
    """
    if format not in FORMATS:
        raise usage(f"--format is {format!r}.", f"Give one of {', '.join(FORMATS)}.")
    require_build_extra()
    from ..compiler.engine import EngineDirectory
    from ..compiler.gguf.export import export_gguf

    _require_free(output)
    opened = EngineDirectory.open(engine)
    counts = export_gguf(opened, output)
    written = output.stat().st_size
    types = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    rows: list[tuple[str, object]] = [
        ("File", f"{output}, {size(written)}"),
        ("Tensors", types),
        ("Try it", f'llama-cli -m {output} -p "The capital of France is"')
        if opened.file("tokenizer.json")
        else ("Tokenizer", "none, as in the engine: llama.cpp takes token ids from its API only"),
    ]
    data = {"file": str(output), "bytes": written, "tensors": dict(counts)}
    terminal.answer(facts(rows), data)


def _require_free(output: Path) -> None:
    """Raises SPK817 rather than replace a file that is no GGUF file."""
    from ..compiler.gguf.reader import MAGIC

    require_place(output)
    if not output.exists():
        return
    if output.is_file():
        with output.open("rb") as file:
            if file.read(len(MAGIC)) in (MAGIC, b""):
                return
    raise unusable_output(f"{output} exists and is no GGUF file.")
