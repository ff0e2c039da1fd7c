"""Several engines in one process, within one budget of memory: mapped when asked for.

Switching between mapped engines is a look-up. Where there is no room, engines that nobody uses make
some, the one used longest ago first: mapping and cache go back to the system, the tokenizer stays,
so that mapping it again takes a fraction of loading it.
"""

from __future__ import annotations

import difflib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

from ..compiler.engine.directory import EngineDirectory
from ..errors import ExitCode, SpikeError
from .build_cache import engine_at, require_model
from .checks import require_count, require_real
from .closing import Closing
from .engine import SpikeEngine, require_policies
from .kv_tier import TierOptions
from .loading import LoadedEngine, LoadOptions, load_engine, mapped_bytes
from .scheduler import SchedulingPolicy
from .session import engine_closed

# Requests end without telling the pool; who waits for that looks again so often, in seconds.
POLL = 0.02


class EngineOptions(TypedDict, total=False):
    """How engines are opened; `SpikeEngine` says what each option means."""

    max_seq_len: int | None
    threads: int | None
    kv_cache_memory: int | None
    max_num_tokens: int | None
    scheduling: SchedulingPolicy | None
    kv_tier: TierOptions | None


@dataclass
class _Place:
    """One engine of the pool, mapped or not."""

    path: Path
    users: int = 0
    bytes: int = 0  # while it is mapped
    engine: SpikeEngine | None = None  # while it is mapped
    loaded: LoadedEngine | None = None  # the last time; its texts are used again
    mapping: threading.Lock = field(default_factory=threading.Lock)  # one maps it, others wait

    @property
    def idle(self) -> bool:
        """Whether it may be unmapped: it is mapped, and nobody would miss it."""
        return self.users == 0 and self.engine is not None and self.engine.idle


