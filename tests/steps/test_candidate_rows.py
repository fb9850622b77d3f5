# SPDX-License-Identifier: Apache-2.0
"""V4.1's choice of rows gets each request's first row; what no candidate filled stays
unchosen."""

import pytest
import torch
from helpers import layout

CACHE_UTILS = "vllm.models.deepseek_v41.common.ops.cache_utils"
ROWS, FIRST_OF_WINDOW = 40, 20


def combined(choice: list[int]) -> list[list[int]]:
    """The same choice of two requests of 20 tokens, whose last two ask."""
    device = layout.device()
    lens = torch.tensor([20, 20], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    chosen = torch.tensor([choice] * 4, dtype=torch.int32, device=device)
    found, _ = layout.module(CACHE_UTILS).combine_topk_swa_indices(
        chosen, starts, lens, lens, 8, 2, 4, ROWS, FIRST_OF_WINDOW
    )
    return found[:, :4].tolist()


def test_what_no_candidate_fills_stays_unchosen() -> None:
    wanted = [[3, -1, -1, 5]] * 2 + [[43, -1, -1, 45]] * 2
    assert combined([3, -1, 99, 5]) == wanted


@pytest.mark.unchanged
def test_chosen_rows_stay_the_same_on_cuda() -> None:
    assert combined([3, 0, 19, 5]) == [[3, 0, 19, 5]] * 2 + [[43, 40, 59, 45]] * 2
