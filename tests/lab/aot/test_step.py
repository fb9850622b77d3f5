# SPDX-License-Identifier: Apache-2.0
"""The step model adds up what a rank reads, computes, sends and launches."""

from dataclasses import replace

import pytest

from lab.aot.costs import step
from lab.aot.costs.model import devices, ends
from lab.aot.costs.step import Kernels, Range, Split
from lab.memory import FLASH, PRO, Shapes
from lab.memory_v41 import FLASH_V41
from stack.core.project import Project
from stack.core.rows import read_rows

PROJECT = Project.find()
KNOWN = {device.name: device for device in devices()}
B60 = Split(KNOWN["Arc Pro B60"], 8, 2)
IDLE = Kernels({}, {})
BUSY = Kernels(
    {"window": Range(1, 2), "ratio4": Range(3, 4), "ratio128": Range(5, 6)},
    {"ratio4": Range(7, 8)},
)


def part(parts: list[step.Part], name: str) -> Range:
    return next(part.milliseconds for part in parts if part.name == name)


@pytest.mark.parametrize(("tokens", "count"), [(0, 0), (1, 6), (16, 81), (64, 200)])
def test_distinct_experts(tokens: int, count: int) -> None:
    assert round(step.distinct(256, 6, tokens)) == count


@pytest.mark.parametrize(("tokens", "by_hand"), [(1, 1.2), (16, 15.9), (64, 39)])
def test_experts_take_what_their_bytes_take(tokens: int, by_hand: float) -> None:
    """By hand: distinct experts of 43 layers in MXFP4 over 8 ranks at 80 % of 456 GB/s,
    the stages one after the other."""
    experts = part(step.decode(FLASH, B60, tokens, IDLE), "experts")
    assert experts.fast < by_hand < experts.slow


@pytest.mark.parametrize("model", [FLASH, PRO, FLASH_V41], ids=lambda model: model.name)
def test_a_rank_reads_every_weight_but_rows_of_tables(model: Shapes) -> None:
    """With one rank and all experts chosen, the parts are all bytes of the model."""
    one = Split(KNOWN["Max 1100"], 1)
    parts = step.decode(model, one, 10**6, IDLE)
    fast = ends(one.device)[0].gigabytes_per_second
    stored = {
        "shared expert",
        "experts",
        "head",
        "small weights",
        "projections",
        *(f"{name}, on every rank" for name in ("projections", "compressor")),
        *(f"{name}, on every rank" for name in ("indexer", "hyper-connections")),
        *("Engram", "Engram, on every rank"),
    }
    read = sum(p.milliseconds.fast for p in parts if p.name in stored) * fast * 1e6
    all_bytes = sum(
        group.count * group.size
        for group in model.stored()
        if group.part not in ("embedding", "route table")
    )
    assert read == pytest.approx(all_bytes, rel=1e-9)


def test_v41_has_the_weights_that_its_plan_holds() -> None:
    """The engine's own tensors, of the published shapes, for one rank of eight."""
    weights = {
        float(row["weights_gib"])
        for row in read_rows(PROJECT.root / "docs/data/plans.csv")
        if (row["model"], row["split"]) == ("V4.1-Flash", "TP 8") and row["weights_gib"]
    }
    held = sum(
        group.count
        * group.size
        * (FLASH_V41.padded(8) if "expert" in group.part else 1)
        / (8 if group.sharded else 1)
        for group in FLASH_V41.stored()
    )
    assert sorted(weights) == [pytest.approx(held / 2**30, abs=0.05)]


def test_columns_of_an_expert_are_padded() -> None:
    """288 are padded to 320 on each of eight ranks, 576 on each of four are not."""
    assert FLASH_V41.padded(8) == pytest.approx(320 / 288)
    assert FLASH_V41.padded(4) == FLASH.padded(8) == PRO.padded(16) == 1


def test_v41_is_gathered_and_launched_as_it_is_layered() -> None:
    assert FLASH_V41.layers == 40
    fast = 2 * 14 + 30 * 14 + 3 * 26 + 28 + 4 * 23 + 2 * 5 + 40 * 18
    assert step.launches(FLASH_V41).fast == fast
    entries = FLASH_V41.entries(1024)
    assert (entries["source2"], entries["shared1"]) == (512, 1024)
    assert FLASH_V41.chosen(1024)["shared2"] == 512
    assert FLASH_V41.scored(1024) == {"source2": 512, "source1": 1024, "index1": 1024}


def test_ranks_share_what_is_sharded_alone() -> None:
    few, many = (
        step.decode(FLASH, Split(KNOWN["Arc Pro B70"], n), 16, IDLE) for n in (2, 8)
    )
    for name in ("experts", "shared expert", "projections", "head"):
        assert part(few, name).slow == pytest.approx(4 * part(many, name).slow)
    for name in ("compressor", "indexer", "projections", "hyper-connections"):
        assert part(few, f"{name}, on every rank") == part(
            many, f"{name}, on every rank"
        )


def test_whole_experts_on_a_rank_wait_for_the_fullest() -> None:
    shared = replace(B60, stages=1)
    whole = replace(shared, expert_parallel=True)
    of = [part(step.decode(FLASH, s, 16, IDLE), "experts") for s in (shared, whole)]
    assert of[1].fast == of[0].fast
    assert of[1].slow > 1.2 * of[0].slow
    everything = part(step.decode(FLASH, whole, 10**6, IDLE), "experts")
    assert everything.slow == pytest.approx(
        part(step.decode(FLASH, shared, 10**6, IDLE), "experts").slow
    )


