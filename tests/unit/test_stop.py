"""Stop strings: what is shown is the text before the first complete one, whatever the pieces."""

from __future__ import annotations

import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from spikeinfer.runtime.stop import StopMatcher

LETTERS = st.text("ab\n", max_size=30)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)


def cut(text: str, at: list[int]) -> list[str]:
    edges = [0, *sorted(i % (len(text) + 1) for i in at), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@given(text=LETTERS, stops=STOPS, at=st.lists(st.integers(0, 99), max_size=8))
@example(text="aab", stops=["ab"], at=[1, 2])
@example(text="aba", stops=["b", "aba"], at=[2])
def test_shows_the_text_before_the_first_stop(text: str, stops: list[str], at: list[int]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in cut(text, at))
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    assert matcher.stopped == bool(found)
    assert shown + matcher.finish() == (text[: min(found)[1]] if found else text)


@given(text=LETTERS, stops=STOPS)
def test_never_shows_what_a_stop_may_still_take_back(text: str, stops: list[str]) -> None:
    matcher, shown = StopMatcher(stops), ""
    for end, letter in enumerate(text, 1):
        shown += matcher.push(letter)
        assert text.startswith(shown)
        for stop in stops:
            assert stop not in shown
            begun = [n for n in range(1, len(stop)) if text[:end].endswith(stop[:n])]
            assert matcher.stopped or len(shown) <= end - max(begun, default=0)


def test_without_stops_nothing_is_held() -> None:
    assert StopMatcher([]).push("text") == "text"


def test_nothing_follows_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert [matcher.push(piece) for piece in ("one E", "ND two", "three")] == ["one ", "", ""]
