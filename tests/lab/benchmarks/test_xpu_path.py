# SPDX-License-Identifier: Apache-2.0
"""How the figures of the XPU path on a GPU are read off a profile."""

from pathlib import Path
from typing import Any

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
from lab.benchmarks.xpu_path.parts import part_of_class, rows_of_events
from proof.e2e import pictures
from proof.e2e.checkpoints import dspark, v41, vision
from proof.e2e.pictures import Picture


def launched(number: int, at: float, name: str, lasting: float) -> list[dict[str, Any]]:
    """A launch on the host, and its kernel on the device some time later."""
    args = {"correlation": number}
    kernel = {"cat": "kernel", "ts": at + 500, "dur": lasting, "name": name}
    launch = {"cat": "cuda_driver", "tid": 1, "ts": at, "dur": 2, "name": "cuLaunch"}
    return [{**launch, "args": args}, {**kernel, "tid": 7, "args": args}]


def ranged(name: str, begin: float, end: float) -> dict[str, Any]:
    place = {"cat": "user_annotation", "ph": "X", "tid": 1, "args": {}}
    return {**place, "ts": begin, "dur": end - begin, "name": name}


def test_a_kernel_belongs_to_the_innermost_part_of_its_launch() -> None:
    events = [
        ranged("part projections", 0, 100),
        ranged("part attention", 20, 40),
        ranged("stand-in _xpu_C::fp8_gemm", 50, 60),
        ranged("stand-in _xpu_C::mhc_pre", 110, 120),
        ranged("stand-in _C::rms_norm", 130, 140),
        *launched(1, 25, "decode", 3.0),
        *launched(2, 30, "decode", 4.0),
        *launched(3, 55, "gemm", 5.0),
        *launched(4, 70, "copy", 6.0),
        *launched(5, 115, "gemm", 7.0),
        *launched(6, 135, "norm", 8.0),
        *launched(7, 999, "late", 9.0),
    ]
    rows = {(r.part, r.stand_in, r.kernel): r for r in rows_of_events(events)}
    assert rows["attention", "", "decode"].microseconds == 7.0
    assert rows["attention", "", "decode"].launches == 2
    assert rows["projections", "_xpu_C::fp8_gemm", "gemm"].microseconds == 5.0
    assert rows["projections", "", "copy"].microseconds == 6.0
    assert rows["hyper-connections", "_xpu_C::mhc_pre", "gemm"].microseconds == 7.0
    assert rows["other", "_C::rms_norm", "norm"].microseconds == 8.0
    assert rows["other", "", "late"].microseconds == 9.0


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


def case(
    part: float, inside: float, replay: float, answer: list[int]
) -> dict[str, Any]:
    row = {"part": "attention", "kernel": "k", "launches": 1}
    rows = [
        {**row, "stand_in": "", "microseconds": 2 * (part - inside)},
        {**row, "stand_in": "_C::x", "microseconds": 2 * inside},
    ]
    eager = {"rows": rows, "profiled": 2, "errors": {"ratio 1": 0.5}}
    graphs = {"replays": [9.0] * 4 + [replay] * 3, "errors": {"ratio 4": 0.002}}
    named = {"kind": "decode", "batch": 1, "tokens": 16384}
    return {
        **named,
        "eager": {**eager, "tokens": [[1, 2]]},
        "graphs": {**graphs, "tokens": [answer]},
    }


def test_the_table_has_times_and_errors_and_other_tokens_are_named() -> None:
    results = {
        "untouched": {"cases": [case(300.0, 0.0, 7.5, [1, 2])]},
        "patched": {"cases": [case(100.0, 25.0, 5.25, [1, 3])]},
    }
    row = page.attention_table(results)[-1]
    assert row == "| decode, 1 at 16,384 | 300 | 100 | 3.0 | 50 % | 50.00 % |"
    eager = {
        tree: {
            "cases": [{k: v for k, v in result["cases"][0].items() if k != "graphs"}]
        }
        for tree, result in results.items()
    }
    assert page.attention_table(eager)[-1] == row
    assert page.tokens_lines(results) == [
        "- untouched, requests with equal tokens: all requests of all cases",
        "- patched, requests with equal tokens: decode, 1 at 16,384: 0 of 1",
    ]


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
    rounds["triton"] = [[[1], [3]], [[1], [2]]]
    for name, waves in rounds.items():
        torch.save({"tokens": [[[0]], *waves]}, tmp_path / f"{name}.pt")
    assert page.soak_lines(tmp_path)[-2:] == [
        "| graphs | 2 | 2 | 2 | yes |",
        "| triton | 2 | 1 | 2 | no |",
    ]


def test_a_folder_without_a_tree_is_named(tmp_path: Path) -> None:
    (tmp_path / "flash-patched.json").write_text("{}")
    with pytest.raises(SystemExit, match=f"{tmp_path} has no results of: untouched"):
        page.read(tmp_path, page.TREES)


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
