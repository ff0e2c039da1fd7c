"""Golden sets: record what a source model says, check what an engine says against it.

| file | holds |
|---|---|
| `sets.py` | what a set holds and its two files |
| `metrics.py` | KL, margins, errors per position |
| `thresholds.py` | limits per storage format |
| `check.py` | scorer + set -> report |
| `reference.py` | the source as a scorer (transformers, float32) |
| `record.py` | source -> set |
| `gate.py` | source and engine side by side, recorded on the fly |
| `diff.py` | set against set |
"""

from __future__ import annotations

from .check import NEAR_TIE, Divergence, GoldenReport, Scorer, check
from .diff import GoldenDiff, diff
from .gate import gate, text_windows
from .record import Prompt, digest, probe_tokens, record
from .reference import Rebuilt, Reference
from .sets import GoldenPrompt, GoldenSet
from .thresholds import CACHES, THRESHOLDS, Thresholds, thresholds_for

__all__ = [
    "CACHES",
    "NEAR_TIE",
    "THRESHOLDS",
    "Divergence",
    "GoldenDiff",
    "GoldenPrompt",
    "GoldenReport",
    "GoldenSet",
    "Prompt",
    "Rebuilt",
    "Reference",
    "Scorer",
    "Thresholds",
    "check",
    "diff",
    "digest",
    "gate",
    "probe_tokens",
    "record",
    "text_windows",
    "thresholds_for",
]
