"""A placed graph becomes a TensorRT network, and the network a serialized engine, without a GPU.

target.py       what is built for, and every refusal before work
planner.py      placed graph to plan: interface, order, names; by
    emission.py, layers.py, rotary.py, attention.py (one small function per op), precision.py
plan.py         the network as pure data: tensors, layers, profiles; JSON
constants.py    what the network holds of a constant: rounded to its type, or int4 blocks
report.py       sizes and memory, from the plan
build.py        plan to engine bytes, by network.py (plan to the network API)
check.py        the built network against the graph: read.py (the network as it is), meaning.py
    (what its layers compute), check_interface.py, check_constants.py, check_meaning.py

Nothing here imports tensorrt_rtx before an engine is built or checked.
"""

from __future__ import annotations

from .build import BuiltEngine, build_engine, installed_version
from .check import Finding, check_network
from .constants import INT4_BLOCK, INT4_FORMAT, Constants, Int4Matrix
from .plan import NetworkPlan
from .planner import plan_network
from .report import MemoryReport, memory_report
from .target import Profile, Target, have_gpu

__all__ = [
    "INT4_BLOCK",
    "INT4_FORMAT",
    "BuiltEngine",
    "Constants",
    "Finding",
    "Int4Matrix",
    "MemoryReport",
    "NetworkPlan",
    "Profile",
    "Target",
    "build_engine",
    "check_network",
    "have_gpu",
    "installed_version",
    "memory_report",
    "plan_network",
]
