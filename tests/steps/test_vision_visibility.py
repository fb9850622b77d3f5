# SPDX-License-Identifier: Apache-2.0
"""In prefill, each token of an image attends to the whole image besides its window."""

import pytest
import torch
from helpers import reference_attention as reference
from helpers.attention_batch import Batch, random_sinks

TOLERANCE = 4e-3


def off_by(batch: Batch, sinks: torch.Tensor) -> float:
    return reference.relative(batch.forward(), batch.expected(sinks))


@pytest.mark.parametrize(
    ("ratio", "tokens", "new", "image"),
    [(0, 190, 190, (20, 180)), (4, 190, 190, (39, 180)), (128, 170, 35, (140, 163))],
)
def test_an_image_sees_itself(
    ratio: int, tokens: int, new: int, image: tuple[int, int]
) -> None:
    """Text is before and after it, and two are longer than the window."""
    sinks = random_sinks()
    batch = Batch(ratio, (tokens,), (new,), sinks=sinks, images={0: [image]})
    error = off_by(batch, sinks)
    print(f"figure: attention of an image is off by {error:.2%}")
    assert error < TOLERANCE, f"attention of an image is off by {error:.1%}"


def test_each_request_has_its_own_images() -> None:
    """Beside a decode, one request with two images, of which the second is longer than
    the window, one with none, and one whose image comes after text that was computed
    before."""
    sinks = random_sinks()
    images = {1: [(3, 20), (27, 160)], 3: [(147, 163)]}
    batch = Batch(4, (131, 165, 5, 170), (1, 165, 5, 25), sinks=sinks, images=images)
    error = off_by(batch, sinks)
    assert error < TOLERANCE, f"attention of an image is off by {error:.1%}"


@pytest.mark.unchanged
def test_a_batch_without_images_stays() -> None:
    sinks = random_sinks()
    batch = Batch(4, (140,), (20,), sinks=sinks)
    assert off_by(batch, sinks) < TOLERANCE
