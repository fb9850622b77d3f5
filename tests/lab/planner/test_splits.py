# SPDX-License-Identifier: Apache-2.0
"""Which splits are started, against plain arithmetic that is written here anew."""

import itertools

import pytest

from lab import memory
from lab.planner import asked, splits
from lab.planner.checkpoints import NAMED, Checkpoint

MODELS = ("flash", "pro", "v4.1")
V41_STARTS = (8, 14, 20)


def fits(known: Checkpoint, device: memory.Device, ranks: int, stages: int) -> bool:
    """Whether bytes fit, with all stages as the fullest: weights, 3 GiB of activations
    and a GiB of buffers and cache, of nine tenths."""
    if known.name == "v4.1":
        cuts = itertools.combinations(V41_STARTS, stages - 1)
        edges = ((0, *cut, 40) for cut in cuts)
        most = min(max(b - a for a, b in itertools.pairwise(one)) for one in edges)
    else:
        # Three hash layers stay together.
        most = max(-(-known.model.layers // stages), 3)
    ends, layers = 0.0, 0.0
    for group in known.model.stored():
        size = group.count * group.size / (ranks if group.sharded else 1)
        if group.part in ("embedding", "head"):
            ends += size
        else:
            layers += size * most / known.model.layers
    return layers + ends < (device.memory * 0.9 - 4) * memory.GIB


def legal(known: Checkpoint, count: int) -> list[tuple[int, int]]:
    """Ranks and stages over so many devices."""
    groups = 16 if known.name == "pro" else 8
    # A ratio-4 layer in each stage, or one that writes what V4.1's others read.
    deepest = {"flash": 21, "pro": 30, "v4.1": 4}[known.name]
    return [
        (ranks, count // ranks)
        for ranks in (1, 2, 4, 8, 16)
        if ranks <= groups and count % ranks == 0 and count // ranks <= deepest
    ]


@pytest.mark.parametrize("device", memory.DEVICES, ids=lambda one: asked.short(one))
@pytest.mark.parametrize("name", MODELS)
def test_what_fits_is_started(name: str, device: memory.Device):
    """A plan starts every legal split, so it says no only where the release does; and
    its search for fewer devices passes none by that fits."""
    known = NAMED[name]
    fewest = None
    for count in range(1, 65):
        wanted = asked.Asked(known, device, count, 4096, 1)
        started = splits.possible(known, count)
        assert {(one.ranks, one.stages) for one in started} >= set(legal(known, count))
        fitting = [one for one in legal(known, count) if fits(known, device, *one)]
        for one in started:
            sizes = one.partition or splits.even(known.model.layers, one.stages)
            assert sum(sizes) == known.model.layers
            assert min(sizes) >= 1
            starts = [*itertools.accumulate(sizes[:-1])]
            assert set(starts) <= set(known.begins)
            for first, last in itertools.pairwise((0, *starts, known.model.layers)):
                assert any(first <= layer < last for layer in known.anchors)
        promising = {
            (one.ranks, one.stages)
            for one in started
            if splits.promised(wanted, one) >= 1
        }
        assert promising >= set(fitting), count
        if fitting and fewest is None:
            fewest = count
    found = next(splits.fewest(wanted), None)
    if fewest is not None:
        assert found is not None
        assert found[0] <= fewest
        assert found[0] > fewest / 2


@pytest.mark.parametrize("name", MODELS)
def test_every_split_is_possible_or_has_a_reason(name: str):
    known = NAMED[name]
    for count in range(1, 65):
        named = {
            f"TP {one.ranks}" + (f", PP {one.stages}" if one.stages > 1 else "")
            for one in splits.possible(known, count)
        }
        reasons = splits.impossible(known, count)
        assert not named & set(reasons)
        assert len(named) + len(reasons) == sum(
            count % ranks == 0 for ranks in range(1, count + 1)
        )


@pytest.mark.parametrize(("layers", "stages"), [(43, 4), (43, 16), (61, 8), (40, 2)])
def test_the_even_cut_is_vllms(layers: int, stages: int):
    """Of the layers that are left over, those before the last stage get one each."""
    sizes = splits.even(layers, stages)
    assert sum(sizes) == layers
    assert sizes[-1] == layers // stages
    assert list(sizes[:-1]) == sorted(sizes[:-1])
    assert max(sizes) - min(sizes) <= 1


def test_b60_carry_flash_from_ten_on():
    """What ten starts said of 16 requests of 131,072 tokens: nine promise too much at
    most, eight nothing."""
    wanted = asked.Asked(NAMED["flash"], asked.device("b60"), 8, 131_072, 16)
    found = [count for count, _ in itertools.islice(splits.fewest(wanted), 6)]
    assert 9 <= found[0] <= 10
    assert 10 in found
