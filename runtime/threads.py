"""How many threads to compute with: the physical cores this process may use."""

from __future__ import annotations

import os
from pathlib import Path

CPU_DIR = Path("/sys/devices/system/cpu")
CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def default_threads() -> int:
    """Physical cores within the affinity mask, no more than the container's CPU quota."""
    cores = {_core(cpu) for cpu in _usable_cpus()}
    return max(1, min(len(cores), _quota()))


def _usable_cpus() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _core(cpu: int) -> str:
    """A name that hyper-threads of one core share; the cpu's own where the kernel doesn't say."""
    try:
        return (CPU_DIR / f"cpu{cpu}" / "topology" / "core_cpus_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """CPUs that the cgroup allows ("200000 100000" = 2); many where there is no limit."""
    unlimited = 1 << 16
    try:
        quota, period = CGROUP_QUOTA.read_text().split()
    except (OSError, ValueError):
        return unlimited
    return unlimited if quota == "max" else max(1, int(quota) // int(period))
