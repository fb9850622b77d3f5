# SPDX-License-Identifier: Apache-2.0
"""The neighbour that a series is carried from, and the releases that have no pin."""

import json
from pathlib import Path

import pytest
from fake_stack import ATTENTION, BASE, FakeStack, edited
from sdists import XPU_TXT, write_sdist
from typer.testing import CliRunner

from xpustack.base.releases import load
from xpustack.cli import app
from xpustack.core.errors import UsageError
from xpustack.refresh.neighbours import (
    MissingRelease,
    Source,
    choose_source,
    missing_releases,
    neighbours,
)
from xpustack.refresh.refresh import refresh

THEIRS = edited(ATTENTION, 7, "upstream's way")
NEEDS = b"torch==2.12.0\ntriton==3.7.1\nvllm_xpu_kernels==0.1.10\n"


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """v1.0 has a series; v2.0 has none."""
    return three_steps.copy(tmp_path)


def choose(stack: FakeStack, name: str, **options: object) -> Source:
    return choose_source(stack.project, stack.cache, name, offline=True, **options)


def carried(stack: FakeStack, name: str, source: str, drop: tuple[str, ...]) -> None:
    done = refresh(
        stack.project,
        stack.cache,
        name,
        source,
        drop=drop,
        write=True,
        offline=True,
    )
    assert done.stale


def test_the_pins_before_and_after(stack: FakeStack) -> None:
    pinned = load(stack.project)

    def names(version: str) -> list[str]:
        return [release.name for release in neighbours(pinned, version)]

    assert names("1.5") == names("1.10") == ["v1.0", "v2.0"]
    assert names("2.0") == names("0.9") == ["v1.0"]
    assert names("1.0") == names("2.0.1") == ["v2.0"]


def test_the_older_one_of_equals(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/attention.py": THEIRS})
    carried(stack, "v3.0", "v1.0", drop=("second",))
    before = stack.contents()
    chosen = choose(stack, "v2.0")
    assert chosen == Source("v1.0", "v1.0: 0 conflicts; v3.0: 0 conflicts")
    assert stack.contents() == before


def test_the_one_with_fewer_conflicts(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/attention.py": THEIRS})
    stack.publish("2.5", {"vllm/attention.py": THEIRS})
    text = stack.project.releases_file.read_text()
    stack.project.releases_file.write_text(in_order(text))
    carried(stack, "v3.0", "v1.0", drop=("second",))
    carried(stack, "v2.0", "v1.0", drop=())
    chosen = choose(stack, "v2.5")
    assert chosen == Source("v3.0", "v3.0: 0 conflicts; v2.0: 1 conflict")
    # Without the step that conflicts the older one still has to be merged.
    chosen = choose(stack, "v2.5", drop=("second",))
    assert chosen.name == "v3.0"


def in_order(text: str) -> str:
    """releases.toml with its entries oldest first."""
    head, *entries = text.split("\n[[release]]\n")
    entries.sort(key=lambda entry: [int(x) for x in entry.split('"')[1].split(".")])
    return "\n[[release]]\n".join((head, *entries))


def test_the_only_neighbour_with_a_series(stack: FakeStack) -> None:
    stack.publish("3.0", {})
    assert choose(stack, "v2.0").name == "v1.0"
    assert "only pinned neighbour" in choose(stack, "v2.0").why
    with pytest.raises(
        UsageError, match="neither neighbouring pinned release"
    ) as caught:
        choose(stack, "v3.0")
    assert caught.value.release == "v3.0"
    assert caught.value.hint == "xpustack refresh v3.0 --from RELEASE"


def test_a_work_repository_keeps_its_source(stack: FakeStack) -> None:
    stack.publish("3.0", {})
    carried(stack, "v3.0", "v1.0", drop=("second",))
    work = stack.root / "carry"
    refresh(stack.project, stack.cache, "v2.0", "v3.0", directory=work, offline=True)
    assert choose(stack, "v2.0").name == "v1.0"
    chosen = choose(stack, "v2.0", directory=work)
    assert chosen == Source("v3.0", f"{work} carries from there")


def test_the_releases_without_a_pin(links: Path, stack: FakeStack) -> None:
    for version in ("0.9", "1.0", "1.0.1", "1.1", "1.1.2rc1", "2.0", "2.1", "3.0rc1"):
        files = {name: text.encode() for name, text in BASE.items()}
        write_sdist(links / f"vllm-{version}.tar.gz", {**files, XPU_TXT: NEEDS})
    assert missing_releases(stack.project) == [
        MissingRelease("v1.0.1", "v1.0"),
        MissingRelease("v1.1"),
        MissingRelease("v2.1"),
    ]


def test_the_command(
    links: Path, stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    call = CliRunner().invoke
    done = call(app, ["refresh", "v2.0", "--offline"])
    assert done.exit_code == 0, done.output
    assert "from v1.0: the only pinned neighbour with a series" in done.stdout
    done = call(app, ["refresh", "v2.0", "--offline", "--json"])
    data = json.loads(done.stdout)["data"]
    assert (data["from"], "neighbour" in data["why"]) == ("v1.0", True)
    files = {name: text.encode() for name, text in BASE.items()}
    for version in ("1.0", "1.5", "2.0"):
        write_sdist(links / f"vllm-{version}.tar.gz", {**files, XPU_TXT: NEEDS})
    done = call(app, ["refresh", "--missing"])
    assert done.exit_code == 0, done.output
    assert "v1.5: not pinned\n" in done.stdout
    assert "next: xpustack refresh v1.5" in done.stdout
    done = call(app, ["refresh", "--missing", "--json"])
    assert json.loads(done.stdout)["data"] == {
        "missing": [{"version": "v1.5", "pinned": None}]
    }
    for words in (["refresh"], ["refresh", "v2.0", "--missing"]):
        assert call(app, words).exit_code == UsageError.exit_code
