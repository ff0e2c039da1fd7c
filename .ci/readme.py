"""Runs every ```bash and ```python block of the README, in order, as a reader would.

A block in another language (```console, ```text) shows output or is for the reader's own paths.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the blocks; stop at the first that fails."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    if not blocks:
        sys.exit("README.md has no block to run")
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    for language, text in blocks:
        print(f"--- {language}\n{text.rstrip()}\n---", flush=True)
        # -P: the checkout's folders (kernels/ ...) must not pass for packages of other projects.
        command = ["bash", "-euo", "pipefail"] if language == "bash" else ["python", "-P"]
        subprocess.run(
            [*command, "-c", text], cwd=ROOT, env={**os.environ, "PATH": path}, check=True
        )


if __name__ == "__main__":
    main()
