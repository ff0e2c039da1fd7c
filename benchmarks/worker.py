"""A measured program as a child process that takes commands, so that two of them can take turns.

One JSON line in, one JSON line out; an answer that says `"shape"` is followed by that many float32
values, raw. All children of a comparison stay alive (weights loaded) while another one runs. Their
side, and the commands, are in `workers/serve.py`.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt


class Worker:
    """A running child; a context manager that ends it.

    Args:
        command: program and arguments.
        log: file that takes its error output; None = ours.
    """

    def __init__(self, command: Sequence[str], log: Path | None = None) -> None:
        errors = log.open("ab") if log else None
        self._process = subprocess.Popen(
            list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        if errors:
            errors.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its input, which ends it."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def pid(self) -> int:
        """Process id, to read its memory figures."""
        return self._process.pid

    def call(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command, wait for its answer.

        Raises:
            RuntimeError: the child ended, or answered with an error.
        """
        if not self._process.stdin or not self._process.stdout:
            raise RuntimeError("the worker has no pipes")
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended; the empty answer says so
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"worker ended with {self._process.wait()} at {command['do']}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{command['do']}: {answer['error']}")
        return answer

    def score(self, tokens: Sequence[int], first: int) -> npt.NDArray[np.float32]:
        """Logits float32 ``[T - first, V]`` of positions `first` and later."""
        answer = self.call({"do": "score", "tokens": list(tokens), "first": first})
        size = 4 * math.prod(answer["shape"])
        if not self._process.stdout:
            raise RuntimeError("the worker has no pipes")
        data = self._process.stdout.read(size)
        if len(data) != size:
            raise RuntimeError(f"worker sent {len(data)} of {size} bytes of logits")
        return np.frombuffer(data, dtype=np.float32).reshape(answer["shape"])
