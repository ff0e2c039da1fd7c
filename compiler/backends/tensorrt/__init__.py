"""A placed graph becomes a TensorRT network, and the network a serialized engine, without a GPU.

target.py    what is built for, and every refusal before work
plan.py      the network as pure data: tensors, layers, profiles; JSON
constants.py what the network holds of a constant: rounded to its type, or int4 blocks
build.py     plan to engine bytes, by the network API (the only user of tensorrt_rtx with check.py)
check.py     the built network against the graph it came from

Nothing here imports tensorrt_rtx before an engine is built or checked.
"""

from __future__ import annotations

from .build import BuiltEngine, build_engine, installed_version
from .check import Finding, check_network
from .constants import INT4_BLOCK, INT4_FORMAT, Constants, Int4Matrix
from .plan import NetworkPlan
from .planner import plan_network
from .target import Profile, Target, have_gpu

__all__ = [
    "INT4_BLOCK",
    "INT4_FORMAT",
    "BuiltEngine",
    "Constants",
    "Finding",
    "Int4Matrix",
    "NetworkPlan",
    "Profile",
    "Target",
    "build_engine",
    "check_network",
    "have_gpu",
    "installed_version",
    "plan_network",
]
