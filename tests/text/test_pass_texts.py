"""Every pass does what its docstring shows: the before text becomes the after text, exactly."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import textwrap

import pytest
import spikeinfer.passes
from spikeinfer.compiler.ir import Level, parse_graph, print_graph, verify
from spikeinfer.passes.base import Pass
from spikeinfer.passes.manager import run_pass
from spikeinfer.passes.pipeline import default_pipeline, with_options


def _passes() -> list[type[Pass]]:
    found: list[type[Pass]] = []
    for info in pkgutil.iter_modules(spikeinfer.passes.__path__):
        module = importlib.import_module(f"spikeinfer.passes.{info.name}")
        found += [
            kind
            for _, kind in inspect.getmembers(module, inspect.isclass)
            if issubclass(kind, Pass)
            and not inspect.isabstract(kind)
            and kind.__module__ == module.__name__
        ]
    return found


PASSES = _passes()


def _section(doc: str, start: str) -> str:
    """The indented lines behind `start:`."""
    lines = doc.split(f"\n{start}:\n")[1].splitlines()
    body = []
    for line in lines:
        if line and not line.startswith(" "):
            break
        body.append(line)
    return textwrap.dedent("\n".join(body)).strip("\n")


def _options(doc: str) -> dict[str, object]:
    """What the pass of the example is set to, one `name: value` a line; nothing by default."""
    lines = _section(doc, "options").splitlines() if "\noptions:\n" in doc else []
    return dict(line.split(": ", 1) for line in lines)


def _graph_text(body: str, level: str) -> str:
    return body + "\n" if body.startswith("graph ") else f"graph doc {level} {{\n{body}\n}}\n"


def test_every_pass_of_the_pipeline_has_both_texts() -> None:
    """So that the next test leaves none out."""
    piped = {type(step) for phase in default_pipeline() for step in phase.passes}
    assert piped == set(PASSES)
    for kind in PASSES:
        doc = inspect.getdoc(inspect.getmodule(kind)) or ""
        assert doc.count("\nbefore:\n") == doc.count("\nafter:\n") == 1, kind.name


@pytest.mark.parametrize("kind", PASSES, ids=lambda k: k.name)
def test_docstring_shows_what_the_pass_does(kind: type[Pass]) -> None:
    doc = inspect.getdoc(inspect.getmodule(kind))
    assert doc is not None
    level = kind.requires[0].value
    graph = parse_graph(_graph_text(_section(doc, "before"), level))
    verify(graph)
    report = run_pass(graph, with_options(kind(), _options(doc)))
    assert report.fired
    after = parse_graph(_graph_text(_section(doc, "after"), graph.level.value))
    verify(after)
    assert print_graph(graph) == print_graph(after)


@pytest.mark.parametrize("kind", PASSES, ids=lambda k: k.name)
def test_one_name_three_spellings(kind: type[Pass]) -> None:
    assert kind.__module__.rsplit(".", 1)[1] == kind.name.replace("-", "_")
    camel = "".join(part.capitalize() for part in kind.name.split("-"))
    assert kind.__name__ == camel


RAISING = [kind for kind in PASSES if Level.TRACED in kind.requires]


@pytest.mark.parametrize("kind", RAISING, ids=lambda k: k.name)
def test_a_second_run_changes_nothing(kind: type[Pass]) -> None:
    doc = inspect.getdoc(inspect.getmodule(kind))
    assert doc is not None
    graph = parse_graph(_graph_text(_section(doc, "before"), kind.requires[0].value))
    run_pass(graph, kind())
    text = print_graph(graph)
    assert not run_pass(graph, kind()).modified
    assert print_graph(graph) == text
