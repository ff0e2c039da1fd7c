"""Translation validation (`--verify-passes`): run the graph before and after each pass, compare.

The reference interpreter runs both on the inputs of `scenarios.py`. If the outputs differ,
`blame.py` finds the rewrite and `repro.py` writes what it needs to disk. What the interpreter
cannot see, the storage of constants and states and the kernels of a placed graph, `placement.py`
checks by rule.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

from ..compiler.ir import Graph, parse_graph, print_graph
from ..errors import ExitCode, SpikeError
from .base import Pass, PassReport
from .blame import Blame, difference, find_blame, tie_flipped
from .manager import Observer
from .placement import misplaced
from .repro import write_repro
from .scenarios import Parameters, Tensor, embedding_tables, poisoned, run, scenarios

ROUNDING = 2e-5
"""Relative to the largest logit: what another order of sums may change in a deep model."""
Outputs = dict[str, list[Tensor]]


class ValidatePasses(Observer):
    """Compares the outputs around every pass.

    Args:
        parameters: values of a traced parameter by name.
        longest: tokens of one sequence that the model allows.
        seed: of token ids and cached rows.
        repro: directory for a reproduction of a failure; None writes none.
    """

    def __init__(
        self, parameters: Parameters, longest: int, seed: int = 0, repro: Path | None = None
    ) -> None:
        self.parameters, self.seed, self.repro = parameters, seed, repro
        self.scenarios = scenarios(longest)
        self.blame: Blame | None = None
        self._tables: frozenset[str] | None = None
        self._before: Outputs = {}
        self._text = ""

    def before_pass(self, step: Pass, graph: Graph) -> None:
        """Runs the first graph; later ones were run after the pass before."""
        if self._tables is None:
            self._tables = embedding_tables(graph)
            self._before = {name: self._run(graph, name) for name in self.scenarios}
        self._text = print_graph(graph)

    def after_pass(self, step: Pass, graph: Graph, report: PassReport) -> None:
        """Raises SpikeError SPK307 (exit 70) if the pass changed the meaning of the graph."""
        if not report.modified:
            return
        for problem in misplaced(graph):
            raise self._error(step, problem, "")
        limit = max(step.allowed, ROUNDING)
        largest, flipped = 0.0, list[str]()
        if _row_sizes(parse_graph(self._text)) != _row_sizes(graph):
            # Other rows are cached (MLA's, expanded): the same random past means something else.
            cold = {n for n, s in self.scenarios.items() if not any(f.past for f in s.feeds)}
            self._before = {n: rows for n, rows in self._before.items() if n in cold}
        for name, before in self._before.items():
            try:
                after = self._run(graph, name)
            except Exception as error:  # a graph that cannot be run is as wrong as a wrong result
                self._find_blame(graph, name, limit)
                raise self._changed(step, name, limit, f"cannot be run: {error}") from error
            pairs = list(zip(before, after, strict=True))
            worst = max(difference(b, a) for b, a in pairs)
            self._before[name] = after
            if worst <= limit:
                largest = max(largest, worst)
                continue
            self._find_blame(graph, name, limit)
            if self.blame is None or not tie_flipped(self.blame, self._parameters(name)):
                what = f"relative difference {worst:.3g}, allowed {limit:.3g}"
                raise self._changed(step, name, limit, what)
            flipped.append(name)
        found: dict[str, object] = {"largest relative difference": largest, "limit": limit}
        if flipped:  # compared up to a choice between near equals only
            found["scenarios with another choice"] = flipped
        report.facts["validated"] = found

    def _run(self, graph: Graph, name: str) -> list[Tensor]:
        # A copy: the interpreter binds values by identity and a pass may be half-way rewritten.
        copy = parse_graph(print_graph(graph))
        return run(copy, self._parameters(name), self.scenarios[name], self.seed)

    def _parameters(self, name: str) -> Parameters:
        tables = self._tables or frozenset()
        return poisoned(self.parameters, tables, self.scenarios[name].weights)

    def _find_blame(self, graph: Graph, name: str, limit: float) -> None:
        """Sets `blame`: which rewrite shows in a scenario."""
        self.blame = find_blame(
            parse_graph(self._text),
            graph,
            self._parameters(name),
            self.scenarios[name],
            self.seed,
            limit,
        )

    def _changed(self, step: Pass, name: str, limit: float, what: str) -> SpikeError:
        """The error, with the rewrite that is to blame and its reproduction."""
        problem = f"in scenario {name!r}, {what}"
        if self.blame is None:
            return self._error(step, f"{problem}; no single rewrite shows it.", "")
        scope = self.blame.scope or "the model"
        problem += f". To blame, in {scope}: {self.blame.node}; {self.blame.reason}."
        return self._error(step, problem, self._write(step, name, limit, self.blame))

    def _write(self, step: Pass, name: str, limit: float, blame: Blame) -> str:
        """Writes the reproduction; where it is, for the error."""
        if self.repro is None:
            return ""
        facts = {"pass": step.name, "scenario": name, "limit": limit}
        try:
            return str(write_repro(self.repro, blame, self._parameters(name), facts))
        except OSError as error:
            return f"{self.repro} (incomplete: {error})"

    def _error(self, step: Pass, problem: str, written: str) -> SpikeError:
        kept = f"the reproduction in {written}" if written else "the files of --dump-ir"
        return SpikeError(
            "SPK307",
            "passes",
            f"{step.name} changes the result: {problem}",
            f"This is a bug in SpikeInfer: leave out {step.name} in the recipe and report it with "
            f"{kept}.",
            ExitCode.INTERNAL,
        )


def _row_sizes(graph: Graph) -> dict[str, int]:
    """Elements of one cached row of each state."""
    return {
        s.name: prod(d for d in s.type.shape if isinstance(d, int)) for s in graph.states.values()
    }
