"""Golden arithmetic over made-up logits: properties, limits, and faults that must not pass."""

from __future__ import annotations

import dataclasses
import itertools
import json

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spikeinfer.compiler.golden import THRESHOLDS, GoldenPrompt, Prompt, check, thresholds_for
from spikeinfer.compiler.golden.metrics import (
    compare_full,
    compare_stored,
    kl_of,
    log_sum_exp,
    row_metrics,
    split_log_sum_exp,
)
from spikeinfer.compiler.golden.record import digest, likeliest, probe_tokens, random_tokens
from spikeinfer.compiler.golden.sets import GoldenSet, Provenance
from spikeinfer.errors import SpikeError

V, T, PROMPT = 50, 24, 16
Logits = npt.NDArray[np.float32]
EXACT = THRESHOLDS["float32"]


def logits_of(seed: int, scale: float = 3.0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((T, V)) * scale).astype(np.float32)


def greedy_set(seed: int = 0, top_k: int = 8) -> tuple[GoldenSet, Logits]:
    """A set whose continuation is what its own logits prefer, with clear margins."""
    logits = logits_of(seed)
    top = logits.argmax(-1)
    logits[np.arange(T), top] += 1.0
    tokens = [int(t) for t in np.random.default_rng(seed + 1).integers(0, V, PROMPT)]
    greedy = [int(t) for t in top[PROMPT - 1 : T - 1]]
    probes = probe_tokens(V, 4)
    prompt = digest(Prompt("p"), tokens, greedy, logits, top_k, probes)
    made = Provenance("m", "A", {"w": "0"}, "float32", "eager", {"numpy": "2"})
    return GoldenSet("s", V, probes, (prompt,), made), logits


def full_kl(p: Logits, q: Logits) -> npt.NDArray[np.float64]:
    """The definition, by another route."""
    a, b = np.exp(p.astype(np.float64)), np.exp(q.astype(np.float64))
    a, b = a / a.sum(-1, keepdims=True), b / b.sum(-1, keepdims=True)
    return np.asarray((a * np.log(a / b)).sum(-1))


def test_a_set_against_its_own_logits_is_exactly_zero() -> None:
    golden, logits = greedy_set()
    report = check(golden, lambda tokens: logits, EXACT, decode=lambda tokens: logits)
    assert (report.mean_kl, report.max_kl, report.logit_error) == (0.0, 0.0, 0.0)
    assert (report.top1, report.perplexity_ratio, report.decode_error) == (1.0, 1.0, 0.0)
    assert report.passed
    assert report.divergences == ()
    assert (report.continuations, report.positions) == (1, T)


def test_full_kl_equals_the_definition() -> None:
    p, q = logits_of(1), logits_of(2)
    # Both in float64: only the order of a 50-term sum differs.
    np.testing.assert_allclose(row_metrics(p, q).kl, full_kl(p, q), rtol=1e-12)


@given(seed=st.integers(0, 1000), top_k=st.integers(2, V - 1))
@settings(max_examples=30, deadline=None)
def test_stored_kl_never_exceeds_the_full_one(seed: int, top_k: int) -> None:
    golden, logits = greedy_set(seed, top_k)
    other = logits + logits_of(seed + 7, 0.5)
    stored = compare_stored(golden.prompts[0], golden.probe_ids, other).kl
    assert (stored >= 0).all()
    assert (stored <= full_kl(logits, other) + 1e-12).all()


def test_keeping_all_but_one_token_gives_the_full_kl() -> None:
    golden, logits = greedy_set(3, V - 1)
    other = logits_of(4)
    stored = compare_stored(golden.prompts[0], golden.probe_ids, other).kl
    np.testing.assert_allclose(stored, full_kl(logits, other), rtol=1e-9)


def test_the_perplexity_ratio_is_that_of_the_next_tokens() -> None:
    golden, logits = greedy_set(5)
    other = logits + logits_of(6, 0.3)
    sequence = np.asarray(golden.prompts[0].sequence)

    def nll(values: Logits) -> float:
        wide = values.astype(np.float64)
        logprobs = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
        return float(-logprobs[np.arange(T - 1), sequence[1:]].mean())

    report = check(golden, lambda tokens: other, EXACT)
    expected = np.exp(nll(other) - nll(logits))
    assert report.perplexity_ratio == pytest.approx(expected, rel=1e-6)


