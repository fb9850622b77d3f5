# SPDX-License-Identifier: Apache-2.0
"""What the records of an engine are put together to."""

from typing import Any

import pytest
import torch

from proof.e2e.twins.comparison import Sublayer, by_request, logits_by_request

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


def computes(
    layer: int, name: str, positions: list[int], part: str = "attn"
) -> dict[str, Any]:
    """A record whose rows hold their positions and one more than the layer."""
    rows = torch.tensor([[p, layer + 1.0] for p in positions])
    here = {"positions": torch.tensor(positions), "input": rows}
    gave = {} if part == "keys" else {"output": rows}
    return {"layer": layer, "part": part, "rows": [(name, len(rows))], **here, **gave}


def seen(*records: dict[str, Any]) -> dict[tuple[str, int], Sublayer]:
    texts = {"0": [*range(9)], "1": [*range(6), 7, 8, 9]}
    return by_request({"records": records, "texts": texts}, "attn")


def positions(sublayer: Sublayer) -> list[float]:
    """Those of which something is known."""
    return sublayer.output[sublayer.output[:, 1] > 0][:, 0].tolist()


def test_later_layers_have_rows_of_the_end() -> None:
    """A chunk of four tokens leaves them one row, and the next one all but the first.
    The layer that writes keys of all rows has the inputs of all."""
    first, second = [0, 1, 2, 3], [4, 5, 6, 7, 8]
    end = [5, 6, 7, 8]
    found = seen(
        *(computes(0, "0", first), computes(1, "0", first, "keys")),
        *(computes(1, "0", [3]), computes(2, "0", [3])),
        *(computes(0, "0", second), computes(1, "0", second, "keys")),
        *(computes(1, "0", end), computes(2, "0", end)),
    )
    whole, source, later = (found["0", layer] for layer in range(3))
    assert (whole.first, source.first, later.first) == (0, 5, 5)
    assert (whole.keyless, source.keyless, later.keyless) == (False, False, True)
    assert positions(later) == positions(source) == end
    assert source.input[:, 0].tolist() == [*range(9)]
    assert not later.input[:5].any()
    # Behind a prefix of six tokens the window has those that the other one computed.
    rest = [6, 7, 8]
    records = [computes(0, "1", rest), computes(1, "1", rest), computes(2, "1", rest)]
    found = seen(
        *(computes(0, "0", first + second), computes(1, "0", first + second, "keys")),
        *(computes(1, "0", end), computes(2, "0", end), *records),
    )
    assert positions(found["1", 2]) == end
    assert (found["1", 2].cached, found["1", 2].first) == (6, 5)
    assert (found["1", 0].cached, found["1", 0].first) == (6, 0)


def test_a_missing_position_is_an_error() -> None:
    with pytest.raises(AssertionError, match="a position is missing"):
        seen(computes(0, "0", [0, 1, 3]))
