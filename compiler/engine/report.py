"""report.html: one self-contained page that shows a person what was built and how good it is.

Plain HTML without scripts or outside resources; everything in it comes from config.json,
evidence.json and manifest.json, so equal engines have equal reports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from html import escape
from math import prod

from .cache import cache_line
from .chart import pareto_chart
from .config import EngineConfig, WeightSpec
from .evidence import Evidence, Measurement
from .manifest import Manifest
from .pareto import Pareto, ParetoPoint

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1c1c1c; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .25rem .75rem .25rem 0; border-bottom: 1px solid #ddd;
         vertical-align: top; overflow-wrap: anywhere; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.ok { color: #176b2c; } .bad { color: #b00020; font-weight: 600; } .dim { color: #666; }
code { font-size: .85rem; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6e6; background: #161616; } th, td { border-color: #3a3a3a; }
  .ok { color: #7bd88f; } .bad { color: #ff7b8a; } .dim { color: #a0a0a0; } }
"""

_MISSES_SHOWN = 20
"""Near misses listed per pass; an 80-layer model has the same one 80 times."""


def render_report(
    config: EngineConfig, manifest: Manifest, evidence: Evidence, pareto: Pareto | None = None
) -> str:
    """The page as text."""
    model = config.pretrained_config
    name = f"{model.architecture} {model.quantization.quant_algo}"
    sections = (
        _summary(config, manifest),
        _golden(evidence),
        _pareto(pareto),
        _sizes(config.spike.weights),
        _precision(config),
        _passes(config),
        _free_form(config),
        _provenance(manifest),
        _files(manifest),
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{escape(name)}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n<h1>{escape(name)}</h1>\n"
        + "\n".join(sections)
        + "\n</body></html>\n"
    )


def _summary(config: EngineConfig, manifest: Manifest) -> str:
    model, build = config.pretrained_config, config.build_config
    parameters = sum(prod(w.shape) for w in config.spike.weights)
    stored = sum(w.bytes for w in config.spike.weights)
    rows = [
        ("Model", f"{model.model_type}, {model.num_hidden_layers} layers, width "
         f"{model.hidden_size}, vocabulary {model.vocab_size}"),
        ("Weights", f"{parameters / 1e6:,.1f} M elements in {stored / 1e6:,.1f} MB"
         f"{f', {8 * stored / parameters:.2f} bits each' if parameters else ''}"),
        ("KV cache", cache_line(config)),
        ("Interface", f"{config.spike.abi} on {config.spike.backend}"),
        ("Capacity", f"{build.max_num_tokens} tokens per step, {build.max_batch_size} sequences, "
         f"{build.max_seq_len} tokens each"),
        ("Engine id", manifest.engine_id),
    ]  # fmt: skip
    return _table("Engine", ("", ""), rows)


def _golden(evidence: Evidence) -> str:
    head = {"passed": '<span class="ok">passed</span>', "failed": '<span class="bad">failed</span>'}
    status = head.get(evidence.status, '<span class="dim">not run</span>')
    reason = f": {escape(evidence.reason)}" if evidence.reason else ""
    against = f" against {escape(evidence.golden_set)}" if evidence.golden_set else ""
    rows: list[tuple[object, ...]]
    text = f"<h2>Golden check</h2>\n<p>{status}{against}{reason}</p>\n"
    if evidence.validated_on_gpu is not None:
        seen = "validated" if evidence.validated_on_gpu else "not validated"
        text += f"<p>Executed: {escape(evidence.executed or 'nothing')}. {seen} on a GPU.</p>\n"
    if evidence.measurements:
        rows = [(m.name, _number(m.value), _limit(m)) for m in evidence.measurements]
        text += _rows(("Measure", "#Value", "Limit"), rows)
    if evidence.prompts:
        rows = [
            (p.name, p.tokens, _number(p.mean_kl), _number(p.p99_kl), f"{p.top1_agreement:.1%}",
             "none" if p.first_divergence is None else p.first_divergence)
            for p in evidence.prompts
        ]  # fmt: skip
        header = ("Prompt", "#Tokens", "#Mean KL", "#p99 KL", "#Top-1", "#First divergence")
        text += _rows(header, rows)
    return text


def _limit(measure: Measurement) -> str:
    if measure.limit is None:
        return "recorded only"
    sign = "at most" if measure.better == "lower" else "at least"
    return f"{sign} {_number(measure.limit)}, {'kept' if measure.passed else 'BROKEN'}"


def _pareto(pareto: Pareto | None) -> str:
    """The quality solver's chart, and the engines that it built."""
    if pareto is None:
        return ""
    limits = [f"mean KL at most {pareto.max_kl:g} nats"] if pareto.max_kl is not None else []
    limits += [f"at most {pareto.max_bytes:,} bytes"] if pareto.max_bytes is not None else []
    built = [_built(point) for point in pareto.points if point.measured_kl is not None]
    header = ("#Bytes", "#Bits per weight", "#Predicted KL", "#Measured KL", "Formats", "")
    return (
        f"<h2>Quality budget</h2>\n<p>{escape(', '.join(limits))}</p>\n"
        + pareto_chart(pareto)
        + _rows(header, built)
    )


