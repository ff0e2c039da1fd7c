"""The checks between a path and an engine: each has its own error code and says what to do.

They work relative to one descriptor of the directory and follow no link, so that what was checked
is what is read.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from ...errors import ExitCode, SpikeError
from . import manifest as names
from .config import FORMAT_VERSION, PAGE, EngineConfig
from .cpu_features import missing_cpu_features
from .manifest import FORMAT, FileEntry, Manifest, read_manifest
from .schema import SchemaError, decoder, parse
from .verify import hash_bytes

T = TypeVar("T")

FAILED_NOTE = "FAILED.txt"
"""Stands in a directory that a failed build kept; says why it failed."""

REBUILD = "Build it again with spike-build, or copy it again from where it came."

_engine_config = decoder(EngineConfig)

_MAX_JSON = 256 << 20
"""Largest config.json or manifest.json we read, in bytes: far above a 1000-layer model's."""


def require_replaceable(output: Path) -> None:
    """Raises SPK504 if `output` (no link) holds something that is not an engine of ours."""
    if reason := foreign_reason(output):
        raise SpikeError(
            "SPK504",
            "engine",
            f"{output} exists and {reason}.",
            "Only an engine of ours or an empty directory is replaced: choose another "
            "--output-dir, or move what is there away.",
        )


def foreign_reason(path: Path) -> str:
    """Why the thing at `path` must not be replaced by an engine; empty if it may be.

    Nothing, an empty directory, or an engine of ours (whole or damaged) without other files in it.
    """
    if not os.path.lexists(path):
        return ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        return "is not a directory" if error.errno == errno.ENOTDIR else f"({error.strerror})"
    try:
        found = set(os.listdir(fd))
        if not found:
            return ""
        if names.MANIFEST not in found:
            return "is not an engine (it has no manifest.json)"
        listed = _listed_files(_read_json(path, fd, names.MANIFEST))
    except (SpikeError, SchemaError):
        return "its manifest.json is not one of ours"
    finally:
        os.close(fd)
    strangers = sorted(found - listed - {names.MANIFEST, FAILED_NOTE})
    return f"holds files that are not part of the engine, first {strangers[0]}" if strangers else ""


def _listed_files(text: bytes) -> set[str]:
    """File names in a manifest of ours, of any format version."""
    data = parse(text)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise SchemaError("not a manifest of ours")
    files = data.get("files")
    return set(files) if isinstance(files, dict) else set()


