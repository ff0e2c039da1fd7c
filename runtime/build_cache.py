"""A checkpoint path where an engine is wanted: build it once, keep it by what it was built from.

The key is a hash over every byte of the checkpoint and every option, so a changed checkpoint is
built again and a renamed one is not. Hashing gigabytes takes seconds; so the hash of a file is kept
with its size, inode and times, and read again only when one of these changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..compiler.engine.config import FORMAT_VERSION
from ..compiler.engine.manifest import MANIFEST, MODEL
from ..errors import ExitCode, SpikeError
from .loading import canonical_formats
from .text_codec import read_json

ENGINE_FILES = (MANIFEST, MODEL)
GGUF = ".gguf"
LOG = logging.getLogger(__name__)
# What decides the engine: weights, configuration, tokenizer.
SOURCE_SUFFIXES = (".json", ".safetensors", ".jinja", ".model", ".txt", ".gguf")


def is_engine(path: Path) -> bool:
    """Whether `path` looks like an engine directory, maybe a damaged one."""
    return any((path / name).is_file() for name in ENGINE_FILES)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` looks like a Hugging Face checkpoint directory, or is a GGUF file."""
    if path.suffix == GGUF:
        return path.is_file()
    return (path / "config.json").is_file() and not is_engine(path)


def cache_dir() -> Path:
    """``$SPIKE_CACHE_DIR``, else ``spikeinfer`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("SPIKE_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spikeinfer"


def engine_at(
    path: Path, quant_config: Mapping[str, str] | None = None, max_seq_len: int | None = None
) -> Path:
    """The engine directory of a path: the path itself, or what its checkpoint was built into.

    Raises:
        SpikeError: as `require_model` and `engine_for`.
    """
    require_model(path)
    return path if is_engine(path) else engine_for(path, quant_config, max_seq_len)


def require_model(path: Path) -> None:
    """Raises SpikeError SPK601 if the path holds neither an engine nor a checkpoint."""
    if not is_engine(path) and not is_checkpoint(path):
        state = "does not exist" if not path.exists() else "is neither"
        raise SpikeError(
            "SPK601",
            "path",
            f"{path} {state}: an engine directory has a manifest.json, a checkpoint directory "
            "a config.json.",
            "Give the output directory of spike-build, a Hugging Face checkpoint directory or a "
            ".gguf file.",
        )


def engine_for(
    checkpoint: Path, quant_config: Mapping[str, str] | None, max_seq_len: int | None
) -> Path:
    """The engine of a checkpoint with these options, built now if it wasn't before.

    Two processes asking for the same engine build it once.

    Raises:
        SpikeError: SPK613, the build extra is not installed; whatever the build itself raises.
    """
    options = build_options(quant_config, _within_model(checkpoint, max_seq_len))
    root = cache_dir() / "engines"
    root.mkdir(parents=True, exist_ok=True)
    engine = root / f"{checkpoint.resolve().name}-{source_key(checkpoint, options)[:16]}"
    with _locked(root / f"{engine.name}.lock"):
        if not is_engine(engine):
            _build(checkpoint, engine, options)
    return engine


def _within_model(checkpoint: Path, max_seq_len: int | None) -> int | None:
    """`max_seq_len`, but at most the positions the model was made for: it is an upper bound."""
    config = read_json(checkpoint / "config.json")
    positions = config.get("text_config", config).get("max_position_embeddings")
    if max_seq_len is None or not isinstance(positions, int):
        return max_seq_len
    return min(max_seq_len, positions)


def build_options(
    quant_config: Mapping[str, str] | None, max_seq_len: int | None
) -> dict[str, Any]:
    """Fields of the BuildRequest besides the two paths; what is not asked for is left out."""
    formats = canonical_formats(quant_config)
    options: dict[str, Any] = {"enable_streaming": True}
    if "linear" in formats:
        options["quantization"] = formats["linear"]
    if "kv_cache" in formats:
        options["kv_cache_dtype"] = formats["kv_cache"]
    if max_seq_len is not None:
        options["max_seq_len"] = max_seq_len
    return options


def source_key(checkpoint: Path, options: Mapping[str, Any]) -> str:
    """Hash (hex) of the checkpoint's contents, the options and our versions."""
    from .. import __version__

    files = sorted(path for path in _sources(checkpoint) if path.is_file())
    known = _KnownHashes(cache_dir() / "hashes.json")
    content = {path.name: known.sha256(path) for path in files}
    known.save()
    parts = {
        "files": content,
        "options": dict(options),
        "format": FORMAT_VERSION,
        "version": __version__,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _sources(checkpoint: Path) -> list[Path]:
    """Files that decide the engine; of a GGUF file also the other parts, if it is split."""
    if checkpoint.is_dir():
        return [path for path in checkpoint.iterdir() if path.suffix in SOURCE_SUFFIXES]
    stem, split, _ = checkpoint.name.partition("-00001-of-")
    if not split:
        return [checkpoint]
    beside = checkpoint.parent.iterdir()
    return [path for path in beside if path.name.startswith(f"{stem}-") and path.suffix == GGUF]


class _KnownHashes:
    """Hashes of files by path and what `stat` says about them, kept in one JSON file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._entries: dict[str, list[Any]] = {}
        self._changed = False
        with suppress(OSError, ValueError):
            self._entries = dict(json.loads(path.read_text("utf-8")))

    def sha256(self, path: Path) -> str:
        name, stat = str(path.resolve()), path.stat()
        mark = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        entry = self._entries.get(name)
        if entry is None or entry[:-1] != mark:
            with path.open("rb") as file:
                entry = [*mark, hashlib.file_digest(file, "sha256").hexdigest()]
            self._entries[name] = entry
            self._changed = True
        return str(entry[-1])

    def save(self) -> None:
        """Write the file in one step; without write access the hashes are just not kept."""
        if not self._changed:
            return
        draft = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(self._entries), "utf-8")
            draft.replace(self._path)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when the process dies."""
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build(checkpoint: Path, engine: Path, options: Mapping[str, Any]) -> None:
    driver = _driver()
    # A warning, so that it is seen: nobody expects a constructor to take minutes.
    LOG.warning("building an engine from %s (once; kept in %s)", checkpoint, engine)
    driver.build(driver.BuildRequest(model=checkpoint, output_dir=engine, **options))


def _driver() -> Any:
    """The compiler's driver. Found at run time: the runtime does not depend on the compiler."""
    package = __package__.rpartition(".")[0]
    try:
        return importlib.import_module(f"{package}.driver")
    except ModuleNotFoundError as error:
        raise SpikeError(
            "SPK613",
            "build",
            f"the model path is a checkpoint and building it needs {error.name}, which is missing.",
            "Install the build extra (`pip install 'spikeinfer[build]'`) or give the path of an "
            "engine made by spike-build.",
            ExitCode.UNSUPPORTED,
        ) from error
