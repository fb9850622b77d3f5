# SPDX-License-Identifier: Apache-2.0
"""Images in prompts: what `engine.py` hands over, and what the twin of a tower sees."""

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

import numpy
from PIL import Image

PLACEHOLDER_TEXT = "<\uff5cdeepseek_image\uff5c>"
PLACEHOLDER = 129_200
"""Its token."""
SENTINELS = 129_257
"""The first of five tokens that stand for the parts of an image, in this order."""
START, PAD, PATCHES, NEWLINE, END = range(SENTINELS, SENTINELS + 5)
PATCH = 14
"""Pixels of a patch, along and down."""
MERGED = 3
"""Patches that make one token, along and down."""


@dataclass(frozen=True)
class Picture:
    """Random colours, `down` by `along` patches, or a file that ends too early."""

    at: int
    """The place of the image among the tokens of its prompt."""
    down: int
    along: int
    seed: int = 0
    broken: bool = False

    def pixels(self) -> Any:
        """The colours, `[rows, columns, 3]` uint8."""
        size = (self.down * PATCH, self.along * PATCH, 3)
        return numpy.random.default_rng(self.seed).integers(0, 256, size, numpy.uint8)

    def image(self) -> Image.Image:
        """What a client would have sent."""
        drawn = Image.fromarray(self.pixels())
        if not self.broken:
            return drawn
        file = io.BytesIO()
        drawn.save(file, "PNG")
        return Image.open(io.BytesIO(file.getvalue()[: file.tell() // 2]))

    @property
    def grid(self) -> tuple[int, int]:
        """Tokens of the patches, down and along."""
        return -(-self.down // MERGED), -(-self.along // MERGED)


Key = tuple[tuple[int, ...], tuple[Picture, ...]]
"""The tokens and the images of a text."""


class Text(list[int]):
    """The tokens of a request, which do not say what its images show; of its slices,
    those from the first token on keep the images."""

    def __init__(self, tokens: Iterable[int], images: tuple[Picture, ...] = ()) -> None:
        super().__init__(tokens)
        self.images = images

    @overload
    def __getitem__(self, place: SupportsIndex, /) -> int: ...

    @overload
    def __getitem__(self, place: slice, /) -> list[int]: ...

    def __getitem__(self, place: SupportsIndex | slice, /) -> int | list[int]:
        if not isinstance(place, slice):
            return super().__getitem__(place)
        part = super().__getitem__(place)
        return part if place.start else Text(part, self.images)

    @property
    def key(self) -> Key:
        """What equal requests have in common."""
        return tuple(self), self.images


def block(picture: Picture, start: int) -> tuple[list[int], list[int]]:
    """The tokens of an image that begins at position `start`, and which of its rows
    of patches, counted along and then down, each of their places has.

    The image starts at the last place of four. Two rows are read together, one token
    of each in turn; an odd last row has a row of padding below.
    """
    rows, columns = picture.grid
    tokens, order = [PAD] * (3 - start % 4) + [START], []
    for row in range(0, rows, 2):
        for column in range(columns + 1):
            for own in (row, row + 1):
                if own >= rows:
                    tokens.append(PAD)
                elif column == columns:
                    tokens.append(NEWLINE)
                else:
                    tokens.append(PATCHES)
                    order.append(own * columns + column)
    # Image and end fill places of four.
    if (rows + rows % 2) // 2 * (columns + 1) % 2:
        tokens += [PAD, PAD]
    return [*tokens, END], order


def spans(tokens: list[int]) -> list[tuple[int, int]]:
    """The positions of the first and the last token of each image of a text."""
    starts = [place for place, token in enumerate(tokens) if token == START]
    return [(start, tokens.index(END, start)) for start in starts]


def images_of(
    tokens: list[int], known: Mapping[tuple[int, ...], tuple[Picture, ...]]
) -> tuple[Picture, ...]:
    """The images of a text: its own, or of the known texts that begin with `tokens`,
    which are the same."""
    if isinstance(tokens, Text):
        return tokens.images
    (images,) = {
        images for text, images in known.items() if text[: len(tokens)] == tuple(tokens)
    }
    return images
