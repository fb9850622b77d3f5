# SPDX-License-Identifier: Apache-2.0
"""Watching upstream: releases, kernels, models, steps, and the exit code of a job."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
from command_line import invoke
from fake_stack import ATTENTION, BASE, FakeStack, edited
from sdists import XPU_TXT, write_sdist

from stack.core.errors import EnvironmentProblem
from stack.refresh.watch import (
    LandedStep,
    MissingRelease,
    ModelWithoutXpu,
    NewerKernels,
    watch,
)

FIRST = edited(ATTENTION, 5)
NEEDS = b"torch==2.12.0\ntriton==3.7.1\nvllm_xpu_kernels==0.1.10\n"


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    """Three steps, and a cache that asks the index."""
    stack = three_steps.copy(tmp_path)
    stack.cache = replace(stack.cache, offline=False)
    return stack


def offer(
    links: Path,
    version: str,
    attention: str = ATTENTION,
    models: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Put a release on the index that pip's configuration names."""
    texts = {**BASE, "vllm/attention.py": attention, **models}
    files = {name: text.encode() for name, text in texts.items()}
    write_sdist(links / f"vllm-{version}.tar.gz", {**files, XPU_TXT: NEEDS})


def offer_kernels(links: Path, *versions: str) -> None:
    """Put wheels of vllm-xpu-kernels on the same index."""
    for version in versions:
        name = f"vllm_xpu_kernels-{version}-cp38-abi3-manylinux_2_28_x86_64.whl"
        (links / name).touch()


def model(name: str, entry: str) -> dict[str, str]:
    """The files of a model that has code for NVIDIA's GPUs."""
    home = f"vllm/models/{name}"
    return {f"{home}/__init__.py": entry, f"{home}/nvidia/model.py": "kind = 1\n"}


def test_nothing_new(links: Path, stack: FakeStack) -> None:
    for version in ("0.9", "1.0", "2.0", "3.0rc1"):
        offer(links, version)
    report = watch(stack.project, stack.cache)
    assert (report.newest_pin, report.newer, report.compared) == ("v2.0", (), "v2.0")
    assert (report.landed, report.news) == ((), False)
    assert report.gaps == report.patches == report.kernels == report.models == ()


def test_a_gap_between_pins_and_a_newer_patch_release(
    links: Path, stack: FakeStack
) -> None:
    for version in ("1.0", "1.0.3", "1.5", "1.5.1", "2.0", "2.0.1"):
        offer(links, version)
    report = watch(stack.project, stack.cache)
    assert report.gaps == (MissingRelease("v1.5.1"),)
    patches = MissingRelease("v1.0.3", "v1.0"), MissingRelease("v2.0.1", "v2.0")
    assert (report.patches, report.newer) == (patches, ("2.0.1",))
    assert report.news


def test_newer_kernels_are_news_until_their_ops_are_recorded(
    links: Path, stack: FakeStack
) -> None:
    pins = stack.project.releases_file
    first, second = pins.read_text().split('version = "2.0"')
    key = 'xpu_kernels = { version = "1"'
    first = first.replace(key, key[:-3] + '"0.1.9"', 1)
    second = second.replace(key, key[:-3] + '"0.1.10.1"', 1)
    pins.write_text(f'{first}version = "2.0"{second}')

    offer_kernels(links, "0.1.9", "0.1.9.2", "0.1.9.10", "0.1.10.1", "0.1.12rc1")
    report = watch(stack.project, stack.cache)
    older = NewerKernels("v1.0", "0.1.9", "0.1.9.10", known=True)
    assert (report.kernels, report.news) == ((older,), False)

    offer_kernels(links, "0.1.11.3")
    report = watch(stack.project, stack.cache)
    newest = NewerKernels("v2.0", "0.1.10.1", "0.1.11.3", known=False)
    assert (report.kernels, report.news) == ((older, newest), True)
    stack.write("standins/emulated_xpu/schemas/0.1.11.3.txt", "_C::op() -> ()\n")
    assert not watch(stack.project, stack.cache).news


