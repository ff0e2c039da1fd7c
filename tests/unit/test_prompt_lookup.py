"""Drafts from earlier in the text: what is proposed, how long, and when not."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spikeinfer.runtime.prompt_lookup import (
    FIRST_SHARE,
    INCOME,
    LOAN,
    MOST_CREDIT,
    MOST_DRAFTS,
    PromptLookup,
    best_length,
    draft_cost,
)


def test_what_followed_the_last_time_is_proposed() -> None:
    tokens = [1, 2, 3, 7, 7, 1, 2, 3, 8, 9, 4, 1, 2, 3]
    assert PromptLookup().propose(tokens, 2, 1) == [8, 9]
    assert PromptLookup().propose([5, *tokens[:3]], 4, 1) == []
    assert PromptLookup().propose(tokens, 0, 1) == []
    assert PromptLookup().propose([1, 2], 4, 1) == []


def test_a_short_period_goes_on() -> None:
    lookup = PromptLookup()
    lookup.adapt(100, 100)
    assert lookup.propose([4, 5, 6, 4, 5, 6, 4, 5], 7, 1) == [6, 4, 5, 6, 4, 5, 6]
    assert PromptLookup().propose([9, 9, 9, 9], 2, 1) == [9, 9]


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 9), min_size=1))
def test_a_growing_text_is_indexed_as_if_at_once(tokens: list[int], cuts: list[int]) -> None:
    grown = PromptLookup()
    for end in itertools.accumulate(cuts):
        grown.propose(tokens[:end], 4, 1)
    assert grown.propose(tokens, 4, 1) == PromptLookup().propose(tokens, 4, 1)


def test_length_grows_with_the_share_and_falls_with_the_load() -> None:
    by_share = [best_length(share / 20, 1) for share in range(20)]
    assert by_share == sorted(by_share)
    assert by_share[0] == 0
    assert by_share[-1] == MOST_DRAFTS
    by_load = [best_length(0.8, load) for load in (1, 2, 4, 8, 16, 64)]
    assert by_load == sorted(by_load, reverse=True)
    assert by_load[-1] == 0
    assert best_length(0.9999, 1) == MOST_DRAFTS


@pytest.mark.parametrize("load", [1, 2, 4])
def test_wrong_drafts_lose_the_loan_and_a_little_of_each_token(load: int) -> None:
    lookup, lost, tries = PromptLookup(), 0.0, 0
    for tokens in range(300):
        if drafts := lookup.propose([1] * (10 + tokens), 4, load):
            lookup.adapt(len(drafts), 0)
            lost += draft_cost(len(drafts), load)
            tries += 1
        assert lost <= LOAN + INCOME * tokens + 1e-9
    assert tries > INCOME * 300 / draft_cost(1, load) - 1  # never off for good
    assert lookup.paused
    assert lookup.result.off


def test_no_try_where_even_a_right_draft_costs_more_than_it_saves() -> None:
    lookup = PromptLookup()
    lookup.adapt(10, 10)
    assert lookup.propose([9, 9, 9, 9], 2, 1)
    assert lookup.propose([9] * 500, 2, 32) == []


def test_what_was_won_long_ago_is_not_lost_again() -> None:
    lookup, lost = PromptLookup(), 0.0
    lookup.adapt(1000, 1000)
    assert not lookup.paused
    for tokens in range(100):
        if drafts := lookup.propose([1] * (10 + tokens), 4, 1):
            lookup.adapt(len(drafts), 0)
            lost += draft_cost(len(drafts), 1)
    assert lost <= MOST_CREDIT + INCOME * 100


@pytest.mark.parametrize("share", [0.2, FIRST_SHARE, 0.97])
def test_the_share_is_learnt(share: float) -> None:
    """A long run of drafts of which each token is right with this share, independently."""
    lookup, rights = (
        PromptLookup(),
        itertools.cycle([(index * 0.6180339887) % 1 < share for index in range(1000)]),
    )
    lengths = []
    for _ in range(400):
        drafts = lookup.propose([1] * 5000, MOST_DRAFTS, 1)
        lengths.append(len(drafts))
        right = len(list(itertools.takewhile(bool, (next(rights) for _ in drafts))))
        lookup.adapt(len(drafts), right) if drafts else None
    expected = best_length(share, 1)
    assert abs(sorted(lengths)[200] - expected) <= max(2, expected // 2)