class EnginePool(Closing):
    """Engines by name; several threads may use them. Closing it, or leaving its `with`, ends all.

    Args:
        engines: name -> engine directory, or checkpoint, built into the cache at first use.
        memory: bytes that mapped engines may take together: their files, and their KV caches at
            the size that `kv_cache_memory` or the engine's capacity gives them.
        options: of each of them.

    Raises:
        SpikeError: SPK601, nothing to load at a path; SPK608, an option out of range.
    """

    def __init__(
        self, engines: Mapping[str, str | Path], memory: int, **options: Unpack[EngineOptions]
    ) -> None:
        require_count("memory", memory, optional=False)
        require_count("max_num_tokens", options.get("max_num_tokens"))
        require_policies(options.get("scheduling"), options.get("kv_tier"))
        self._memory = memory
        self._options = options
        self._loading = LoadOptions(
            max_seq_len=options.get("max_seq_len"),
            threads=options.get("threads"),
            kv_cache_memory=options.get("kv_cache_memory"),
            spins=False,  # into another engine's steps: these took twice as long
        )
        self._places = {name: _Place(Path(path)) for name, path in engines.items()}
        for place in self._places.values():
            require_model(place.path)
        self._mapped: OrderedDict[str, _Place] = OrderedDict()  # used longest ago first
        self._changed = threading.Condition()
        self._closed = False

    @property
    def mapped(self) -> tuple[str, ...]:
        """Names of the mapped engines, the one used longest ago first."""
        with self._changed:
            return tuple(self._mapped)

    @property
    def mapped_bytes(self) -> int:
        """What they take of `memory`."""
        with self._changed:
            return self._taken()

    @contextmanager
    def use(self, name: str, timeout: float = 0.0) -> Iterator[SpikeEngine]:
        """An engine, mapped now if it wasn't; it stays so while the `with` block runs.

        Requests that are still running behind the block keep it mapped, too, until they end.

        Args:
            name: one of the pool's.
            timeout: seconds to wait for others to make room, if all of it is in use.

        Raises:
            SpikeError: SPK601, no such name; SPK608; SPK617, the pool was closed; SPK619, the
                engine needs more room than there is; whatever loading it raises.
        """
        require_real("timeout", timeout, finite=False)
        engine = self._enter(name, time.monotonic() + timeout)
        try:
            yield engine
        finally:
            self._leave(self._places[name])

    def evict(self, name: str, timeout: float = 0.0) -> None:
        """Unmap an engine now; nothing happens if it isn't mapped.

        Raises:
            SpikeError: SPK601, SPK608; SPK620, it is still in use after `timeout` seconds.
        """
        require_real("timeout", timeout, finite=False)
        place = self._place(name)
        with self._changed:
            deadline = time.monotonic() + timeout
            if not self._await(lambda: name not in self._mapped or place.idle, deadline):
                raise _in_use("evicted", [name])
            if name in self._mapped:
                self._unmap(name)

    def close(self, timeout: float = 0.0) -> None:
        """Unmap all engines; requests outside of any `use` block end. Then nothing is given out.

        Raises:
            SpikeError: SPK608; SPK620, some are inside of `use` blocks after `timeout` seconds: all
                stay as they are then.
        """
        require_real("timeout", timeout, finite=False)
        with self._changed:
            if not self._await(lambda: not self._used(), time.monotonic() + timeout):
                raise _in_use("closed", self._used())
            self._closed = True
            for name in tuple(self._mapped):
                self._unmap(name)

    def _place(self, name: str) -> _Place:
        if name not in self._places:
            near = difflib.get_close_matches(str(name), self._places, 1)
            raise SpikeError(
                "SPK601",
                "engine pool",
                f"it has no engine named {name!r}.",
                f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(self._places)}.",
            )
        return self._places[name]

    def _enter(self, name: str, deadline: float) -> SpikeEngine:
        place = self._place(name)
        with self._changed:
            if self._closed:
                raise engine_closed()
            place.users += 1  # from here on nobody unmaps it
        try:
            with place.mapping:
                if place.engine is None or place.engine.closed:
                    place.engine = self._map(name, place, deadline)
                engine = place.engine
            with self._changed:
                self._mapped.move_to_end(name)
        except BaseException:
            self._leave(place)
            raise
        return engine

    def _leave(self, place: _Place) -> None:
        with self._changed:
            place.users -= 1
            self._changed.notify_all()

    def _map(self, name: str, place: _Place, deadline: float) -> SpikeEngine:
        """Load it; meanwhile the others can be used."""
        before = place.loaded
        if before is not None and before.directory is not None and before.directory.is_current():
            directory = before.directory
        else:
            directory = EngineDirectory.open(engine_at(place.path))
        size = mapped_bytes(directory, self._loading)
        with self._changed:
            self._mapped.pop(name, None)  # a user may have closed it
            self._make_room(name, size, deadline)
            place.bytes = size
            self._mapped[name] = place
        try:
            place.loaded = load_engine(directory, self._loading, before)
            options = self._options
            return SpikeEngine.from_loaded(
                place.loaded,
                options.get("max_num_tokens"),
                options.get("scheduling"),
                options.get("kv_tier"),
            )
        except BaseException:
            with self._changed:
                del self._mapped[name]
                self._changed.notify_all()
            raise

    def _make_room(self, name: str, size: int, deadline: float) -> None:
        """Unmap who is idle, if that makes enough room; or wait for more of them."""
        if size > self._memory:
            raise _no_room(name, size, f"the pool has {self._memory:,} bytes in all")
        most = self._memory - size

        def in_use() -> int:
            return self._taken() - sum(self._idle().values())

        if not self._await(lambda: in_use() <= most, deadline):
            idle = self._idle()
            used = ", ".join(other for other in self._mapped if other not in idle)
            raise _no_room(name, size, f"of {self._memory:,} bytes too many are in use by {used}")
        for other in self._idle():
            if self._taken() > most:
                self._unmap(other)

    def _used(self) -> list[str]:
        return [name for name, place in self._places.items() if place.users]

    def _idle(self) -> dict[str, int]:
        """Engines that may be unmapped and their bytes, the one used longest ago first."""
        return {name: place.bytes for name, place in self._mapped.items() if place.idle}

    def _taken(self) -> int:
        return sum(place.bytes for place in self._mapped.values())

    def _unmap(self, name: str) -> None:
        place = self._mapped.pop(name)
        if place.engine is not None:
            place.engine.close()
        place.engine = None
        self._changed.notify_all()

    def _await(self, holds: Callable[[], bool], deadline: float) -> bool:
        """Wait until something holds; False when it doesn't in time. The caller has the lock."""
        while not holds():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(left, POLL))
        return True


def _no_room(name: str, size: int, why: str) -> SpikeError:
    return SpikeError(
        "SPK619",
        "engine pool",
        f"{name} needs {size:,} bytes, and {why}.",
        "Give the pool more memory or its engines a smaller kv_cache_memory, wait for the others "
        "(timeout), or end their use.",
    )


def _in_use(verb: str, names: list[str]) -> SpikeError:
    return SpikeError(
        "SPK620",
        "engine pool",
        f"{', '.join(names)} can't be {verb}: still in use.",
        "End the `use` blocks and requests, or give a timeout to wait for them.",
        ExitCode.USAGE,
    )
