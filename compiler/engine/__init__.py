"""The engine directory: its files, how it is published in one step, what is checked on opening.

schema.py     canonical JSON and typed reading of it
cache.py      sizes of the KV cache
config.py     config.json          manifest.py  manifest.json       evidence.py  evidence.json
weights.py    rank0.weights        report.py    report.html
writer.py     EngineWriter: staging, sealing, publishing            lock.py      one build at a time
directory.py  EngineDirectory.open: load-time checks                verify.py    content hashes
durable.py    fsync, exchange, out-of-space

The format is specified in docs/engine-format.md.
"""

from __future__ import annotations

from .config import (
    FORMAT_VERSION,
    PAGE,
    AliasSpec,
    BuildConfig,
    EngineConfig,
    FixedStateSpec,
    NearMiss,
    PassEntry,
    PrecisionEntry,
    PretrainedConfig,
    ProfileSpec,
    QuantizationConfig,
    SpikeConfig,
    StateSpec,
    TensorRtSpec,
    WeightSpec,
)
from .directory import EngineDirectory
from .evidence import Evidence, Measurement, PromptEvidence
from .manifest import FileEntry, Manifest, Provenance
from .verify import FileCheck
from .weights import WeightsWriter
from .writer import EngineWriter

__all__ = [
    "FORMAT_VERSION",
    "PAGE",
    "AliasSpec",
    "BuildConfig",
    "EngineConfig",
    "EngineDirectory",
    "EngineWriter",
    "Evidence",
    "FileCheck",
    "FileEntry",
    "FixedStateSpec",
    "Manifest",
    "Measurement",
    "NearMiss",
    "PassEntry",
    "PrecisionEntry",
    "PretrainedConfig",
    "ProfileSpec",
    "PromptEvidence",
    "Provenance",
    "QuantizationConfig",
    "SpikeConfig",
    "StateSpec",
    "TensorRtSpec",
    "WeightSpec",
    "WeightsWriter",
]
