# SPDX-License-Identifier: Apache-2.0
"""The test of counts passes a right sampler and finds broken ones, at the size at
which the engines are tested."""

import pytest
import torch
from test_sampling import EACH, KINDS, NEW

from proof.e2e.judging.chance import RATE, Draw, draw, excess, p_value

DRAWS = EACH * NEW * len(KINDS)
VOCABULARY = 128


def drawn(seed: int, fault: str = "") -> list[Draw]:
    """As many draws as a wave has, each from logits of its own."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(DRAWS):
        asked = dict(list(KINDS.values())[number % len(KINDS)])
        logits = torch.randn(VOCABULARY, generator=generator)
        seen = {name: value for name, value in asked.items() if name != fault}
        biased = logits.clone()
        if fault == "one token":
            biased[7] += 5
        shares = draw(0, biased, seen, ()).shares
        token = int(torch.multinomial(shares, 1, generator=generator))
        found.append(draw(token, logits, asked, ()))
    return found


def outside(draws: list[Draw]) -> int:
    return sum(one.shares[one.token] == 0 for one in draws)


def worst(draws: list[Draw]) -> float:
    counted = [one for one in draws if not one.edge and one.shares[one.token] > 0]
    counts = (p_value(counted, by_rank) for by_rank in (False, True))
    return min(*counts, excess(counted))


def test_a_right_sampler_passes() -> None:
    values = [worst(drawn(seed)) for seed in range(50)]
    assert min(values) > 1e-4, sorted(values)[:5]
    assert not any(outside(drawn(seed)) for seed in range(10))


@pytest.mark.parametrize("fault", ["top_k", "top_p"])
def test_what_is_left_out_is_found(fault: str) -> None:
    assert min(outside(drawn(seed, fault)) for seed in range(10)) > 0


def test_one_token_too_often_is_found() -> None:
    values = [worst(drawn(seed, "one token")) for seed in range(10)]
    assert max(values) < RATE, sorted(values)[-5:]


def test_counts_of_one_distribution_have_the_rate_of_chi_squared() -> None:
    """A tenth of all right samplers is below 0.1."""
    shares = torch.softmax(torch.arange(8) / 4, 0).double()
    generator = torch.Generator().manual_seed(0)
    low = 0
    for _ in range(400):
        tokens = torch.multinomial(shares, 200, True, generator=generator).tolist()
        low += p_value([Draw(token, shares, False) for token in tokens], False) < 0.1
    # Five deviations of 400 such tests.
    assert abs(low - 40) < 5 * 6, low
