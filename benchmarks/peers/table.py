"""The table: medians, and ratios only where every side ran."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from record import Record

LIKE = 1.5  # a peer is of like fidelity when its mean KL is at most so many times ours
ENOUGH = 5  # rounds


@dataclass(frozen=True)
class Row:
    """A line of the table: one figure of a run.

    Attributes:
        label: with the unit.
        run, figure: where it is in a round.
        digits: after the point.
        up: whether more is better.
    """

    label: str
    run: str
    figure: str
    digits: int
    up: bool


ROWS = (
    Row("decode at 32, tok/s", "decode 32", "tok/s", 1, True),
    Row("decode at 1024, tok/s", "decode 1024", "tok/s", 1, True),
    Row("prefill 512, tok/s", "prefill 512", "tok/s", 0, True),
    Row("prefill 2048, tok/s", "prefill 2048", "tok/s", 0, True),
    Row("first token of 512, ms", "prefill 512", "ms", 0, False),
    Row("8 streams, tok/s", "8 streams", "tok/s", 0, True),
    Row("32 streams, tok/s", "32 streams", "tok/s", 0, True),
    Row("load, s", "start", "load s", 3, False),
    Row("load to first token, s", "start", "first token s", 3, False),
    Row("peak memory, MB", "start", "peak MB", 0, False),
)
Values = dict[str, list[float]]


def table(record: Record, model: str, sides: Sequence[str], enough: int = ENOUGH) -> str:
    """Markdown for one model; `sides` asked for, ours first."""
    part = record.model(model)
    ours, *peers = sides
    head = ["", *sides, "ours / best peer", f"ours / best with KL <= {LIKE} ours"]
    lines = [f"### {model}", "", line(head), line(["---"] * len(head))]
    why: dict[str, list[str]] = {}
    for row in ROWS:
        values, reasons = gather(record, model, row, sides, enough)
        cells = [cell(values.get(side), row.digits) for side in sides]
        for among in (peers, like(part["fidelity"], ours, peers)):
            ratio = None if reasons or not among else against_best(values, ours, among, row.up)
            cells.append("-" if ratio is None else f"{ratio[0]:.2f} ({short(ratio[1])})")
        for reason in reasons:
            why.setdefault(reason, []).append(row.label.split(",")[0])
        lines.append(line([row.label, *cells]))
    notes = [f"- No ratio, {reason}: {', '.join(labels)}" for reason, labels in why.items()]
    return "\n".join([*lines, *statics(part, sides), "", *notes, *conditions(record, model, sides)])


def gather(
    record: Record, model: str, row: Row, sides: Sequence[str], enough: int
) -> tuple[Values, list[str]]:
    """A row's values by side, one a round; and why there is no ratio."""
    known = record.model(model)["sides"]
    able = [side for side in sides if side in known and "why" not in known[side]]
    rounds = record.rounds(model, row.run, able)
    values: Values = {}
    reasons = [
        f"{side} did not run ({known.get(side, {}).get('why', 'not prepared')})"
        for side in sides
        if side not in able
    ]
    if len(rounds) < enough:
        reasons.append(f"{len(rounds)} of {enough} rounds")
    for side in able:
        found = [r["figures"][side][row.figure] for r in rounds if side in r["figures"]]
        if found:
            values[side] = found
        broken = {r["failed"][side] for r in rounds if side in r["failed"]}
        reasons += [f"{side}: {reason}" for reason in sorted(broken)]
    return values, reasons


def against_best(
    values: Values, ours: str, peers: Sequence[str], up: bool
) -> tuple[float, str] | None:
    """Median over rounds of ours to the best peer's, and that peer."""
    if ours not in values or any(peer not in values for peer in peers):
        return None
    pick: Callable[..., str] = max if up else min
    best = pick(peers, key=lambda peer: statistics.median(values[peer]))
    pairs = zip(values[ours], values[best], strict=True)
    return statistics.median(mine / theirs for mine, theirs in pairs), best


def like(fidelity: Mapping[str, Any], ours: str, peers: Sequence[str]) -> list[str]:
    """Peers whose KL is near ours or below."""
    own = fidelity.get(ours, {}).get("mean_kl")
    if own is None:
        return []
    return [p for p in peers if fidelity.get(p, {}).get("mean_kl", float("inf")) <= LIKE * own]


def statics(part: dict[str, Any], sides: Sequence[str]) -> list[str]:
    """Rows that no round measures."""
    known, fidelity = part["sides"], part["fidelity"]
    rows = [line(["on disk, MB", *(cell(known.get(s, {}).get("disk MB"), 1) for s in sides)])]
    for label, name, digits in (
        ("mean KL", "mean_kl", 4),
        ("top-1 agreement", "top1", 3),
        ("perplexity", "perplexity", 2),
    ):
        rows.append(line([label, *(cell(fidelity.get(s, {}).get(name), digits) for s in sides)]))
    rows.append(line(["KV cache", *(known.get(s, {}).get("cache", "-") for s in sides)]))
    return [row.rstrip("|").rstrip() + " | | |" for row in rows]


def conditions(record: Record, model: str, sides: Sequence[str]) -> list[str]:
    """What the figures hold for."""
    part = record.model(model)
    rounds = part["rounds"]
    days = sorted({r["when"][:10] for r in rounds})
    lines = ["- " + ", ".join(f"{k} {v}" for k, v in record.data["machine"].items())]
    lines.append("- " + ", ".join(f"{k} {v}" for k, v in record.data["settings"].items()))
    if rounds:
        rates = [r["stream GB/s"] for r in rounds]
        span = f"{min(rates):.0f} - {max(rates):.0f}"
        lines.append(f"- {', '.join(days)}; stream read {span} GB/s between rounds")
    lines += shares(record, model, sides)
    source = part["fidelity"].get("source", {}).get("perplexity")
    lines += [f"- source in float32: perplexity {source:.2f}"] if source else []
    seen = {part["sides"][s]["versions"] for s in sides if "versions" in part["sides"].get(s, {})}
    lines.append("- " + "; ".join(sorted(seen)))
    return lines


def shares(record: Record, model: str, sides: Sequence[str]) -> list[str]:
    """How near decoding comes to a plain read of the weights, for sides that know their bytes."""
    lines = []
    for side in sides:
        megabytes = record.model(model)["sides"].get(side, {}).get("weights MB")
        found = [
            r["figures"][side]["tok/s"] * megabytes / 1e3 / r["stream GB/s"]
            for r in record.rounds(model, "decode 32", [side])
            if megabytes and side in r["figures"]
        ]
        if found:
            share = statistics.median(found)
            lines.append(
                f"- {side} at context 32 reads {megabytes:.1f} MB of weights a token, at "
                f"{share:.2f} of the stream read"
            )
    return lines


def cell(value: float | list[float] | None, digits: int) -> str:
    """A median."""
    if value is None:
        return "-"
    return f"{statistics.median(value) if isinstance(value, list) else value:.{digits}f}"


def short(side: str) -> str:
    """A side's name for a narrow column."""
    return side.replace("onnxruntime-genai", "genai").replace("openvino-genai", "openvino")


def line(cells: Sequence[str]) -> str:
    """A table line."""
    return "| " + " | ".join(cells) + " |"
