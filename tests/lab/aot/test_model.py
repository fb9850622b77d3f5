# SPDX-License-Identifier: Apache-2.0
"""The cost model ranks known variants rightly, and each of its bounds can bind."""

from dataclasses import replace

import pytest

from lab.aot.calls.record import recording
from lab.aot.compiler.loops import Work
from lab.aot.costs.model import (
    Device,
    Launched,
    devices,
    ends,
    estimate,
    memory_roof,
    resident,
)
from lab.aot.costs.modelled import SHAPES, Shape, summary, turns_and_traffic

B60 = next(device for device in devices() if device.name == "Arc Pro B60")


def launch(total: Work, loop: Work, slm: int = 17408) -> Launched:
    """Decode of 128 tokens, 64 heads and 640 keys without a split."""
    shape = Shape("decode", 128, 64, 640)
    return Launched(128, 16, 40, shape.least_traffic(), 256, slm, total, loop)


Q_IN_SLM = launch(
    Work(7003, 7068, 38, 48, 866, 512, 73856, 13952, 23),
    Work(4300, 4324, 34, 48, 585, 512, 52224, 960, 3),
    slm=86016,
)
"""Counted for bmg at the commit before this model: q and V put together from SLM."""
Q_BLOCKS = launch(
    Work(3264, 3321, 44, 48, 594, 256, 53376, 18048, 23),
    Work(1813, 1837, 40, 48, 345, 256, 35840, 9152, 3),
    slm=19456,
)
"""The trial with q by 2-dim blocks."""
DIMS_FIRST = launch(
    Work(2710, 2767, 44, 48, 327, 0, 40640, 18048, 26),
    Work(1144, 1168, 40, 48, 102, 0, 23104, 9152, 6),
)
"""What ships: also the transposed accumulator."""


@pytest.mark.parametrize(
    "device", [d for d in devices() if d.target == "bmg"], ids=lambda d: d.name
)
def test_known_variants_are_ranked_rightly(device: Device) -> None:
    times = [
        estimate(variant, device).microseconds
        for variant in (Q_IN_SLM, Q_BLOCKS, DIMS_FIRST)
    ]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.5 * times[1]


def test_what_ships_is_near_the_memory_roof_on_a_b60() -> None:
    roof = memory_roof(DIMS_FIRST.traffic, B60)
    assert estimate(DIMS_FIRST, B60).microseconds <= 2.6 * roof
    assert estimate(Q_IN_SLM, B60).microseconds > 5 * roof


def test_work_groups_are_limited_by_threads_and_by_slm() -> None:
    assert resident(DIMS_FIRST, B60) == 2
    assert resident(Q_IN_SLM, B60) == 1
    assert resident(replace(DIMS_FIRST, grf=128), B60) == 4
    with pytest.raises(ValueError, match="B60: an Xe-core cannot hold 64"):
        resident(replace(DIMS_FIRST, sub_groups=64), B60)


