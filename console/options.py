"""Flags and recipe -> BuildRequest: what was said, by whom, and what is not in this version."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ..compiler.assembly.request import BuildRequest
from ..errors import ExitCode, SpikeError
from .recipes import load

BUILD_PACKAGES = ("torch", "transformers", "onnx", "safetensors", "gguf")
GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def request_from(flags: Mapping[str, object], recipe: str | None) -> BuildRequest:
    """The build that `flags` (None = not given) ask for, over a recipe, over the defaults.

    Raises:
        SpikeError: SPK801 a value out of range, SPK802 not in this version, SPK807 no output,
            SPK81x the recipe, SPK541 or SPK542 the golden set.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if given.get("profiling_verbosity", "none") != "none":
        remedy = "Leave it out: an engine of this version carries no layer timings."
        raise later(f"--profiling-verbosity {given['profiling_verbosity']}", remedy)
    options = dict(load(recipe).options) if recipe else {}
    options |= {f.name: given[f.name] for f in fields(BuildRequest) if f.name in given}
    if options.get("kv_cache_type") == "disabled":
        raise later("--kv-cache-type disabled", "Use paged (streaming) or continuous.")
    if not options.get("output_dir"):
        if not options.get("dry_run"):
            raise usage("--output-dir is missing.", "Say where the engine goes: --output-dir DIR.")
        options["output_dir"] = Path("engine")
    if "golden" in options:
        options["golden"] = golden_set(str(options["golden"]))
    return BuildRequest(**options)  # type: ignore[arg-type]


def golden_set(value: str) -> str:
    """``auto``, ``off``, or the path of a readable set, given by file or by a shipped name.

    It is read here: a build must not find out at its end that there is nothing to check with.
    """
    if value in ("auto", "off"):
        return value
    from ..compiler.golden import GoldenSet

    own = GOLDEN / f"{value}.yaml"
    path = own if not Path(value).exists() and own.is_file() else Path(value)
    GoldenSet.load(path)
    return str(path)


def view_and_path(words: Sequence[str], views: Sequence[str]) -> tuple[str, Path]:
    """``[VIEW] PATH`` or ``PATH VIEW``; the view is the first one if none is given.

    Raises SPK807 for an unknown view, with the nearest one, and for too many words.
    """
    if len(words) == 1:
        return views[0], Path(words[0])
    first, second = (words[0] in views), (words[1] in views)
    if len(words) > 2 or not (first or second):
        near = [v for w in words for v in difflib.get_close_matches(w, views, 1)]
        hint = f"Did you mean {near[0]}? " if near else ""
        raise usage(
            f"{' '.join(words)!r} is not a view and a path.",
            f"{hint}Give one of {', '.join(views)}, and a path.",
        )
    view, path = (words[0], words[1]) if first else (words[1], words[0])
    return view, Path(path)


def require_build_extra() -> None:
    """Raises SpikeError SPK804 naming the packages that building needs and that are missing."""
    missing = [name for name in BUILD_PACKAGES if installed(name) is None]
    if missing:
        raise SpikeError(
            "SPK804",
            "command line",
            f"this command needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'}"
            " not installed.",
            "pip install 'spikeinfer[build]'",
            ExitCode.UNSUPPORTED,
        )


def installed(package: str) -> str | None:
    """Version of an installed package, None without it (importing it may be slow, or a folder)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def later(what: str, remedy: str) -> SpikeError:
    """SPK802: known, and not in this version."""
    return SpikeError(
        "SPK802", "command line", f"{what} is not in this version.", remedy, ExitCode.UNSUPPORTED
    )


def usage(what: str, remedy: str) -> SpikeError:
    """SPK807: arguments that do not go together."""
    return SpikeError("SPK807", "command line", what, remedy, ExitCode.USAGE)


def require_place(output: Path) -> None:
    """Raises SPK817 if no file or directory can be made at `output`.

    Directories above it that don't exist are made when it is written.
    """
    above = next(path for path in output.absolute().parents if path.exists())
    if not above.is_dir():
        raise unusable_output(f"{above} is no directory, so that {output} can't be made.")
    if not os.access(above, os.W_OK | os.X_OK):
        raise unusable_output(f"you may not write to {above}.")


def unusable_output(what: str) -> SpikeError:
    """SPK817 for an output that would replace something else, or has no place."""
    remedy = "Choose another output, or move the file away."
    return SpikeError("SPK817", "command line", what, remedy, ExitCode.USAGE)
