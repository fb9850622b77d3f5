# SPDX-License-Identifier: Apache-2.0
"""What runs on a GPU under XPU's name, and how it is read."""

import tarfile
from pathlib import Path

import pytest
import torch

from lab.benchmarks.xpu_path import beside, host_spans, page
from lab.benchmarks.xpu_path.host_spans import REST, Spans
from lab.benchmarks.xpu_path.jobs import (
    DRAFTS,
    IMAGE,
    JOBS,
    V41,
    V41_IMAGE,
    VISION,
    tokens,
)
from lab.benchmarks.xpu_path.parts import part_of_class
from lab.benchmarks.xpu_path.run import unpack
from proof.e2e import pictures
from proof.e2e.checkpoints import dspark, v41, vision
from proof.e2e.pictures import Picture


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("DeepseekCompressor", "compressor"),
        ("DeepseekV4Indexer", "indexer"),
        ("MHCPreOp", "hyper-connections"),
        ("ReplicatedLinear", "projections"),
        ("DeepseekV4MoE", "experts"),
        ("RMSNorm", None),
    ],
)
def test_modules_have_parts_by_their_class(name: str, part: str | None) -> None:
    assert part_of_class(name) == part


def test_jobs_have_names_of_their_own_and_the_prompts_of_the_end_to_end_tests() -> None:
    assert all(name == job.name for name, job in JOBS.items())
    assert tokens(5, 2) == tokens(9, 2)[:5]


def test_engines_are_served_as_end_to_end() -> None:
    assert dict(v41.SERVER) == V41
    assert dict(vision.ENGINE) == VISION
    assert (pictures.PLACEHOLDER, v41.IMAGE) == (IMAGE, V41_IMAGE)
    assert DRAFTS["speculative_config"]["num_speculative_tokens"] == dspark.BLOCK


@pytest.mark.parametrize("name", beside.JOBS)
def test_the_gpu_is_asked_what_the_cpu_is(name: str) -> None:
    on_cpu = beside.JOBS[name]
    order = JOBS[f"{name}-eager"].order(Path("work"))
    for wave, given in zip(on_cpu.waves, order["waves"], strict=True):
        for prompt, other in zip(wave, given, strict=True):
            images = tuple(Picture(**drawn) for drawn in other.get("images", ()))
            assert (prompt.tokens, prompt.new) == (other["tokens"], other["new"])
            assert prompt.images == images
    assert order["checkpoint"] == on_cpu.checkpoint
    assert order["engine"].items() >= dict(on_cpu.engine).items()


def test_a_text_has_the_images_of_one_that_begins_so() -> None:
    drawn = (Picture(1, 4, 4),)
    known = {(5, 6, 7): drawn, (9,): ()}
    assert pictures.images_of([5, 6], known) == drawn


def test_requests_are_compared_with_those_of_eager_mode(tmp_path: Path) -> None:
    rounds = {"eager": [[[1], [2]]], "graphs": [[[1], [2]]] * 2}
    rounds["graphs"] = [[[1], [3]], [[1], [2]]]
    for name, waves in rounds.items():
        torch.save({"tokens": [[[0]], *waves]}, tmp_path / f"{name}.pt")
    assert page.soak_lines(tmp_path)[-1] == "| graphs | 2 | 1 | 2 | no |"


def test_time_of_the_host_counts_once_in_nested_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moments = iter([0, 1_000, 4_000, 9_000, 10_000, 60_000])
    monkeypatch.setattr(host_spans.time, "perf_counter_ns", lambda: next(moments))
    spans = Spans()
    layer = torch.nn.Linear(2, 2)
    inner = spans.part("stand-ins", layer.forward)
    layer.forward = spans.part("projections", inner)
    spans.layer("window", layer)
    layer(torch.zeros(3, 2))
    ((name, count, parts),) = spans.layers
    assert (name, count) == ("window", 3)
    assert parts["stand-ins"] == 5.0
    assert parts["projections"] == 4.0
    assert parts[REST] == 51.0
    assert parts["calls of stand-ins"] == 1.0


def test_the_untouched_tree_lacks_a_package_that_steps_add(tmp_path: Path) -> None:
    packed, carried, work = (tmp_path / name for name in ("packed", "carried", "work"))
    for name, text in (
        ("patched/vllm/value.py", "VALUE = 2\n"),
        ("patched/added/__init__.py", ""),
        ("differing/vllm/value.py", "VALUE = 1\n"),
        ("removed", "added/__init__.py\n"),
    ):
        (packed / name).parent.mkdir(parents=True, exist_ok=True)
        (packed / name).write_text(text)
    carried.mkdir()
    with tarfile.open(carried / "xpu-path.tar.xz", "w:xz") as tar:
        for path in packed.iterdir():
            tar.add(path, path.name)
    unpack(carried, work, [JOBS["v41-untouched"]])
    assert not (work / "untouched/added").exists()
    assert (work / "untouched/vllm/value.py").read_text() == "VALUE = 1\n"
    assert (work / "patched/vllm/value.py").read_text() == "VALUE = 2\n"