def test_the_first_divergence_names_step_token_and_margin() -> None:
    golden, logits = greedy_set()
    other = logits.copy()
    row = PROMPT - 1 + 3
    other[row, int(np.argsort(-logits[row])[1])] += 20.0
    other[row + 1, int(np.argsort(-logits[row + 1])[1])] += 20.0
    (found,) = check(golden, lambda tokens: other, EXACT).divergences
    assert (found.prompt, found.step) == ("p", 3)
    assert found.expected == golden.prompts[0].greedy[3]
    assert found.margin == pytest.approx(golden.prompts[0].margins[row])


def test_a_near_tie_is_no_divergence() -> None:
    golden, logits = greedy_set()
    prompt = golden.prompts[0]
    row = PROMPT + 1
    close = prompt.top_logits.copy()
    close[row, 1] = close[row, 0] - 0.049
    tied = dataclasses.replace(prompt, top_logits=close)
    other = logits.copy()
    other[row, int(prompt.top_ids[row, 1])] = logits[row].max() + 0.01
    golden = dataclasses.replace(golden, prompts=(tied,))
    assert check(golden, lambda tokens: other, EXACT).divergences == ()


def test_a_difference_in_the_prompt_is_no_divergence() -> None:
    golden, logits = greedy_set()
    other = logits.copy()
    other[2, int(np.argsort(-logits[2])[1])] += 20.0
    report = check(golden, lambda tokens: other, EXACT)
    assert report.divergences == ()
    assert not report.passed  # the KL there is seen all the same


def test_a_dropped_soft_cap_changes_no_argmax_and_still_fails() -> None:
    raw = logits_of(8, 6.0)
    capped = (10.0 * np.tanh(raw / 10.0)).astype(np.float32)
    probes = probe_tokens(V, 4)
    prompt = digest(Prompt("p"), [1] * PROMPT, [1] * (T - PROMPT), capped, 8, probes)
    golden = dataclasses.replace(greedy_set()[0], prompts=(prompt,), probe_ids=probes)
    report = check(golden, lambda tokens: raw, THRESHOLDS["q4_k_m"])
    assert report.top1 == 1.0
    assert any("mean KL" in failure for failure in report.failures)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_no_numbers_fail_every_format(value: float) -> None:
    golden, logits = greedy_set()
    broken = logits.copy()
    broken[5] = value
    for limits in THRESHOLDS.values():
        with np.errstate(invalid="ignore"):
            report = check(golden, lambda tokens: broken, limits)
        assert not report.passed
        json.dumps(report.to_json(), allow_nan=False)


def test_one_infinite_token_is_caught() -> None:
    golden, logits = greedy_set()
    broken = logits.copy()
    broken[5, int(golden.prompts[0].top_ids[5, 3])] = -np.inf
    report = check(golden, lambda tokens: broken, THRESHOLDS["q4_k_m"])
    assert not report.passed
    assert report.worst == "p@5"


def test_decode_that_differs_from_prefill_fails_although_prefill_is_right() -> None:
    golden, logits = greedy_set()
    shifted = logits.copy()
    shifted[-1, 0] += 0.01
    report = check(golden, lambda tokens: logits, EXACT, decode=lambda tokens: shifted)
    assert report.decode_error == pytest.approx(0.01, rel=1e-3)
    assert report.failures == ("prefill-decode difference 0.01 is over 0.001",)


def test_wrong_shapes_are_refused_with_both_of_them() -> None:
    golden, logits = greedy_set()
    with pytest.raises(SpikeError, match=r"SPK544.*\[24, 49\], expected \[24, 50\]"):
        check(golden, lambda tokens: logits[:, :-1], EXACT)


def test_every_failure_says_value_and_limit() -> None:
    golden, _ = greedy_set()
    report = check(golden, lambda tokens: logits_of(99), EXACT)
    text = " ".join(report.failures)
    for word in ("mean KL", "p99 KL", "max KL", "logit error", "perplexity", "top-1 agreement"):
        assert word in text
    assert "FAILED" in report.summary()