def test_replicas_choose_experts_together() -> None:
    one = Split(KNOWN["Arc Pro B70"], 1, replicas=8)
    alone = Split(KNOWN["Arc Pro B70"], 8, expert_parallel=True)
    of_replicas = step.decode(FLASH, one, 2, IDLE)
    assert part(of_replicas, "experts") == part(
        step.decode(FLASH, alone, 16, IDLE), "experts"
    )


def test_the_fixed_cost_of_experts_is_every_layers() -> None:
    """5 to 6.6 ms of 40 layers are published, for one device and release."""
    cost = part(step.decode(FLASH, B60, 1, IDLE), "experts, fixed cost")
    assert cost.fast == 0
    assert cost.slow * 40 / FLASH.layers == pytest.approx(6.6)


@pytest.mark.parametrize(
    ("device", "published"), [("Arc Pro B70", 600), ("Arc Pro B60", 434)]
)
def test_published_rates_of_dram_lie_between_the_ends(
    device: str, published: float
) -> None:
    fast, slow = ends(KNOWN[device])
    assert slow.gigabytes_per_second < published < fast.gigabytes_per_second


def test_the_published_time_of_a_launch_lies_between_the_ends() -> None:
    """sgl-kernel-xpu#275: 5.1 us for a small one on Battlemage."""
    fast, slow = step.constants()["device_launch"]["microseconds"]
    assert fast < 5.1 < slow


def test_kernels_count_once_a_layer_of_their_kind() -> None:
    parts = step.decode(FLASH, B60, 1, BUSY)
    assert part(parts, "attention").fast == pytest.approx(
        (2 * 1 + 21 * 3 + 20 * 5) / 1e3
    )
    assert part(parts, "indexer scores").slow == pytest.approx(21 * 8 / 1e3)


def test_collectives_grow_with_what_they_move() -> None:
    def time(split: Split, tokens: int) -> Range:
        return part(step.decode(FLASH, split, tokens, IDLE), "collectives")

    alone = Split(KNOWN["Arc Pro B60"], 1)
    assert time(alone, 64) == Range(0, 0)
    times = [time(B60, tokens) for tokens in (1, 2, 16, 64, 512)]
    assert [t.slow for t in times] == sorted(t.slow for t in times)
    assert times[0].fast < times[-1].fast
    # 86 sums of 8 KiB between the two published sizes, and one hop.
    assert 86 * 45e-3 < times[0].slow < 88 * 344e-3


def test_a_step_without_graphs_is_no_faster_than_host_or_device() -> None:
    device = step.total(step.decode(FLASH, B60, 64, BUSY))
    host = step.host(FLASH)
    eager = step.eager(device, host)
    assert eager.fast >= max(device.fast, host.fast)
    assert eager.slow == device.slow + host.slow


def test_stages_work_on_different_requests() -> None:
    time = Range(10, 20)
    one = step.tokens_per_second(FLASH, B60, 1, time)
    assert one == Range(100, 50)
    # 43 layers: the fuller stage has 22.
    two = step.tokens_per_second(FLASH, B60, 2, time)
    assert two.fast == pytest.approx(2e3 / (10 * 2 * 22 / 43))
    assert step.together(B60, 64) == 32
    assert step.together(B60, 1) == 1


def test_a_chunk_is_bound_by_products_and_one_token_by_memory() -> None:
    chunk = {p.name: p.bound for p in step.prefill(FLASH, B60, 2048, 0, IDLE)}
    assert chunk["projections"] == "dpas"
    few = {p.name: p.bound for p in step.prefill(FLASH, B60, 1, 0, IDLE)}
    assert set(few.values()) <= {"DRAM", "kernel", "link"}


def test_the_peak_is_the_published_one() -> None:
    """197 TOPS of int8 on a B60 are half as many operations in bf16."""
    peak = step.operations_per_microsecond(B60.device) * 1e6
    assert peak == pytest.approx(98.5e12, rel=0.01)


def test_every_range_has_its_fast_end_first() -> None:
    for model in (FLASH, PRO, FLASH_V41):
        one = Range(1, 2)
        busy = Kernels(dict.fromkeys(model.kinds, one), {})
        for parts in (
            step.decode(model, B60, 16, busy),
            step.prefill(model, B60, 2048, 16_384, busy),
        ):
            for one in parts:
                assert 0 <= one.milliseconds.fast <= one.milliseconds.slow, one


def test_a_measured_rate_of_memory_is_not_reduced_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    from lab.aot.costs import model

    text = model.DATA.read_text()
    line = "gigabytes_per_second = 456\n"
    file = model.Path(str(tmp_path)) / "devices.toml"
    file.write_text(text.replace(line, f"{line}dram_share = [1, 1]\n"))
    monkeypatch.setattr(model, "DATA", file)
    fast, slow = ends(B60.device)
    assert fast.gigabytes_per_second == slow.gigabytes_per_second == 456
    assert fast.slm_bytes_per_clock > slow.slm_bytes_per_clock


def test_a_split_needs_at_least_one_of_each() -> None:
    with pytest.raises(ValueError, match="stages is 0"):
        Split(B60.device, 8, 0)
