"""A minimal reproduction on disk: the blamed value's nodes before and after a pass, and their data.

    REPRO/
      README.md         what was found, and the command below
      repro.json        the facts a run needs: the value's name, the limit, how to read both sides
      before.ir         the nodes that computed the value before the pass, from values that agree
      after.ir          the nodes that compute it now
      before.npz        content of before.ir's inputs (input/NAME) and states (state/NAME)
      after.npz         the same for after.ir
      parameters.npz    the checkpoint's tensors that both read, as the scenario changed them

`python -m spikeinfer.passes.repro REPRO` runs both and shows the difference; it reads nothing else.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..compiler.ir import Interpreter, PagedState, parse_graph, print_graph
from .blame import Blame, Piece, View, difference
from .scenarios import BLOCK, Parameters, Tensor

FACTS = "repro.json"


@dataclass(frozen=True)
class Outcome:
    """What a reproduction gave; `after` is None and `error` is set if it could not be run."""

    before: Tensor
    after: Tensor | None
    difference: float
    limit: float
    error: str = ""


def write_repro(
    directory: Path, blame: Blame, parameters: Parameters, facts: Mapping[str, object]
) -> Path:
    """Writes the reproduction; where it is: `directory`, or that name with a number behind it.

    An older reproduction gives way, anything else is left alone. Raises OSError.

    Args:
        facts: JSON-able; ``pass``, ``scenario`` and ``limit`` must be among them.
    """
    directory = _free(directory)
    directory.mkdir(parents=True)
    sides = {"before": blame.before, "after": blame.after}
    pieces = {name: piece for name, piece in sides.items() if piece is not None}
    for name, piece in pieces.items():
        (directory / f"{name}.ir").write_text(print_graph(piece.graph), encoding="utf-8")
        np.savez(directory / f"{name}.npz", **_content(piece))  # type: ignore[arg-type]
    needed = sorted({p for piece in pieces.values() for p in piece.parameters})
    tensors = {name: parameters(name).detach().float().numpy() for name in needed}
    np.savez(directory / "parameters.npz", **tensors)
    known = {
        **facts,
        "value": blame.value,
        "node": blame.node,
        "scope": blame.scope,
        "reason": blame.reason,
        "views": {name: asdict(piece.view) for name, piece in pieces.items()},
    }
    (directory / FACTS).write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(_readme(blame, facts), encoding="utf-8")
    return directory


def run_repro(directory: Path) -> Outcome:
    """Runs both sides of a reproduction."""
    facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    before = _run(directory, "before", facts["views"])
    try:
        after = _run(directory, "after", facts["views"])
    except Exception as error:  # a graph that cannot be run is a finding, too
        return Outcome(before, None, float("inf"), facts["limit"], f"{error}")
    before = before.reshape(after.shape) if before.numel() == after.numel() else before
    return Outcome(before, after, difference(before, after), facts["limit"])


def _free(directory: Path) -> Path:
    if (directory / FACTS).is_file() and not directory.is_symlink():
        shutil.rmtree(directory)
    path, count = directory, 0
    while path.exists() or path.is_symlink():
        count += 1
        path = directory.with_name(f"{directory.name}.{count}")
    return path


def _content(piece: Piece) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]]:
    content = {f"input/{name}": np.asarray(t) for name, t in piece.inputs.items()}
    for name, state in piece.states.items():
        rows = state.rows if isinstance(state, PagedState) else state
        content[f"{'pool' if isinstance(state, PagedState) else 'state'}/{name}"] = np.asarray(rows)
    return content


def _run(directory: Path, side: str, views: Mapping[str, Mapping[str, object]]) -> Tensor:
    graph = parse_graph((directory / f"{side}.ir").read_text(encoding="utf-8"))
    parameters = np.load(directory / "parameters.npz")
    given: dict[str, dict[str, Tensor]] = {"input": {}, "state": {}, "pool": {}}
    for name, array in np.load(directory / f"{side}.npz").items():
        kind, _, rest = name.partition("/")
        given[kind][rest] = torch.from_numpy(array)
    states = given["state"] | {n: PagedState(t, BLOCK) for n, t in given["pool"].items()}
    runner = Interpreter(graph, lambda name: torch.from_numpy(parameters[name]), states)
    result = runner.run(given["input"])[0]
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in views[side].items()}
    return View(**fields).of(result)  # type: ignore[arg-type]


def _readme(blame: Blame, facts: Mapping[str, object]) -> str:
    return f"""# {facts["pass"]} changes %{blame.value}

In scenario {facts["scenario"]!r}: {blame.reason}; allowed {facts["limit"]:.3g} (relative).
To blame, in `{blame.scope or "the model"}`:

    {blame.node}

`before.ir` and `after.ir` hold the nodes that compute it from values that still agree, the .npz
files what they read. Show the difference, with spikeinfer[build] and nothing but this directory:

    python -m spikeinfer.passes.repro .
"""


def main(arguments: list[str]) -> int:
    """Shows one reproduction; 1 if both sides differ by more than the limit, else 0."""
    if len(arguments) != 1 or not (Path(arguments[0]) / FACTS).is_file():
        print("usage: python -m spikeinfer.passes.repro REPRO", file=sys.stderr)
        return 2
    outcome = run_repro(Path(arguments[0]))
    torch.set_printoptions(threshold=64, edgeitems=2)
    print(f"before: {outcome.before}")
    print(f"after: {outcome.error or outcome.after}")
    print(f"relative difference {outcome.difference:.3g}, allowed {outcome.limit:.3g}")
    return int(not outcome.difference <= outcome.limit)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
