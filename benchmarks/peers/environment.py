"""Where peers live: a virtual environment each, with pinned packages, made once."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "peers"
WORKERS = Path(__file__).resolve().parents[1] / "workers"


class DidNotRun(Exception):
    """Why a peer can't be installed, can't convert a model, or doesn't run."""


def run(what: str, command: Sequence[str], log: Path, cwd: Path | None = None) -> None:
    """Run a command, its output into `log`.

    Raises:
        DidNotRun: it failed; the message ends with the last line it printed.
    """
    print(f"{what} (log: {log})", flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, cwd=cwd)
    if done.returncode:
        lines = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        raise DidNotRun(f"{what}: exit code {done.returncode}: {lines[-1].strip()[:300]}")


@dataclass(frozen=True)
class Environment:
    """A venv under `.cache/peers/NAME/venv`.

    Attributes:
        name: its folder.
        packages: pinned requirements.
        broken: packages that come along and keep others from being imported: taken out again.
    """

    name: str
    packages: tuple[str, ...]
    broken: tuple[str, ...] = ()

    @property
    def root(self) -> Path:
        """Everything of this peer lies here."""
        return CACHE / self.name

    @property
    def python(self) -> Path:
        """The interpreter."""
        return self.root / "venv" / "bin" / "python"

    def install(self) -> None:
        """Make it, unless one with these very packages is there.

        Raises:
            DidNotRun: pip failed.
        """
        stamp = self.root / "installed"
        wanted = "\n".join(self.packages) + "\n"
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        stamp.unlink(missing_ok=True)
        venv.create(self.root / "venv", with_pip=True, clear=True)
        pip = [str(self.python), "-m", "pip", "install", "-q", *self.packages]
        run(f"installing {self.name}", pip, self.root / "install.log")
        if self.broken:
            pip = [str(self.python), "-m", "pip", "uninstall", "-q", "-y", *self.broken]
            run(f"repairing {self.name}", pip, self.root / "repair.log")
        stamp.write_text(wanted)

    def worker(self, script: str) -> list[str]:
        """What starts one of `benchmarks/workers` here."""
        return [str(self.python), str(WORKERS / script)]
