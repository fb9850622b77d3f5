# SPDX-License-Identifier: Apache-2.0
"""The stand-in of random sampling keeps what it should, and draws by probability."""

import pytest
import torch

from standins.emulated_xpu.ops.sampler import topk_topp_sampler

LOGITS = torch.tensor([0.5, 0.1, 0.25, 0.15]).log()


def drawn(k: int | None, p: float | None, mode: str = "raw_logprobs") -> torch.Tensor:
    torch.manual_seed(0)
    rows = 4000
    tokens, kept = torch.empty(rows, dtype=torch.int64), torch.empty(rows, 4)
    topk_topp_sampler(
        tokens,
        kept if mode.startswith("processed") else None,
        LOGITS.expand(rows, 4).contiguous(),
        None if k is None else torch.full((rows,), k),
        None if p is None else torch.full((rows,), p),
        mode,
        torch.zeros(2, dtype=torch.int64),
        1.0,
    )
    return (
        kept[0] if mode.startswith("processed") else tokens.bincount(minlength=4) / rows
    )


@pytest.mark.parametrize(
    ("k", "p", "expected"),
    [
        (None, None, (0.5, 0.1, 0.25, 0.15)),
        (1, None, (1, 0, 0, 0)),
        (2, None, (2 / 3, 0, 1 / 3, 0)),
        (None, 0.5, (1, 0, 0, 0)),
        (None, 0.51, (2 / 3, 0, 1 / 3, 0)),
        (3, 0.99, (5 / 9, 0, 5 / 18, 1 / 6)),
    ],
)
def test_tokens_come_by_their_probability(
    k: int | None, p: float | None, expected: tuple[float, ...]
) -> None:
    assert drawn(k, p).sub(torch.tensor(expected)).abs().max() < 0.03


def test_logits_are_given_back_in_their_places() -> None:
    expected = LOGITS.masked_fill(torch.tensor([False, True, False, True]), -torch.inf)
    assert drawn(2, None, "processed_logits").equal(expected)
    logprobs = drawn(2, None, "processed_logprobs")
    assert logprobs.exp().allclose(torch.tensor([2 / 3, 0, 1 / 3, 0]))
