"""`spike run`: one answer, streamed to stdout as it comes, with its figures on stderr."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from .guard import INTERRUPTED
from .options import usage
from .sampling import logprobs_table
from .tables import duration
from .terminal import Terminal, write_json

if TYPE_CHECKING:
    from ..runtime import Completion, SpikeEngine
    from ..runtime.prompts import Prompt

STDIN = "-"


@dataclass(frozen=True)
class Ask:
    """What to answer.

    Attributes:
        prompt: text, ``-`` for stdin, None for stdin or a conversation.
        token_ids: ids in place of a text.
        chat: use the template; None = if there is one.
        system: system message.
    """

    prompt: str | None
    token_ids: str | None = None
    chat: bool | None = None
    system: str | None = None


def generate(
    path: Path,
    ask: Ask,
    sampling: Mapping[str, Any],
    loading: Mapping[str, Any],
    terminal: Terminal,
) -> int:
    """One answer or a conversation; 130 if Ctrl-C ended the answer.

    Raises:
        SpikeError: SPK807 ids that are none, and what loading and generating raise.
    """
    ids = None if ask.token_ids is None else parse_ids(ask.token_ids)
    text = None if ids is not None else read_prompt(ask.prompt)
    with open_engine(path, terminal, loading) as engine:
        chat = engine.has_chat_template if ask.chat is None and ids is None else bool(ask.chat)
        if ask.system is not None and not chat:
            raise usage(f"--system needs a chat template, and {path} has none.", "Leave it out.")
        options = {**sampling, "chat": chat}
        if ids is None and text is None:
            from .chat import converse

            converse(engine, options, ask.system, terminal)
            return 0
        prompt: Prompt = ids or (messages(ask.system, text or "") if chat else text or "")
        completion = answer(engine, prompt, options, terminal)
    return INTERRUPTED if completion.finish_reason == "cancelled" else 0


def open_engine(path: Path, terminal: Terminal, options: Mapping[str, Any]) -> SpikeEngine:
    """Load an engine, or build a checkpoint into the cache first (which takes a while: say so)."""
    from ..runtime import SpikeEngine
    from ..runtime.build_cache import is_checkpoint

    if is_checkpoint(path):
        terminal.say(f"{path} is a checkpoint: using its engine in the cache, built if need be")
    return SpikeEngine(path, **options)


def read_prompt(prompt: str | None) -> str | None:
    """The prompt: as given, or all of stdin for ``-`` or a pipe; None = hold a conversation."""
    if prompt == STDIN or (prompt is None and not sys.stdin.isatty()):
        return sys.stdin.read()
    return prompt


def messages(system: str | None, text: str) -> list[dict[str, str]]:
    """A conversation of one turn."""
    head = [{"role": "system", "content": system}] if system else []
    return [*head, {"role": "user", "content": text}]


def answer(
    engine: SpikeEngine, prompt: Prompt, options: Mapping[str, Any], terminal: Terminal
) -> Completion:
    """Stream one answer; Ctrl-C ends it cleanly (the completion says ``cancelled``)."""
    with engine.stream(prompt, **options) as stream, _Interrupt() as interrupt:
        for piece in stream:
            interrupt.between_pieces = True
            _show(piece, terminal)
            if interrupt.asked:
                break
    completion = stream.completion
    if terminal.json:
        write_json({"event": "completion", **fields(completion)})
    else:
        # Without a tokenizer there is no text: the ids are the answer.
        tail = "" if engine.has_tokenizer else " ".join(map(str, completion.token_ids))
        print(tail, flush=True)
        if completion.logprobs:
            terminal.say(logprobs_table(engine, completion.logprobs))
        terminal.say(stats(completion))
    return completion


def _show(piece: str, terminal: Terminal) -> None:
    if terminal.json:
        write_json({"event": "text", "text": piece})
    else:
        sys.stdout.write(piece)
        sys.stdout.flush()


class _Interrupt:
    """Ctrl-C between two pieces ends the answer; before the first, or twice, it interrupts.

    So the scheduler is never torn in the middle of a step that others may depend on.
    """

    def __init__(self) -> None:
        self.asked = self.between_pieces = False

    def __enter__(self) -> _Interrupt:
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self.between_pieces:
            raise KeyboardInterrupt
        self.asked = True


def stats(completion: Completion) -> str:
    """``[36 prompt tokens, first token after 41 ms; 18 tokens, 212 tok/s; stop]``."""
    times = completion.timings
    new = len(completion.token_ids)
    rate = f", {tokens_per_second(completion):.1f} tok/s" if new > 1 else ""
    return (
        f"[{completion.prompt_tokens} prompt tokens, TTFT {duration(times.queue + times.prefill)}; "
        f"{new} new tokens{rate}; {completion.finish_reason}]"
    )


def tokens_per_second(completion: Completion) -> float:
    """Decode speed: tokens after the first over the time they took; 0 with fewer than two."""
    new, seconds = len(completion.token_ids), completion.timings.decode
    return (new - 1) / seconds if new > 1 and seconds > 0 else 0.0


def fields(completion: Completion) -> dict[str, object]:
    """A completion as plain data."""
    times, logprobs = completion.timings, completion.logprobs
    asked = {} if logprobs is None else {"logprobs": [asdict(one) for one in logprobs]}
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "ttft_seconds": round(times.queue + times.prefill, 6),
        "decode_seconds": round(times.decode, 6),
        "tokens_per_second": round(tokens_per_second(completion), 3),
        **asked,
    }


def parse_ids(text: str) -> list[int]:
    """Ids from ``1,2,3`` or ``1 2 3``. Raises SpikeError SPK807 for anything else."""
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise usage(f"--token-ids {text!r} are no ids.", "Give numbers: 1,2,3.") from error
