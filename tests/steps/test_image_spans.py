# SPDX-License-Identifier: Apache-2.0
"""Model runner V2 hands attention the whole block of an image, without its padding."""

from pathlib import Path
from typing import Any

import pytest
from helpers import layout
from helpers.images import block, encoder_cache, handed, image, state_with


def spans(
    folder: Path, monkeypatch: pytest.MonkeyPatch, images: Any, sees: bool = True
) -> Any:
    """What the runner hands attention of one request with `images`."""
    return handed(state_with(folder, monkeypatch, encoder_cache(images), sees))


def test_a_span_is_the_whole_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An image behind each length of padding, the last wider than the window."""
    images = [block(offset, 3, 5) for offset in (16, 49, 82, 115)]
    images.append(block(150, 10, 13))
    wanted = [(19, 38), (51, 70), (83, 102), (115, 134), (151, 292)]
    assert wanted[-1][1] - wanted[-1][0] >= layout.WINDOW
    got = spans(tmp_path, monkeypatch, images)
    assert got == {0: [], 1: wanted}, f"the spans of the images are {got[1]}"


@pytest.mark.unchanged
def test_other_models_see_embeddings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, and none that is wider than the window."""
    images = [block(16, 2, 5), image(40, [1] * (layout.WINDOW + 1))]
    got = spans(tmp_path, monkeypatch, images, sees=False)
    assert got == {0: [], 1: [(20, 24), (26, 30)]}
