# SPDX-License-Identifier: Apache-2.0
"""A base on its way into the object store: git reads it while it is unpacked."""

import random
from pathlib import Path

import pytest
from sdists import write_sdist

from stack.base.releases import Release
from stack.base.store import Store, base_ref
from stack.core.cache import Cache
from stack.core.errors import SourceError
from stack.core.git import GitFailed

LARGE = random.Random(0).randbytes(1 << 20)
"""More than a pipe holds, and than git keeps before it writes."""


def test_a_refused_archive_leaves_nothing(
    release: Release, tmp_path: Path, cache: Cache
) -> None:
    store = Store(cache)
    files = {"a.bin": LARGE, "small": b"", "b/../../c": b"hostile"}
    archive = write_sdist(tmp_path / "vllm-9.1.0.tar.gz", files)
    with pytest.raises(SourceError, match="leaves the tree"), store.writing() as writer:
        writer.import_base(release, archive)
    assert store.refs() == {}
    left = [*cache.objects.rglob("*pack*/*"), *cache.objects.glob("fast_import*")]
    assert left == []


def test_an_archive_is_imported_byte_for_byte(
    release: Release, tmp_path: Path, cache: Cache
) -> None:
    store = Store(cache)
    archive = write_sdist(tmp_path / "vllm-9.1.0.tar.gz", {"a.bin": LARGE, "b": b""})
    with store.writing() as writer:
        writer.import_base(release, archive)
    commit = store.refs()[base_ref(release)]
    assert store.git.file(commit.tree, "a.bin") == LARGE
    assert store.git.file(commit.tree, "b") == b""


def test_git_says_why_it_read_no_further(cache: Cache) -> None:
    store = Store(cache)
    with store.writing() as writer, pytest.raises(GitFailed) as caught:
        writer.fast_import(part for part in (b"nonsense\n", *[LARGE] * 9))
    assert "nonsense" in caught.value.stderr
