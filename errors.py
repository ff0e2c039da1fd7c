"""Errors a user can act on: a stable code, where, what is wrong, what to do.

Any part may import this module; it imports nothing of ours. Codes are never reused:
SPK1xx checkpoint, 2xx lowering, 3xx passes, 4xx quantisation, 5xx engine, 6xx runtime, 7xx server,
8xx command line and recipes.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Process exit codes of `spike` and `spike-build`."""

    OK = 0
    USAGE = 2
    BAD_INPUT = 3
    GOLDEN_FAILED = 4
    UNSUPPORTED = 5
    INTERNAL = 70


class SpikeError(Exception):
    """A user's mistake or an unsupported case: printed as one block, never as a traceback.

    Args:
        code: stable code, for example ``SPK104``; `spike explain CODE` describes it.
        where: the part that noticed, in the user's words (``checkpoint``, ``recipe``).
        what: cause, with the names and numbers the user needs.
        remedy: what to do about it.
        exit_code: process exit code; bad input unless said otherwise.
    """

    def __init__(
        self,
        code: str,
        where: str,
        what: str,
        remedy: str,
        exit_code: ExitCode = ExitCode.BAD_INPUT,
    ) -> None:
        super().__init__(code, where, what, remedy, exit_code)  # so that it can be pickled
        self.code = code
        self.where = where
        self.what = what
        self.remedy = remedy
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.code} {self.where}: {self.what} {self.remedy}"
