# SPDX-License-Identifier: Apache-2.0
"""What is expected of drafts, by hand."""

from types import SimpleNamespace

import pytest

from proof.e2e.judging.drafts import outcomes, successors

SAYS = {1: 2, 2: 3, 3: 9, 5: 6, 6: 7}


@pytest.mark.parametrize(
    ("new", "count", "wanted"),
    [
        # 1 says 2, which is right; 3 says 9, which is not; 4 says nobody knows what.
        ([1, 2, 3, 4, 5], 1, {(1, 3), (2, 3)}),
        ([1, 2, 3, 4], 3, {(2, 3)}),
        ([1, 5, 7], 1, {(0, 2)}),
        ([1], 2, {(0, 0)}),
        ([4, 1], 1, {(0, 1), (1, 1)}),
    ],
)
def test_outcomes(new: list[int], count: int, wanted: set[tuple[int, int]]) -> None:
    found = outcomes(new, 1, SAYS.get, count)
    assert found == wanted


def test_a_masked_embedding() -> None:
    assert outcomes([1, 2], 1, SAYS.get, 1, masked=True) == {(0, 1), (1, 1)}


def test_what_follows_does_not_depend_on_which_request_ends_first() -> None:
    texts = {"0-a": [1, 2], "2-b": [1, 3], "10-c": [1, 4]}
    for names in (list(texts), list(reversed(texts))):
        run = SimpleNamespace(texts={name: texts[name] for name in names})
        assert successors(run) == {1: 4}
