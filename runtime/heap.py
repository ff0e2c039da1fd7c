"""The C heap while something makes a great many small allocations: reading a tokenizer does.

It grows by 132 KB at a time there, page by page; a fifth of that time went into page faults.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager

# Less than 32 MB: what is freed from there on is kept for later allocations of any size.
_ROOM = 30 << 20


@contextmanager
def roomy_heap() -> Iterator[None]:
    """Within it the heap has room in large pages; what is free at the end goes back.

    Only glibc needs that, and has the calls; elsewhere nothing happens.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        yield
        return
    _make_room(libc)
    try:
        yield
    finally:
        libc.malloc_trim(ctypes.c_size_t(0))


def _make_room(libc: ctypes.CDLL) -> None:
    """Leave `_ROOM` free bytes at the heap's end, to be backed by large pages (madvise(2))."""
    libc.malloc.restype = ctypes.c_void_p
    # A block of its own, until one of that size has been freed (mallopt(3), M_MMAP_THRESHOLD).
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(_ROOM))))
    start = libc.malloc(ctypes.c_size_t(_ROOM))
    first = -(-(start or 0) // mmap.PAGESIZE) * mmap.PAGESIZE
    if start and hasattr(mmap, "MADV_HUGEPAGE"):
        size = ctypes.c_size_t(_ROOM - 2 * mmap.PAGESIZE)
        libc.madvise(ctypes.c_void_p(first), size, mmap.MADV_HUGEPAGE)  # refused: small pages
    libc.free(ctypes.c_void_p(start))
