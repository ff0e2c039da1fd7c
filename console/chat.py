"""`spike run` without a prompt: a conversation, or line after line where there is no template."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import SpikeError
from .generate import answer
from .guard import block
from .terminal import Terminal

if TYPE_CHECKING:
    from ..runtime import SpikeEngine

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"
PROMPT = "> "


def converse(
    engine: SpikeEngine, options: Mapping[str, Any], system: str | None, terminal: Terminal
) -> None:
    """Read lines and answer them until the input ends. Errors of a turn end only that turn."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then has history and editing
    terminal.say(HELP)
    history = _start(system)
    while (line := _read()) is not None:
        if line == "/exit":
            return
        if line == "/reset":
            history = _start(system)
        elif line in ("/help", "/?"):
            terminal.say(HELP)
        elif line:
            history = _turn(engine, options, history, line, terminal)


def _start(system: str | None) -> list[dict[str, str]]:
    return [{"role": "system", "content": system}] if system else []


def _read() -> str | None:
    """The next line without its spaces; None at the end, or on Ctrl-C at the prompt."""
    try:
        return input(PROMPT).strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None


def _turn(
    engine: SpikeEngine,
    options: Mapping[str, Any],
    history: list[dict[str, str]],
    line: str,
    terminal: Terminal,
) -> list[dict[str, str]]:
    """The conversation with one more question and answer; unchanged if there was no answer."""
    asked = [*history, {"role": "user", "content": line}]
    try:
        completion = answer(engine, asked if options["chat"] else line, options, terminal)
    except KeyboardInterrupt:
        print()
        return history
    except SpikeError as error:
        terminal.say(block(error))
        if error.code == "SPK606":
            terminal.say("/reset starts a new conversation.")
        return history
    return [*asked, {"role": "assistant", "content": completion.text}]
