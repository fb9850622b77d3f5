# SPDX-License-Identifier: Apache-2.0
"""The neighbour that a series is carried from, and the releases that have no pin."""

import json
from pathlib import Path

import pytest
from command_line import invoke
from fake_stack import ATTENTION, BASE, FakeStack, edited
from sdists import XPU_TXT, write_sdist

from stack.base.index import PipConfiguration
from stack.base.releases import load
from stack.core.errors import UsageError
from stack.refresh.neighbours import Source, choose_source, neighbours
from stack.refresh.refresh import refresh
from stack.refresh.watch import MissingRelease, missing_among

THEIRS = edited(ATTENTION, 7, "upstream's way")
NEEDS = b"torch==2.12.0\ntriton==3.7.1\nvllm_xpu_kernels==0.1.10\n"


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """v1.0 has a series; v2.0 has none."""
    return three_steps.copy(tmp_path)


def choose(stack: FakeStack, version: str, directory: Path | None = None) -> Source:
    return choose_source(stack.project, version, directory)


def carried(stack: FakeStack, name: str, source: str, drop: tuple[str, ...]) -> None:
    done = refresh(stack.project, stack.cache, name, source, drop=drop, write=True)
    assert done.stale


def test_the_pins_before_and_after(stack: FakeStack) -> None:
    pinned = load(stack.project)

    def names(version: str) -> list[str]:
        return [release.name for release in neighbours(pinned, version)]

    assert names("1.5") == names("1.10") == ["v1.0", "v2.0"]
    assert names("2.0") == names("0.9") == ["v1.0"]
    assert names("1.0") == names("2.0.1") == ["v2.0"]


def test_the_one_before_and_else_the_one_after(stack: FakeStack) -> None:
    stack.publish("3.0", {})
    carried(stack, "v3.0", "v1.0", drop=("second",))
    assert choose(stack, "2.0").name == "v1.0"
    assert choose(stack, "0.9").name == "v1.0"
    assert choose(stack, "2.5.1", stack.root / "nothing").name == "v3.0"
    stack.project.series_dir("v3.0").joinpath("series").unlink()
    with pytest.raises(
        UsageError, match="neither neighbouring pinned release"
    ) as caught:
        choose(stack, "2.5.1")
    assert caught.value.hint == "xpustack refresh v2.5.1 --from RELEASE"


def test_a_work_repository_keeps_its_source(stack: FakeStack) -> None:
    stack.publish("3.0", {})
    carried(stack, "v3.0", "v1.0", drop=("second",))
    work = stack.root / "carry"
    refresh(stack.project, stack.cache, "v2.0", "v3.0", directory=work)
    assert choose(stack, "2.0").name == "v1.0"
    chosen = choose(stack, "2.0", work)
    assert chosen == Source("v3.0", f"{work} carries from there")


def test_the_releases_without_a_pin(links: Path, stack: FakeStack) -> None:
    for version in ("0.9", "1.0", "1.0.1", "1.1", "1.1.2rc1", "2.0", "2.1", "3.0rc1"):
        files = {name: text.encode() for name, text in BASE.items()}
        write_sdist(links / f"vllm-{version}.tar.gz", {**files, XPU_TXT: NEEDS})
    offered = PipConfiguration.of_this_machine().index().final_versions("vllm")
    assert missing_among(load(stack.project), offered) == [
        MissingRelease("v1.0.1", "v1.0"),
        MissingRelease("v1.1"),
        MissingRelease("v2.1"),
    ]


def test_the_command(
    links: Path, stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    done = invoke("refresh", "v2.0", "--offline")
    assert done.exit_code == 0, done.output
    assert "from v1.0: the pinned neighbour" in done.stdout
    done = invoke("refresh", "v2.0", "--offline", "--json")
    data = json.loads(done.stdout)["data"]
    assert (data["from"], "neighbour" in data["why"]) == ("v1.0", True)
    assert invoke("refresh").exit_code == UsageError.exit_code
