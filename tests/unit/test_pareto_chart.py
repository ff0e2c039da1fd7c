"""The chart of a quality budget: well-formed, and its marks where their figures say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
from spikeinfer.compiler.engine.chart import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, pareto_chart
from spikeinfer.compiler.engine.pareto import Pareto, ParetoPoint

FORMATS = {"q4_k": 3}
POINTS = (
    ParetoPoint(1_000_000, 3.0, 1.0, FORMATS),
    ParetoPoint(2_000_000, 6.0, 0.01, FORMATS),
    ParetoPoint(2_000_000, 6.0, 0.01, FORMATS, measured_kl=0.02),
    ParetoPoint(2_500_000, 7.5, 0.002, FORMATS, measured_kl=0.01, chosen=True),
    ParetoPoint(3_000_000, 9.0, 0.001, FORMATS),
    ParetoPoint(5_000_000, 16.0, 0.0, FORMATS),  # exact: has no place on a logarithmic axis
)


def drawn(pareto: Pareto) -> ElementTree.Element:
    return ElementTree.fromstring(pareto_chart(pareto))


def test_marks_stand_where_their_figures_say() -> None:
    chart = drawn(Pareto(0.1, None, points=POINTS))
    line = chart.find("polyline")
    assert line is not None
    places = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    # From 1 to 3 MB and from 0.001 to 1 nats: three powers of ten.
    expected = [
        (LEFT, TOP),
        (LEFT + width / 2, TOP + height * 2 / 3),
        (WIDTH - RIGHT, TOP + height),
    ]
    for place, wanted in zip(places, expected, strict=True):
        assert place == pytest.approx(wanted, abs=0.1)
    limit = next(e for e in chart.iter("line") if "stroke-dasharray" in e.attrib)
    assert float(limit.attrib["y1"]) == pytest.approx(TOP + height / 3, abs=0.1)


def test_built_engines_are_dots_and_this_one_is_large() -> None:
    dots = list(drawn(Pareto(None, 2_600_000, points=POINTS)).iter("circle"))
    assert len(dots) == 2
    assert float(dots[0].attrib["r"]) < float(dots[1].attrib["r"])
    assert dots[1][0].text == "2.50 MB, 0.01 nats"


def test_nothing_to_draw() -> None:
    assert pareto_chart(Pareto(None, 10, points=POINTS[-1:])) == ""


def test_one_point() -> None:
    assert drawn(Pareto(None, 10, points=POINTS[:1])).find("polyline") is not None
