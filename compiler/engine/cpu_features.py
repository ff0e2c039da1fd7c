"""Which of an engine's required CPU features this machine lacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def missing_cpu_features(required: Iterable[str], cpuinfo: Path = _CPUINFO) -> tuple[str, ...]:
    """Required flags (as /proc/cpuinfo spells them) that the first CPU does not list."""
    wanted = tuple(required)
    if not wanted:
        return ()
    have = _flags(cpuinfo)
    return tuple(name for name in wanted if name not in have)


def _flags(cpuinfo: Path) -> frozenset[str]:
    """Flags of the first CPU (`flags` on x86, `Features` on Arm); empty if the file is missing."""
    try:
        with cpuinfo.open() as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()