def test_models_that_come_without_an_xpu_path(links: Path, stack: FakeStack) -> None:
    offers = "if platform.is_xpu():\n    from .xpu import kind\n"
    old = model("old", "from .nvidia import kind\n") | model("lost", offers)
    stack.publish("2.5", old)
    new = model("new", "from .nvidia import kind\n") | model("served", offers)
    refused = "if platform.is_xpu():\n    raise NotImplementedError\n"
    new |= model("refused", refused) | model("lost", "from .nvidia import kind\n")
    new |= model("old", "from .nvidia import kind\n")
    offer(links, "3.0", models={**new, "vllm/models/plain/__init__.py": ""})
    report = watch(stack.project, stack.cache)
    silent = "its __init__.py does not name XPU"
    assert report.models == (
        ModelWithoutXpu("v3.0", "lost", silent),
        ModelWithoutXpu("v3.0", "new", silent),
        ModelWithoutXpu("v3.0", "refused", "its __init__.py refuses XPU"),
    )


def test_a_repository_whose_newest_pin_was_removed(
    links: Path, stack: FakeStack
) -> None:
    """It sees the release, what came with it, and the steps that it has."""
    offer(links, "2.0", FIRST, model("new", "from .nvidia import kind\n"))
    pins = stack.project.releases_file
    pins.write_text(pins.read_text().partition('[[release]]\nversion = "2.0')[0])
    report = watch(stack.project, stack.cache)
    assert (report.newest_pin, report.newer, report.news) == ("v1.0", ("2.0",), True)
    assert [step.step for step in report.landed] == ["first"]
    assert [item.model for item in report.models] == ["new"]


def test_a_newer_release_with_a_landed_step(links: Path, stack: FakeStack) -> None:
    offer(links, "2.1")
    offer(links, "3.0", FIRST)
    before = stack.contents()
    report = watch(stack.project, stack.cache)
    assert report.newer == ("2.1", "3.0") and report.compared == "v3.0"
    text = "nothing is left of it after the merge"
    assert report.landed == (LandedStep("v1.0", "first", "v3.0", text, False),)
    assert report.news and stack.contents() == before


def test_a_landed_step_that_is_known_is_no_news(stack: FakeStack) -> None:
    stack.publish("3.0", {"vllm/attention.py": FIRST})
    stack.step("first", {"vllm/rope.py": "other\n"}, "", "v3.0")

    def landed() -> list[tuple[str, bool]]:
        report = watch(stack.project, replace(stack.cache, offline=True))
        assert report.news is any(not step.known for step in report.landed)
        return [(step.step, step.known) for step in report.landed]

    assert landed() == [("first", False)]
    patch = stack.patch("first")
    mail = patch.read_text()
    status = "Backport [vllm-project/vllm#7]"
    patch.write_text(mail.replace("Status: Pending", f"Status: {status}"))
    assert landed() == [("first", True)]
    patch.write_text(mail)
    stack.patch("first", "v3.0").unlink()
    (stack.project.series_dir("v3.0") / "series").write_text("")
    assert landed() == [("first", True)]


def test_the_command_is_for_a_scheduled_job(
    links: Path, stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(stack.project.root)
    monkeypatch.setenv("XPUSTACK_CACHE", str(stack.cache.root))
    done = invoke("watch", "--offline")
    assert done.exit_code == 0, done.output
    assert "no step of a pinned release is in v2.0" in done.stdout
    offer(links, "3.0", FIRST, model("new", ""))
    offer(links, "1.0.4")
    offer_kernels(links, "2.1")
    done = invoke("watch")
    assert done.exit_code == 1, done.output
    for line in (
        "newer releases: 3.0",
        "v1.0.4: newer patch release than the pin v1.0",
        "vllm-xpu-kernels 2.1: newer than 1 of v2.0",
        "v3.0 model new: no XPU path, its __init__.py does not name XPU",
        "v1.0 first: in v3.0, nothing is left of it after the merge",
        "next: xpustack refresh v3.0 --from v2.0",
        "next: xpustack refresh v1.0.4",
        "next: record the ops in standins/emulated_xpu/schemas/2.1.txt",
    ):
        assert line in done.stdout.splitlines()
    data = json.loads(invoke("watch", "--json").stdout)["data"]
    assert data["news"] is True and data["landed"][0]["step"] == "first"
    assert data["kernels"][0]["newer"] == "2.1"
    assert data["patches"] == [{"version": "v1.0.4", "pinned": "v1.0"}]


def test_an_index_that_cannot_be_reached_is_named(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(EnvironmentProblem, match="cannot reach"):
        watch(stack.project, stack.cache)
