# SPDX-License-Identifier: Apache-2.0
"""The package index of built wheels: pip installs from it, checksums hold."""

import subprocess
import sys
from pathlib import Path

import pytest
from shipped_stack import ShippedStack

from xpustack.core.errors import UsageError
from xpustack.release.index_page import write_index


def download(index: Path, to: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps"]
    return subprocess.run(
        [*command, "--index-url", index.as_uri(), "--dest", str(to), "vllm"],
        capture_output=True,
        text=True,
    )


def test_pip_takes_a_wheel_from_it_and_refuses_a_changed_one(
    shipped: ShippedStack, tmp_path: Path
):
    artifacts = shipped.ship(tmp_path / "dist")
    indexed = write_index(shipped.releases, tmp_path / "dist")
    assert list(indexed.wheels) == [f"v1.0/{artifacts.wheel}"]
    done = download(tmp_path / "dist/simple", tmp_path / "got")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "got").iterdir()] == [artifacts.wheel]
    sums = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    assert subprocess.run(sums, cwd=tmp_path / "dist").returncode == 0
    listed = (tmp_path / "dist/SHA256SUMS").read_text().split()[1::2]
    assert listed == sorted(f"v1.0/{name}" for name in artifacts.files)
    with open(artifacts.directory / artifacts.wheel, "ab") as file:
        file.write(b" ")
    done = download(tmp_path / "dist/simple", tmp_path / "changed")
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    again = subprocess.run(sums, cwd=tmp_path / "dist", capture_output=True)
    assert again.returncode == 1


def test_a_folder_without_wheels_is_refused(shipped: ShippedStack, tmp_path: Path):
    with pytest.raises(UsageError, match="no wheel of a pinned release"):
        write_index(shipped.releases, tmp_path)
    assert list(tmp_path.iterdir()) == []