def open_directory(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        what = "is a file, not a directory" if error.errno == errno.ENOTDIR else error.strerror
        raise SpikeError(
            "SPK501",
            "engine",
            f"no engine at {path}: {what}.",
            "Give the directory that spike-build wrote (its --output-dir).",
        ) from None


def read_engine(path: Path, fd: int) -> tuple[EngineConfig, Manifest]:
    found = set(os.listdir(fd))
    if names.MANIFEST not in found:
        raise _not_an_engine(path, found)
    text = _read_json(path, fd, names.MANIFEST)
    data = _decoded(path, names.MANIFEST, lambda: parse(text))
    _check_version(path, data)
    manifest = _decoded(path, names.MANIFEST, lambda: read_manifest(data, text))
    _check_files(path, fd, manifest.files, found)
    missing = missing_cpu_features(manifest.provenance.required_cpu_features)
    if missing:
        raise _cpu_error(path, missing)
    config = _read_config(path, fd, manifest)
    return config, manifest


def _not_an_engine(path: Path, found: set[str]) -> SpikeError:
    remedy = "Give the directory that spike-build wrote (its --output-dir)."
    what = "it has no manifest.json"
    if not found:
        what = "the directory is empty"
    elif any(n.endswith((".safetensors", ".bin", ".safetensors.index.json")) for n in found):
        what = "it looks like a Hugging Face checkpoint"
        remedy = f"Compile it first: spike-build --model {path} --output-dir ENGINE."
    elif any(n.endswith(".gguf") for n in found):
        what = "it holds GGUF files, which are not engines"
        remedy = "Build an engine from the model's Hugging Face checkpoint with spike-build."
    elif inner := sorted(n for n in found if (path / n / names.MANIFEST).is_file()):
        what = f"the engine is one level deeper, in {inner[0]}"
        remedy = f"Give {path / inner[0]}."
    return SpikeError("SPK501", "engine", f"{path} is not an engine: {what}.", remedy)


def _check_version(path: Path, data: object) -> None:
    """The format version first: a later version may change everything else."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise SpikeError(
            "SPK501",
            "engine",
            f"{path} is not an engine: its manifest.json is another program's.",
            "Give the directory that spike-build wrote (its --output-dir).",
        )
    theirs = data.get("format_version")
    if theirs == FORMAT_VERSION:
        return
    writer = data.get("spikeinfer_version", "unknown")
    newer = isinstance(theirs, int) and theirs > FORMAT_VERSION
    advice = f"Install spikeinfer {writer} or later" if newer else f"Install spikeinfer {writer}"
    raise SpikeError(
        "SPK502",
        "engine",
        f"{path} has engine format version {theirs} (written by SpikeInfer {writer}); this "
        f"SpikeInfer reads version {FORMAT_VERSION}.",
        f"{advice}, or build the engine again with this version.",
        ExitCode.UNSUPPORTED,
    )


def _check_files(path: Path, fd: int, files: Mapping[str, FileEntry], found: set[str]) -> None:
    for name, entry in sorted(files.items()):
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise SpikeError(
                "SPK513", "engine", f"{path}: the file name {name!r} leaves the engine.", REBUILD
            )
        if name not in found:
            raise SpikeError("SPK506", "engine", f"{path / name} is missing.", REBUILD)
        size = _regular(path, name, os.stat(name, dir_fd=fd, follow_symlinks=False)).st_size
        if size != entry.size:
            raise SpikeError(
                "SPK507",
                "engine",
                f"{path / name} has {size} bytes where the manifest says {entry.size}.",
                REBUILD,
            )
    strangers = sorted(found - files.keys() - {names.MANIFEST})
    if FAILED_NOTE in strangers:
        raise SpikeError(
            "SPK517",
            "engine",
            f"{path} is what a failed build kept; {FAILED_NOTE} in it says why it failed.",
            f"Fix that and build again. To look at it all the same, remove {FAILED_NOTE}.",
        )
    if strangers:
        raise SpikeError(
            "SPK511",
            "engine",
            f"{path / strangers[0]} is not part of the engine ({len(strangers)} such).",
            "Move it out of the engine directory.",
        )
    for name in (names.CONFIG, names.MODEL):
        if name not in files:
            raise SpikeError("SPK506", "engine", f"{path} lists no {name}.", REBUILD)


def _regular(path: Path, name: str, status: os.stat_result) -> os.stat_result:
    """The status of a file that is neither a link nor linked from elsewhere."""
    if not stat.S_ISREG(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "not a regular file"
    elif status.st_nlink != 1:
        kind = f"a hard link ({status.st_nlink} names)"
    else:
        return status
    raise SpikeError(
        "SPK510",
        "engine",
        f"{path / name} is {kind}; it could change or lead outside of the engine.",
        f"Copy the contents: cp -rL --no-preserve=links {path} NEW_DIRECTORY.",
    )


def _read_json(path: Path, fd: int, name: str) -> bytes:
    """Contents of one small regular file in the directory `fd`."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    status = os.stat(name, dir_fd=fd, follow_symlinks=False)
    if _regular(path, name, status).st_size > _MAX_JSON:
        raise _unreadable(path, name, f"it has {status.st_size} bytes")
    try:
        file = os.open(name, flags, dir_fd=fd)
    except OSError as error:
        raise _unreadable(path, name, error.strerror) from None
    with os.fdopen(file, "rb") as stream:
        _regular(path, name, os.fstat(stream.fileno()))
        return stream.read(_MAX_JSON)


def _read_config(path: Path, fd: int, manifest: Manifest) -> EngineConfig:
    text = _read_json(path, fd, names.CONFIG)
    # It is read anyway and steers everything else, so its contents are always checked.
    if hash_bytes(text) != manifest.files[names.CONFIG].sha256:
        raise SpikeError(
            "SPK508", "engine", f"{path / names.CONFIG} was damaged or edited.", REBUILD
        )
    config = _decoded(path, names.CONFIG, lambda: _engine_config(parse(text)))
    _decoded(path, names.CONFIG, lambda: _check_weights(config, manifest))
    _decoded(path, names.CONFIG, lambda: _check_linear(config))
    return config


def _check_weights(config: EngineConfig, manifest: Manifest) -> None:
    """Every tensor lies inside rank0.weights, on a page, apart from the others, and is hashed."""
    weights = sorted(config.spike.weights, key=lambda w: w.offset)
    end = 0
    for weight in weights:
        if weight.offset % PAGE or weight.offset < end or weight.bytes <= 0:
            raise SchemaError(f"{weight.name} lies at {weight.offset}, {weight.bytes} bytes long")
        end = weight.offset + weight.bytes
    size = manifest.files[names.WEIGHTS].size if names.WEIGHTS in manifest.files else 0
    if end > size:
        raise SchemaError(f"{weights[-1].name} ends at byte {end} of {size} in {names.WEIGHTS}")
    if {w.name for w in weights} != manifest.tensors.keys():
        raise SchemaError("its weights are not those that manifest.json has hashes of")


def _check_linear(config: EngineConfig) -> None:
    """A TensorRT engine, and no other, says what it was built for; its caches are its states."""
    spike, spec = config.spike, config.spike.tensorrt
    if (spec is not None) != (spike.abi == "linear"):
        raise SchemaError("the linear interface and the field tensorrt go together")
    if spec is None:
        return
    if [p.name for p in spec.profiles] != ["prefill", "decode"]:
        raise SchemaError("its profiles are not prefill and decode")
    if [pair.state for pair in spec.aliases] != [state.name for state in spike.states]:
        raise SchemaError("its aliased pairs are not its states")
    if any(len(sizes) != 3 for p in spec.profiles for sizes in (p.batches, p.steps, p.logit_rows)):
        raise SchemaError("a profile states least, typical and most of each size")
    if spec.capacity <= config.build_config.max_seq_len:
        raise SchemaError("its caches have no place for max_seq_len tokens and a scratch one")


def _decoded(path: Path, name: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except SchemaError as error:
        raise _unreadable(path, name, str(error)) from None


def _unreadable(path: Path, name: str, what: object) -> SpikeError:
    return SpikeError("SPK512", "engine", f"{path / name} cannot be used: {what}.", REBUILD)


def as_user_error(path: Path, error: SpikeError | OSError) -> SpikeError:
    """A failure to read a file of the engine, as SPK512; an error of ours as it is."""
    if isinstance(error, SpikeError):
        return error
    name = os.path.basename(error.filename or "a file")
    return _unreadable(path, name, error.strerror)


def _cpu_error(path: Path, missing: tuple[str, ...]) -> SpikeError:
    return SpikeError(
        "SPK509",
        "engine",
        f"{path} needs CPU features that this machine lacks: {', '.join(missing)}.",
        "Build the engine on this machine, or run it on one that has them.",
        ExitCode.UNSUPPORTED,
    )
