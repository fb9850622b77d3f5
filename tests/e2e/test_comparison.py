# SPDX-License-Identifier: Apache-2.0
"""What the records of an engine are put together to."""

from typing import Any

import torch

from e2e.comparison import logits_by_request

NAME = "0-pushed-out"


def step(*positions: int) -> dict[str, Any]:
    """The one attention layer of a step."""
    places = torch.tensor(positions)
    return {"part": "attn", "rows": [(NAME, len(places))], "positions": places}


def test_logits_of_a_token_that_is_computed_again_are_of_its_first_time() -> None:
    """Three tokens are read, a fourth follows, and after a pre-emption a fifth."""
    given = enumerate(((1, 0), (2, 1), (3, 2)), 1)
    entries = [
        {"after": after, "requests": [NAME], "values": torch.tensor([row])}
        for after, row in given
    ]
    records = [step(0, 1, 2), step(3), step(0, 1, 2, 3, 4)]
    result = {"records": records, "logits": entries}
    all_ = logits_by_request(result)[NAME]
    assert {n: x.tolist() for n, x in all_.items()} == {2: [1, 0], 3: [2, 1], 4: [3, 2]}
    assert list(logits_by_request(result, last=True)[NAME]) == [4]