def _built(point: ParetoPoint) -> tuple[object, ...]:
    formats = ", ".join(f"{count} {name}" for name, count in point.formats.items())
    return (
        f"{point.bytes:,}", f"{point.bits_per_weight:.2f}", _number(point.predicted_kl),
        _number(point.measured_kl or 0.0), formats, "this engine" if point.chosen else "",
    )  # fmt: skip


def _sizes(weights: Sequence[WeightSpec]) -> str:
    groups: dict[tuple[str, str], list[WeightSpec]] = defaultdict(list)
    for weight in weights:
        groups[weight.role, weight.format].append(weight)
    total = sum(w.bytes for w in weights) or 1
    rows = []
    for (role, form), members in sorted(groups.items(), key=lambda g: -sum(w.bytes for w in g[1])):
        size = sum(w.bytes for w in members)
        bits = 8 * size / max(1, sum(prod(w.shape) for w in members))
        rows.append((role, form, len(members), f"{size / 1e6:.2f}", f"{size / total:.1%}",
                     f"{bits:.2f}"))  # fmt: skip
    header = ("Role", "Format", "#Tensors", "#MB", "#Share", "#Bits per element")
    return _table("Weights by role", header, rows)


def _precision(config: EngineConfig) -> str:
    rows = [(p.scope, p.value, p.dtype, p.reason) for p in config.spike.precision]
    return _table("Precision", ("Where", "Value", "Computed in", "Why"), rows)


def _passes(config: EngineConfig) -> str:
    rows = []
    for entry in config.spike.passes:
        misses = [f"{m.where}: {m.reason}" for m in entry.near_misses[:_MISSES_SHOWN]]
        if len(entry.near_misses) > _MISSES_SHOWN:
            misses.append(f"and {len(entry.near_misses) - _MISSES_SHOWN} more")
        facts = [f"{key}: {_text(entry.facts[key])}" for key in sorted(entry.facts)]
        rows.append((entry.name, entry.fired, "\n".join(facts), "\n".join(misses)))
    return _table("Passes", ("Pass", "#Fired", "Facts", "Near misses"), rows)


def _free_form(config: EngineConfig) -> str:
    """The `report` object: a list of flat objects becomes a table, anything else a line."""
    parts = []
    for title, value in sorted(config.spike.report.items()):
        if isinstance(value, list | tuple) and value and all(isinstance(v, dict) for v in value):
            header = tuple(value[0])
            rows = [tuple(_text(row.get(column)) for column in header) for row in value]
            parts.append(_table(title, header, rows))
        elif isinstance(value, dict):
            parts.append(_table(title, ("", ""), [(k, _text(v)) for k, v in value.items()]))
        else:
            parts.append(_table(title, ("",), [(_text(value),)]))
    return "\n".join(parts)


def _provenance(manifest: Manifest) -> str:
    made = manifest.provenance
    rows: list[tuple[object, ...]] = [("checkpoint", made.source_hash)]
    rows += [(f"recipe: {key}", _text(made.recipe[key])) for key in sorted(made.recipe)]
    rows += [("SpikeInfer", manifest.spikeinfer_version)]
    rows += sorted(made.versions.items())
    rows += [("CPU features needed", ", ".join(made.required_cpu_features) or "none")]
    return _table("Made from", ("", ""), rows)


def _files(manifest: Manifest) -> str:
    rows = [(name, f"{e.size:,}", e.sha256) for name, e in sorted(manifest.files.items())]
    return _table("Files", ("Name", "#Bytes", "sha256"), rows)


def _table(title: str, header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return f"<h2>{escape(title)}</h2>\n{_rows(header, rows)}"


def _rows(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table; a header that starts with ``#`` marks a column of numbers."""
    kinds = [' class="n"' if name.startswith("#") else "" for name in header]
    lines = [_row("td", kinds, [_cell(value) for value in row]) for row in rows]
    if not lines:
        return '<p class="dim">nothing recorded</p>\n'
    if any(header):
        lines.insert(0, _row("th", kinds, [escape(name.lstrip("#")) for name in header]))
    return "<table>\n" + "\n".join(lines) + "\n</table>\n"


def _row(tag: str, kinds: Sequence[str], cells: Sequence[str]) -> str:
    inner = "".join(f"<{tag}{k}>{cell}</{tag}>" for k, cell in zip(kinds, cells, strict=True))
    return f"<tr>{inner}</tr>"


def _cell(value: object) -> str:
    return escape(str(value)).replace("\n", "<br>")


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(value: object) -> str:
    return _number(value) if isinstance(value, float) else str(value)
