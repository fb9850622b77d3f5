# SPDX-License-Identifier: Apache-2.0
"""How long a prompt takes, where the last layers compute its end alone."""

import pytest

from lab.aot.costs import prompts, step
from lab.aot.costs.host_experts import Slots
from lab.aot.costs.model import devices
from lab.aot.costs.step import Kernels, Split
from lab.memory import FLASH
from lab.memory_v41 import FLASH_V41

(B70,) = (device for device in devices() if device.name == "Arc Pro B70")
SPLIT = Split(B70, 8, 2)


def test_v41_computes_the_end_in_nineteen_layers():
    assert prompts.end_rows(FLASH_V41) == 128 + 18 * 127 == 2414
    assert prompts.end_rows(FLASH) == 0


@pytest.mark.parametrize("tokens", [1, 100, 2414, 2415, 8192, 8193, 20_001])
@pytest.mark.parametrize("chunk", [2048, 8192])
def test_every_row_is_computed_once(tokens: int, chunk: int):
    for replay in (False, True):
        found = prompts.rows(FLASH_V41, tokens, chunk, replay=replay)
        assert len(found) == -(-tokens // chunk)
        assert all(max(one) <= chunk for one in found)
        sums = [sum(layer) for layer in zip(*found, strict=True)]
        assert sums[:21] == [tokens] * 21
        assert sums[21:] == [min(tokens, 2414) if replay else tokens] * 19


def test_one_chunk_on_one_stage_is_a_prefill():
    one = Split(B70, 8)
    whole = step.total(step.prefill(FLASH, one, 8192, 0, Kernels({}, {})))
    found = prompts.first_token(FLASH, one, (43,), 8192, 8192)
    assert found.fast == pytest.approx(whole.fast)
    assert found.slow == pytest.approx(whole.slow)


def test_stages_work_on_chunks_at_the_same_time():
    """Of 16 chunks on two equal stages the last is done after 17 halves."""
    one, sixteen = (
        prompts.first_token(FLASH_V41, SPLIT, (20, 20), 8192 * n, 8192, replay=False)
        for n in (1, 16)
    )
    assert sixteen.fast == pytest.approx(one.fast * 17 / 2)


def test_the_cut_at_14_keeps_the_second_stage_busy():
    before, even, early = (
        prompts.first_token(FLASH_V41, SPLIT, sizes, 131_072, 8192, replay=replay)
        for sizes, replay in (((20, 20), False), ((20, 20), True), ((14, 26), True))
    )
    assert even.fast > 0.9 * before.fast
    assert early.fast < 0.75 * before.fast


def test_experts_of_the_host_are_read_in_each_chunk():
    one, few = Split(B70, 1), Slots(27, 28)
    whole = prompts.first_token(FLASH, one, (43,), 16_384, 8192, few)
    plain = prompts.first_token(FLASH, one, (43,), 16_384, 8192)
    assert 11_000 < whole.slow - plain.slow < 12_000
    assert 9_400 < whole.fast < plain.fast + 9_400
