"""The peers' table: what it says and refuses to say; the record that a later run goes on with."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PEERS = Path(__file__).resolve().parents[2] / "benchmarks" / "peers"
OURS, FAST, EXACT = "ours", "fast but coarse", "slow but exact"
SIDES = [OURS, FAST, EXACT]
SETTINGS = {"threads": 2}


@pytest.fixture(scope="module")
def peers() -> Iterator[dict[str, ModuleType]]:
    """The modules `table` and `record`, which lie beside their program."""
    sys.path.insert(0, str(PEERS))
    try:
        import record
        import table

        yield {"record": record, "table": table}
    finally:
        sys.path.remove(str(PEERS))
        for name in ("record", "table"):
            sys.modules.pop(name, None)


def round_of(values: dict[str, float], foreign: float = 0.0, run: str = "decode 32") -> Any:
    return {
        "run": run,
        "when": "2026-11-30T12:00:00+00:00",
        "stream GB/s": 40.0,
        "foreign": foreign,
        "figures": {side: {"tok/s": value} for side, value in values.items()},
        "failed": {},
    }


def filled(peers: dict[str, ModuleType], path: Path, rounds: list[Any]) -> Any:
    record = peers["record"].Record(path, {"cpu": "some"}, SETTINGS)
    for side in SIDES:
        facts = {"stamp": side, "versions": side, "cache": "f16", "disk MB": 100.0}
        record.describe("model", side, facts)
    record.model("model")["rounds"] += rounds
    kl = {OURS: 0.05, FAST: 0.3, EXACT: 0.06}
    record.model("model")["fidelity"] = {side: {"mean_kl": value} for side, value in kl.items()}
    return record


def cells(text: str, label: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {label}")]
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def five(**changed: float) -> list[Any]:
    values = {OURS: 120.0, FAST: 150.0, EXACT: 100.0}
    return [round_of({**values, OURS: values[OURS] + i, **changed}) for i in range(5)]


def test_ratios_are_to_the_best_peer_and_to_the_best_of_like_fidelity(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    text = peers["table"].table(filled(peers, tmp_path / "a.json", five()), "model", SIDES)
    expected = ["122.0", "150.0", "100.0", f"0.81 ({FAST})", f"1.22 ({EXACT})"]
    assert cells(text, "decode at 32") == expected


def test_a_peer_that_did_not_run_leaves_no_ratio_and_is_named(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    record = filled(peers, tmp_path / "a.json", [])
    del record.model("model")["fidelity"][FAST]
    record.describe("model", FAST, {"why": "pip found no wheel"})
    record.model("model")["rounds"] += [round_of({OURS: 120.0, EXACT: 100.0}) for _ in range(5)]
    text = peers["table"].table(record, "model", SIDES)
    assert cells(text, "decode at 32") == ["120.0", "-", "100.0", "-", "-"]
    assert f"No ratio, {FAST} did not run (pip found no wheel): decode at 32" in text
    # Asked only about the other one, it answers.
    alone = peers["table"].table(record, "model", [OURS, EXACT])
    assert cells(alone, "decode at 32")[-1] == f"1.20 ({EXACT})"


def test_a_run_that_failed_leaves_no_ratio_and_is_quoted(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    rounds = five()
    del rounds[2]["figures"][FAST]
    rounds[2]["failed"][FAST] = "generate: out of memory"
    text = peers["table"].table(filled(peers, tmp_path / "a.json", rounds), "model", SIDES)
    assert cells(text, "decode at 32")[-2:] == ["-", "-"]
    assert f"No ratio, {FAST}: generate: out of memory: decode at 32" in text


@pytest.mark.parametrize("spoil", ["busy", "missing"])
def test_too_few_quiet_rounds_leave_no_ratio(
    peers: dict[str, ModuleType], tmp_path: Path, spoil: str
) -> None:
    rounds = five()
    if spoil == "busy":
        rounds[0]["foreign"] = 0.2
    else:
        rounds.pop()
    text = peers["table"].table(filled(peers, tmp_path / "a.json", rounds), "model", SIDES)
    assert cells(text, "decode at 32")[-2:] == ["-", "-"]
    assert "No ratio, 4 of 5 rounds: decode at 32" in text


def test_lower_is_better_picks_the_lowest(peers: dict[str, ModuleType], tmp_path: Path) -> None:
    rounds = [round_of({}, run="prefill 512") for _ in range(5)]
    for found in rounds:
        found["figures"] = {
            side: {"tok/s": 512e3 / ms, "ms": ms}
            for side, ms in {OURS: 80.0, FAST: 100.0, EXACT: 400.0}.items()
        }
    text = peers["table"].table(filled(peers, tmp_path / "a.json", rounds), "model", SIDES)
    assert cells(text, "first token of 512")[-2] == f"0.80 ({FAST})"
    assert cells(text, "prefill 512")[-2] == f"1.25 ({FAST})"


def test_a_record_goes_on_only_with_the_same_things(
    peers: dict[str, ModuleType], tmp_path: Path
) -> None:
    record = filled(peers, tmp_path / "a.json", five())
    record.save()
    again = peers["record"].Record(tmp_path / "a.json", {"cpu": "some"}, SETTINGS)
    assert len(again.rounds("model", "decode 32", SIDES)) == 5
    with pytest.raises(SystemExit, match="machine was"):
        peers["record"].Record(tmp_path / "a.json", {"cpu": "another"}, SETTINGS)
    with pytest.raises(SystemExit, match="have changed since"):
        again.describe("model", FAST, {"stamp": "new", "versions": "2"})
    # A newcomer has to be measured beside the others.
    assert again.rounds("model", "decode 32", [*SIDES, "new"]) == []
