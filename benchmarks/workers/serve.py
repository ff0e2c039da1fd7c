"""The measured program's side of `worker.py`: what every child does with its commands.

    open      model, threads, context   -> seconds to load, seconds to the first token
    generate  prompts, steps            -> seconds until every prompt has its first token, then
                                           seconds of `steps` further tokens of each; greedy
    score     tokens, first             -> shape, then raw float32 logits of positions from `first`

Standard library and numpy only: it runs in every peer's environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

Command = dict[str, Any]


class Session(Protocol):
    """A loaded model."""

    def generate(self, prompts: list[list[int]], steps: int) -> tuple[float, float]:
        """Seconds until all first tokens are there; seconds of `steps` more of each."""

    def score(self, tokens: list[int], first: int) -> np.ndarray:
        """Logits ``[T - first, V]`` of positions `first` and later."""


# Model, threads, most tokens of one sequence.
Loader = Callable[[str, int, int], Session]
Extra = Callable[[Command, Any], dict[str, Any]]


def open_session(load: Loader, command: Command) -> tuple[Session, dict[str, Any]]:
    """Load, then produce one token: what was put off while loading happens there."""
    start = time.perf_counter()
    session = load(command["model"], command["threads"], command["context"])
    loaded = time.perf_counter()
    session.generate([[1]], 0)
    seconds = {"load_seconds": loaded - start, "first_token_seconds": time.perf_counter() - start}
    return session, seconds


def serve(load: Loader, extra: Mapping[str, Extra] | None = None) -> None:
    """Serve commands until the input ends; `extra` adds commands, given the session or None."""
    out = os.dup(1)
    os.dup2(2, 1)  # whatever a library prints must not get between the answers
    session: Session | None = None
    for line in sys.stdin:
        command = json.loads(line)
        rows = None
        try:
            do = command["do"]
            if do == "open":
                session, answer = open_session(load, command)
            elif do == "generate" and session:
                prefill, decode = session.generate(command["prompts"], command["steps"])
                answer = {"prefill_seconds": prefill, "decode_seconds": decode}
            elif do == "score" and session:
                rows = session.score(command["tokens"], command["first"])
                answer = {"shape": list(rows.shape)}
            elif extra and do in extra:
                answer = extra[do](command, session)
            else:
                answer = {"error": f"{do} is unknown or comes before open"}
        except Exception as error:  # whatever it was, the other side must hear of it
            answer = {"error": f"{type(error).__name__}: {error}"}
            rows = None
        with os.fdopen(os.dup(out), "wb") as pipe:
            pipe.write(json.dumps(answer).encode() + b"\n")
            if rows is not None:
                pipe.write(np.ascontiguousarray(rows, np.float32).tobytes())
