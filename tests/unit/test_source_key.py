"""What a checkpoint's place in the build cache depends on: every file that decides the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from spikeinfer.runtime.build_cache import source_key


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPIKE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["model", "model.gguf", "model-00001-of-00002.gguf"])
def test_a_files_content_counts(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.write_bytes(b"GGUF one")
    before = source_key(file, {})
    file.write_bytes(b"GGUF another")
    assert source_key(file, {}) != before


def test_other_parts_of_a_split_file_count_and_other_files_do_not(tmp_path: Path) -> None:
    first = tmp_path / "model-00001-of-00002.gguf"
    first.write_bytes(b"GGUF one")
    alone = source_key(first, {})
    (tmp_path / "model2.gguf").write_bytes(b"GGUF of another model")
    assert source_key(first, {}) == alone
    (tmp_path / "model-00002-of-00002.gguf").write_bytes(b"GGUF two")
    assert source_key(first, {}) != alone
