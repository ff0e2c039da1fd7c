"""Does a model's code take other paths for a batch or step of one, or for an empty past?

torch.export assumes that symbolic sizes are at least 2, so code such as ``if seq_len == 1`` is
silently traced for the other case. Here the model runs on fake tensors of several sizes, and the
lines that call torch are compared: they must not differ.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

from torch.overrides import TorchFunctionMode

from ...errors import ExitCode, SpikeError

# batch, tokens, past
USUAL = (2, 3, 5)
SPECIAL = {(2, 1, 5): "a step of one token", (1, 3, 0): "a batch of one or an empty past"}
USUAL_STEP = (2, 1, 5)
SPECIAL_STEP = {(1, 1, 0): "a batch of one or an empty past"}

Line = tuple[str, int]


class _Calls(TorchFunctionMode):  # type: ignore[misc]  # torch is not followed by the type checker
    """Records the line of the caller of every torch function."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Line] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Records, then calls."""
        self.lines.append(_caller())
        return func(*args, **(kwargs or {}))


def _caller() -> Line:
    frame = sys._getframe(2)
    while "/torch/" in frame.f_code.co_filename and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def refuse_size_branches(
    name: str, run: Callable[[int, int, int], object], stepwise: bool = False
) -> None:
    """Raises SPK207 if `run(batch, tokens, past)` takes another path for a size of one or zero.

    Args:
        name: of the model, for the message.
        run: one step of the model on fake tensors of concrete sizes.
        stepwise: every step will have one token.
    """
    usual, special = (USUAL_STEP, SPECIAL_STEP) if stepwise else (USUAL, SPECIAL)
    path = _path(run, usual)
    for sizes, what in special.items():
        _require_same(name, path, _path(run, sizes), what)


def refuse_other_path(
    name: str, run: Callable[[int, int, int], object], tokens: int, sizes: tuple[int, int, int]
) -> None:
    """Raises SPK207 if the path of these sizes is not that of steps of `tokens`."""
    usual = USUAL_STEP if tokens == 1 else USUAL
    what = "a step of {1} after {2} tokens".format(*sizes)
    _require_same(name, _path(run, usual), _path(run, sizes), what)


def _require_same(name: str, usual: list[Line], path: list[Line], what: str) -> None:
    for here, there in _differences(usual, path):
        place = there or here or ("an unknown file", 0)
        raise SpikeError(
            "SPK207",
            "lowering",
            f"{name} computes {what} in another way than other steps, first at "
            f"{place[0]}:{place[1]}.",
            "One graph cannot do both: the model needs a change in its code; report it.",
            ExitCode.UNSUPPORTED,
        )


def _path(run: Callable[[int, int, int], object], sizes: tuple[int, int, int]) -> list[Line]:
    with _Calls() as calls:
        run(*sizes)
    lines: list[Line] = calls.lines
    return lines


def _differences(
    left: list[Line], right: list[Line]
) -> Iterator[tuple[Line, Line | None] | tuple[Line | None, Line]]:
    for here, there in zip_longest(left, right):
        if here != there:
            yield here, there
