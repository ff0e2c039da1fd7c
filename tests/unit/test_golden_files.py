"""Golden files: they round-trip to the byte, refuse contradictions, and the shipped ones hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import yaml
from spikeinfer.compiler.golden import GoldenSet, Prompt, diff
from spikeinfer.compiler.golden.record import digest, probe_tokens
from spikeinfer.compiler.golden.sets import Provenance
from spikeinfer.errors import SpikeError

SHIPPED = Path(__file__).resolve().parents[2] / "golden"
NAMES = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
V = 40


def small_set(seed: int = 0) -> GoldenSet:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((9, V)).astype(np.float32)
    probes = probe_tokens(V, 4)
    text = "« Où ? »\n東京: \\ 'a' \"b\""
    prompt = digest(
        Prompt("p", text=text, first=2), [1, 2, 3, 4, 5], [6, 7, 8, 9], logits, 6, probes
    )
    made = Provenance("m", "A", {"w": "ab"}, "float32", "eager", {"torch": "2.13.0+cpu"})
    return GoldenSet("small", V, probes, (prompt,), made)


def test_a_set_comes_back_equal(tmp_path: Path) -> None:
    golden = small_set()
    loaded = GoldenSet.load(golden.save(tmp_path))
    assert loaded.made == golden.made
    for field in dataclasses.fields(golden.prompts[0]):
        left = getattr(golden.prompts[0], field.name)
        np.testing.assert_array_equal(getattr(loaded.prompts[0], field.name), left)


def test_the_same_set_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        small_set().save(tmp_path / name)
    for file in ("small.yaml", "small.npz"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["small.npz", "small.yaml"]


def edited(path: Path, **changes: object) -> Path:
    page = yaml.safe_load(path.read_text())
    for key, value in changes.items():
        owner = page if key in page else page["prompts"][0]
        owner[key] = value
    path.write_text(yaml.safe_dump(page, allow_unicode=True))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "says format 2, this version reads 1"),
        ({"tokens": [1, 2]}, "has 4 rows"),
        ({"tokens": [1, 2, 3, 4, V]}, "outside the vocabulary"),
        ({"tokens": [1, 2, 3, 4, -1]}, "outside the vocabulary"),
        ({"made": {"model": "m"}}, "lacks or has too much"),
        ({"name": "q"}, None),
    ],
)
def test_contradictions_are_refused(
    tmp_path: Path, changes: dict[str, object], words: str | None
) -> None:
    path = edited(small_set().save(tmp_path), **changes)
    if words is None:  # the set's own name is free
        assert GoldenSet.load(path).name == "q"
        return
    with pytest.raises(SpikeError, match="SPK542") as raised:
        GoldenSet.load(path)
    assert words in str(raised.value)


def test_missing_and_damaged_files(tmp_path: Path) -> None:
    with pytest.raises(SpikeError, match="SPK541"):
        GoldenSet.load(tmp_path / "none.yaml")
    path = small_set().save(tmp_path)
    numbers = path.with_suffix(".npz")
    numbers.write_bytes(numbers.read_bytes()[:300])
    with pytest.raises(SpikeError, match="SPK541"):
        GoldenSet.load(path)
    numbers.write_bytes(b"")
    with pytest.raises(SpikeError, match="SPK541"):
        GoldenSet.load(path)
    path.write_text("[unclosed")
    with pytest.raises(SpikeError, match="SPK541"):
        GoldenSet.load(path)


def test_arrays_are_never_unpickled(tmp_path: Path) -> None:
    path = small_set().save(tmp_path)
    np.savez(path.with_suffix(".npz"), probe_ids=np.array([object()], dtype=object))
    with pytest.raises(SpikeError, match="SPK541"):
        GoldenSet.load(path)


def test_a_set_does_not_differ_from_itself() -> None:
    assert diff(small_set(), small_set()).lines(tolerance=0.0) == []


def test_a_diff_names_what_moved() -> None:
    left, right = small_set(0), small_set(1)
    (line,) = diff(left, right).lines(tolerance=1e-3)
    assert line.startswith("p: log-probabilities differ by")
    prompt = right.prompts[0]
    parted = dataclasses.replace(prompt, greedy=(6, 7, 0, 9))
    assert "part at step 2" in " ".join(_lines(left, right, parted))
    shorter = dataclasses.replace(prompt, tokens=(1, 2, 3, 4, 6))
    assert "tokenised differently" in " ".join(_lines(left, right, shorter))
    renamed = dataclasses.replace(prompt, name="q")
    assert _lines(left, right, renamed) == ["only in the first: p", "only in the second: q"]


def _lines(left: GoldenSet, right: GoldenSet, prompt: object) -> list[str]:
    return diff(left, dataclasses.replace(right, prompts=(prompt,))).lines(tolerance=100.0)


def test_a_diff_names_other_versions() -> None:
    left = small_set()
    made = dataclasses.replace(left.made, versions={"torch": "2.14.0"})
    (line,) = diff(left, dataclasses.replace(left, made=made)).lines(tolerance=0.0)
    assert "2.13.0+cpu" in line
    assert "2.14.0" in line


def test_six_sets_are_shipped_and_small() -> None:
    assert (
        sorted(
            ["SmolLM2-135M-Instruct", "gemma-3-270m"]
            + [f"tiny-{name}" for name in ("gemma3", "gpt2", "llama", "qwen3")]
        )
        == NAMES
    )
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 2_000_000


@pytest.mark.parametrize("name", NAMES)
def test_shipped_sets_are_consistent(name: str) -> None:
    golden = GoldenSet.load(SHIPPED / f"{name}.yaml")
    assert golden.name == name
    assert golden.made.dtype == "float32"
    for prompt in golden.prompts:
        start = len(prompt.tokens) - 1 - prompt.first
        clear = prompt.margins[start:-1] >= 0.05
        source = prompt.top_ids[start:-1, 0]
        # Cached decoding and one teacher-forced run agree wherever there is no near tie.
        np.testing.assert_array_equal(source[clear], np.asarray(prompt.greedy)[clear])
        following = np.asarray(prompt.sequence[prompt.first + 1 :])
        row, column = np.nonzero(prompt.top_ids[:-1] == following[:, None])
        np.testing.assert_array_equal(prompt.next_logits[row], prompt.top_logits[row, column])


def test_the_tiny_prompts_cross_their_boundaries() -> None:
    for name in ("tiny-gemma3", "tiny-gpt2", "tiny-llama", "tiny-qwen3"):
        lengths = [len(p.sequence) for p in GoldenSet.load(SHIPPED / f"{name}.yaml").prompts]
        assert max(lengths) == 64
    window = GoldenSet.load(SHIPPED / "gemma-3-270m.yaml").prompts[-1]
    assert len(window.tokens) > 512
