# SPDX-License-Identifier: Apache-2.0
"""Watching upstream: newer releases, landed steps, and the exit code of a job."""

import json
from pathlib import Path

import pytest
from fake_stack import ATTENTION, BASE, FakeStack, edited
from sdists import XPU_TXT, write_sdist
from typer.testing import CliRunner

from xpustack.cli import app
from xpustack.core.errors import EnvironmentProblem
from xpustack.refresh.watch import LandedStep, watch

FIRST = edited(ATTENTION, 5)
NEEDS = b"torch==2.12.0\ntriton==3.7.1\nvllm_xpu_kernels==0.1.10\n"


@pytest.fixture
def stack(tmp_path: Path, three_steps: FakeStack) -> FakeStack:
    return three_steps.copy(tmp_path)


def offer(links: Path, version: str, attention: str = ATTENTION) -> None:
    """Put a release on the index that pip's configuration names."""
    files = {name: text.encode() for name, text in BASE.items()}
    files |= {XPU_TXT: NEEDS, "vllm/attention.py": attention.encode()}
    write_sdist(links / f"vllm-{version}.tar.gz", files)


def test_nothing_new(links: Path, stack: FakeStack) -> None:
    for version in ("1.0", "1.5", "2.0", "3.0rc1"):
        offer(links, version)
    report = watch(stack.project, stack.cache)
    assert (report.newest_pin, report.newer, report.compared) == ("v2.0", (), "v2.0")
    assert (report.landed, report.news) == ((), False)


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
        report = watch(stack.project, stack.cache, offline=True)
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
    call = CliRunner().invoke
    done = call(app, ["watch", "--offline"])
    assert done.exit_code == 0, done.output
    assert "no step of a pinned release is in v2.0" in done.stdout
    offer(links, "3.0", FIRST)
    done = call(app, ["watch"])
    assert done.exit_code == 1, done.output
    assert "newer releases: 3.0\nv1.0 first: in v3.0" in done.stdout
    assert "next: xpustack refresh v3.0 --from v2.0" in done.stdout
    data = json.loads(call(app, ["watch", "--json"]).stdout)["data"]
    assert data["news"] is True and data["landed"][0]["step"] == "first"


def test_an_index_that_cannot_be_reached_is_named(
    stack: FakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(EnvironmentProblem, match="cannot reach"):
        watch(stack.project, stack.cache)