@pytest.mark.parametrize(
    ("loop", "traffic", "bound"),
    [
        (Work(cycles=1000), 0, "issue"),
        (Work(cycles=100, dpas=100), 0, "dpas"),
        (Work(cycles=100, math=900), 0, "math"),
        (Work(cycles=100, sends=10, slm=64000), 0, "SLM"),
        (Work(cycles=100, sends=10, memory=64000), 0, "load"),
        (Work(cycles=10, sends=1), 0, "latency"),
        (Work(cycles=1000), 1e12, "DRAM"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_bound_can_bind(loop: Work, traffic: float, bound: str) -> None:
    busy = Launched(1280, 32, 100, traffic, 128, 0, loop, loop)
    assert estimate(busy, B60).bound == bound


def test_lanes_with_lines_of_their_own_look_each_up() -> None:
    """At best as many lines a clock as a message has lanes, so that bytes bind."""
    loop = Work(cycles=100, sends=10, memory=6400)
    together = Launched(1280, 32, 100, 0, 128, 0, loop, loop)
    apart = replace(together, lane_bytes=16)
    fast, slow = ends(B60)
    for end in (B60, fast):
        assert estimate(apart, end) == estimate(together, end)
    lookups = estimate(apart, slow)
    assert lookups.bound == "lookup"
    # 400 lookups of one clock, where the cache moves 128 bytes in one.
    bytes_alone = estimate(together, slow).microseconds
    assert lookups.microseconds == pytest.approx(bytes_alone * 400 * 128 / 6400)


def test_a_loop_around_counts_as_often_as_it_runs() -> None:
    """Its first iteration is in the listing; lines of q are looked up once."""
    loop, around = Work(cycles=1000), Work(cycles=400, barriers=2)
    once = Launched(1280, 32, 100, 0, 128, 0, loop, loop, around=around)
    twice = replace(once, rounds=2)
    assert estimate(once, B60) == estimate(replace(once, around=Work()), B60)
    times = [estimate(launch, B60).microseconds for launch in (once, twice)]
    assert times[1] == pytest.approx(times[0] * (100 * 1000 + 400) / (100 * 1000))
    _, slow = ends(B60)
    looked_up = estimate(replace(once, lines=10**6), slow)
    assert looked_up.bound == "lookup"


def test_a_last_wave_that_is_not_full_costs_a_wave() -> None:
    loop = Work(cycles=1000)
    full = Launched(40, 16, 100, 0, 256, 0, loop, loop)
    more = replace(full, groups=41)
    assert estimate(more, B60).microseconds >= 1.5 * estimate(full, B60).microseconds


def test_turns_come_from_the_launch() -> None:
    from lab.aot.calls.cases_attention import decode, prefill

    with recording() as launches:
        decode(64, 128, 512, 64)
        decode(64, 1, 512, 64)
        prefill(8, 2048, 640)
    shapes = [Shape("decode", 128, 64, 640), Shape("decode", 1, 64, 640)]
    of_128 = [turns_and_traffic(shapes[0], one) for one in launches[:-3]]
    of_1 = [turns_and_traffic(shapes[1], one) for one in launches[-3:-1]]
    assert of_1[0][0] == 2
    assert of_128[0][0] in (20, 40)
    # 16 heads or fewer take 32 keys a turn.
    assert turns_and_traffic(Shape("prefill", 2048, 8, 640), launches[-1])[0] == 20
    assert all(traffic > 0 for _, traffic, _ in of_128 + of_1)
    # What a decode leaves for the merge is what the merge takes.
    assert of_1[0][2] == of_1[1][2] > 0


def test_partials_stay_in_a_cache_that_holds_them_twice() -> None:
    fits = B60.second_level / 2
    few, many = (
        replace(DIMS_FIRST, traffic=1e9, partials=size) for size in (fits, fits + 1)
    )
    assert estimate(few, B60).microseconds == memory_roof(1e9, B60)
    assert estimate(many, B60).microseconds == memory_roof(1e9 + fits + 1, B60)
    _, slow = ends(B60)
    assert estimate(few, slow).microseconds == memory_roof(1e9 + fits, slow)


def test_every_shape_has_a_label_of_its_own() -> None:
    assert len({(shape.op, shape.label) for shape in SHAPES}) == len(SHAPES)


def test_the_summary_takes_single_tokens_apart() -> None:
    """Their ratios are of latency, and nobody serves for long with one."""

    def row(op: str, shape: str, device: str, ratio: int) -> dict[str, object]:
        return {
            "op": op,
            "shape": shape,
            "device": device,
            "upstream takes from": ratio,
            "upstream takes to": 2 * ratio,
        }

    said = summary(
        [
            row("decode", "T1 H64 K8320", "B60", 236),
            row("decode", "T16 H64 K640", "B60", 7),
            row("decode", "T128 H8 K640", "B70", 10),
            row("prefill", "T2048 H8 K640", "B60", 9),
        ]
    )
    assert (
        "decode: upstream v0.33.0 takes 7 to 20 times as long, median 8.5 to 17,"
        in said
    )
    assert "decode of one token: 236 to 472 times as long" in said
    assert "prefill of one token" not in said
