"""Runs a command and turns whatever ends it into one block on stderr and an exit code.

A user's mistake is never a traceback; our own bug (exit 70) writes one to a file, and to stderr
with `--log-level debug`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import typer

from ..errors import ExitCode, SpikeError
from .terminal import LogLevel, Terminal

INTERRUPTED = 130
BROKEN_PIPE = 141
"""128 + the signal's number, as shells report it."""

UsageError = typer.BadParameter.__mro__[1]
"""The parser's base class: typer keeps it in a private module."""


class Command(Protocol):
    """A parsed command line that can be run."""

    def make_context(self, info_name: str | None, args: list[str]) -> Any:
        """Parsed arguments, to be entered and invoked."""

    def invoke(self, ctx: Any) -> Any:
        """Run; returns the exit code or None."""


def run(command: Command, name: str, words: Sequence[str]) -> int:
    """The exit code of `command` with the arguments `words`; never raises but for SystemExit."""
    terminal = Terminal.of(words)
    _quiet_libraries(terminal)
    try:
        # Not command.main(): it turns a broken pipe and Ctrl-C into exit code 1.
        with command.make_context(name, list(words)) as context:
            code = command.invoke(context)
        sys.stdout.flush()
        return code if isinstance(code, int) else int(ExitCode.OK)
    except typer.Exit as end:  # --help, --version
        return end.exit_code
    except BrokenPipeError:
        # Whoever read us has gone; Python's own flush at exit must not fail a second time.
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        terminal.say("\ninterrupted")
        return INTERRUPTED
    except Exception as error:
        return _report(terminal, name, error)


def _report(terminal: Terminal, name: str, error: Exception) -> int:
    """Show `error` in its form; the exit code it asks for."""
    if terminal.level is LogLevel.DEBUG:
        traceback.print_exception(error)
    if isinstance(error, SpikeError):
        terminal.fail(block(error), fields(error))
        return int(error.exit_code)
    if isinstance(error, UsageError):
        return _usage(terminal, name, error)
    if isinstance(error, OSError) and error.filename is not None:
        found = _file_error(error)
    elif isinstance(error, MemoryError):
        found = _out_of_memory()
    else:
        found = _bug(error)
    terminal.fail(block(found), fields(found))
    return int(found.exit_code)


def block(error: SpikeError) -> str:
    """Code, where, what; then what to do; then where to read more."""
    bug = error.exit_code is ExitCode.INTERNAL
    return "\n".join(
        [
            f"error {error.code} in {error.where}",
            textwrap.indent(error.what.rstrip(), "  "),
            textwrap.indent(f"What to do: {error.remedy.rstrip()}", "  "),
            f"  {'' if bug else 'More: '}{f'spike explain {error.code}' if not bug else _ASK}",
        ]
    )


_ASK = "Please report it; `--log-level debug` shows where it happened."


def fields(error: SpikeError) -> dict[str, object]:
    """The same for a machine."""
    return {
        "code": error.code,
        "where": error.where,
        "what": error.what,
        "remedy": error.remedy,
        "exit_code": int(error.exit_code),
    }


def _usage(terminal: Terminal, name: str, error: Exception) -> int:
    """Wrong arguments, in the words of the parser (which knows near misses)."""
    context = getattr(error, "ctx", None)
    message = str(getattr(error, "format_message", lambda: error)())
    path = getattr(context, "command_path", name)
    usage = f"{context.get_usage()}\n" if context is not None else ""
    if message.startswith("Usage:"):  # a group without a command shows its help
        print(message, file=sys.stderr)
        return int(ExitCode.USAGE)
    hint = f"{path} --help lists the options."
    what = SpikeError("SPK800", "command line", message, hint, ExitCode.USAGE)
    terminal.fail(f"{usage}error: {message}\n{hint}", fields(what))
    return int(ExitCode.USAGE)


def _file_error(error: OSError) -> SpikeError:
    return SpikeError(
        "SPK806",
        "files",
        f"{error.filename}: {error.strerror or error}.",
        "Check that the path is right and that you may read or write there.",
    )


def _out_of_memory() -> SpikeError:
    return SpikeError(
        "SPK808",
        "memory",
        "the machine has no memory left for this.",
        "Close other programs, use a smaller model or capacity (--max-seq-len, --max-batch-size), "
        "or skip the golden gate, which needs the source in float32 (--golden off).",
        ExitCode.UNSUPPORTED,
    )


def _bug(error: Exception) -> SpikeError:
    last = traceback.extract_tb(error.__traceback__)
    place = f" in {Path(last[-1].filename).name}:{last[-1].lineno}" if last else ""
    path = _log(error)
    return SpikeError(
        "SPK899",
        "SpikeInfer",
        f"an unexpected {type(error).__name__}{place}: {error}",
        f"This is our bug. The traceback is in {path}." if path else "This is our bug.",
        ExitCode.INTERNAL,
    )


def _log(error: Exception) -> str:
    """Write the traceback to a new file; its path, or nothing where no file can be written."""
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="spikeinfer-", suffix=".log", delete=False, encoding="utf-8"
        ) as file:
            file.write(f"{' '.join(sys.argv)}\n")
            file.writelines(traceback.format_exception(error))
            return file.name
    except OSError:
        return ""


def _quiet_libraries(terminal: Terminal) -> None:
    """Our own warnings stay; those of torch and transformers are for developers."""
    if terminal.level is LogLevel.DEBUG:
        return
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    warnings.simplefilter("ignore")
    if terminal.level is not LogLevel.ERROR:
        warnings.filterwarnings("default", category=UserWarning, module=r"spikeinfer\.")
    warnings.showwarning = lambda message, *_, **__: terminal.say(f"warning: {message}")