def test_a_full_comparison_and_a_stored_one_agree_on_what_both_see() -> None:
    golden, logits = greedy_set()
    prompt = golden.prompts[0]
    other = logits + logits_of(11, 0.2)
    stored = compare_stored(prompt, golden.probe_ids, other)
    full = compare_full("p", list(prompt.sequence), logits, other, PROMPT)
    for name in ("source_top", "engine_top", "greedy_from"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(full, name))
    # float32 logits minus a float64 sum: equal up to the last bits of float64.
    np.testing.assert_allclose(stored.source_nll, full.source_nll, rtol=1e-9)
    np.testing.assert_allclose(stored.engine_nll, full.engine_nll, rtol=1e-9)
    np.testing.assert_allclose(stored.margins, full.margins, rtol=1e-6)
    assert (stored.logit_error <= full.logit_error).all()


def test_log_sum_exp_of_extremes() -> None:
    rows = np.array([[1000.0, 1000.0], [-1000.0, -np.inf], [-np.inf, -np.inf]])
    np.testing.assert_allclose(log_sum_exp(rows), [1000 + np.log(2), -1000.0, -np.inf])


def test_the_two_sums_add_up() -> None:
    logits = logits_of(12)
    top = likeliest(logits, 5)
    lse = split_log_sum_exp(logits, top)
    kept = np.exp(np.take_along_axis(logits, top.astype(np.int64), -1).astype(np.float64)).sum(-1)
    np.testing.assert_allclose(np.exp(lse[:, 0]), np.exp(lse[:, 1]) + kept, rtol=1e-12)


def test_kl_is_zero_on_itself_and_never_negative() -> None:
    p = logits_of(13).astype(np.float64)
    p -= log_sum_exp(p)[:, None]
    assert (kl_of(p, p) == 0).all()
    assert (kl_of(p, p + 1e-17) >= 0).all()


def test_ties_are_ordered_by_id() -> None:
    row = np.array([[1.0, 3.0, 3.0, 0.0, 3.0]], dtype=np.float32)
    assert likeliest(row, 4).tolist() == [[1, 2, 4, 0]]


@given(size=st.integers(16, 300_000))
@settings(max_examples=30, deadline=None)
def test_probes_are_distinct_and_inside(size: int) -> None:
    probes = probe_tokens(size, 16)
    assert len(set(probes.tolist())) == 16
    assert probes.min() >= 0
    assert probes.max() < size


def test_drawn_ids_are_the_same_everywhere() -> None:
    assert random_tokens(320, 4, "tiny-llama/a") == (223, 232, 224, 178)


def test_thresholds_loosen_with_fewer_bits() -> None:
    order = ["float32", "float16", "bfloat16", "q8_0", "q6_k", "q5_k_m", "q5_1", "q5_0", "q4_1",
             "q4_k_m", "q4_k_s", "q3_k_m", "q4_0", "q2_k"]  # fmt: skip
    limits = [THRESHOLDS[name] for name in order]
    for tight, loose in itertools.pairwise(limits):
        assert tight.mean_kl <= loose.mean_kl
        assert tight.top1 >= loose.top1


def test_thresholds_by_build_flags() -> None:
    assert thresholds_for("q4_k_m", "float32") is THRESHOLDS["q4_k_m"]
    assert thresholds_for("none", "bfloat16") is THRESHOLDS["bfloat16"]
    with pytest.raises(SpikeError, match=r"SPK543.*'q3_x'"):
        thresholds_for("q3_x", "float32")


def test_an_override_replaces_one_limit_and_names_the_nearest_key() -> None:
    limits = EXACT.override({"mean_kl": 0.5, "logit_error": None})
    assert (limits.mean_kl, limits.logit_error, limits.top1) == (0.5, None, EXACT.top1)
    with pytest.raises(SpikeError, match=r"SPK543.*'mean_k1'.*'mean_kl'"):
        EXACT.override({"mean_k1": 0.5})


def test_margins_and_logprobs_come_from_the_kept_logits() -> None:
    prompt: GoldenPrompt = greedy_set()[0].prompts[0]
    total = np.exp(prompt.top_logprobs).sum(-1) + np.exp(prompt.lse[:, 1] - prompt.lse[:, 0])
    np.testing.assert_allclose(total, 1.0, rtol=1e-12)
    assert (prompt.margins >= 0).all()
