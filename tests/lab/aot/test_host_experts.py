# SPDX-License-Identifier: Apache-2.0
"""What experts in the host's memory cost a step, from published shares of hits."""

from itertools import pairwise

import pytest

from kernels.xpu_dsv4.moe.expert_waves import USES
from lab.aot.costs import host_experts, prompts
from lab.aot.costs.host_experts import Slots
from lab.aot.costs.model import devices
from lab.aot.costs.step import Split
from lab.memory import FLASH

GIB = 1 << 30
(B70,) = (device for device in devices() if device.name == "Arc Pro B70")
ONE = Split(B70, 1)


def test_hits_are_the_published_ones():
    for count, found in ((32, 0.67), (64, 0.81), (256, 1.0), (300, 1.0)):
        hits = host_experts.hits(FLASH, Slots(count, 28))
        assert hits.fast == pytest.approx(found)
        assert hits.slow == min(1, count / 256)


def test_more_slots_never_find_less():
    found = [host_experts.hits(FLASH, Slots(count, 28)) for count in range(1, 257)]
    for fewer, more in pairwise(found):
        assert fewer.fast < more.fast
        assert fewer.slow < more.slow
        assert fewer.slow <= fewer.fast


def test_a_token_reads_what_it_misses():
    """Six of 256 experts in each of 43 layers, 3.19 GiB, of which the device has 27."""
    all_of_a_token = host_experts.read_bytes(FLASH, ONE, FLASH.active)
    assert all_of_a_token == 43 * 6 * 3 * 4096 * 2048 * (0.5 + 1 / 32)
    part = host_experts.fetched(FLASH, ONE, Slots(27, 28), 1)
    assert part.bound == "host link"
    assert part.milliseconds.fast == pytest.approx(all_of_a_token * 0.435 / 28e6, 1e-2)
    assert part.milliseconds.slow == pytest.approx(
        all_of_a_token * (1 - 27 / 256) / 28e6 / 0.9
    )
    four = host_experts.fetched(FLASH, Split(B70, 4), Slots(27, 28), 1)
    assert four.milliseconds.fast == pytest.approx(part.milliseconds.fast / 4)
    none = host_experts.fetched(FLASH, ONE, Slots(256, 28), 1)
    assert none.milliseconds.slow == 0


def test_a_long_chunk_reads_all_experts():
    """137 GiB, at best without the quarter that lies on the device; the link is slower
    than the products, which at best cost nothing more."""
    part = host_experts.streamed(FLASH, ONE, Slots(64, 28), 8192)
    assert part.milliseconds.fast * 28e6 / GIB == pytest.approx(137.06 * 0.75, rel=1e-3)
    assert part.milliseconds.slow * 28e6 * 0.9 / GIB == pytest.approx(137.06, rel=1e-3)
    alone = prompts.first_token(FLASH, ONE, [43], 8192, 8192)
    both = prompts.first_token(FLASH, ONE, [43], 8192, 8192, Slots(64, 28))
    assert both.slow == pytest.approx(alone.slow + part.milliseconds.slow)
    assert both.fast < alone.fast + part.milliseconds.fast
    assert both.fast > part.milliseconds.fast


def test_a_short_chunk_overlaps_nothing():
    """170 tokens of Flash choose fewer than four times its experts."""
    assert not host_experts.overlaps(FLASH, 4 * 256 // 6)
    assert host_experts.overlaps(FLASH, USES * FLASH.experts // FLASH.active + 1)
    few = host_experts.streamed(FLASH, ONE, Slots(57, 28), 4)
    assert few.milliseconds.fast > 0
