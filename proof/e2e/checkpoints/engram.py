# SPDX-License-Identifier: Apache-2.0
"""Which rows of Engram's tables a token looks up: one for each hash of the n-grams that
end at it, from their description.

Tokens that read alike are one (`compressed`). An n-gram's tokens are multiplied by odd
numbers of the layer's own and joined by exclusive or. Each order and head takes the
result modulo a prime of its own, and has as many rows of the layer's table.
"""

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch

HEADS = 8
ORDERS = (2, 3, 4)
"""Lengths of the n-grams."""
COLUMNS = HEADS * len(ORDERS)
"""Rows that a token looks up in one layer's table."""
LEAST = 67
"""Of the primes: so few rows that n-grams of a prompt share them."""
PAD = 2
"""The token that stands before the first one."""
ALIKE = " \t\r\n"
"""Characters that count as a space."""


def compressed(characters: Sequence[str]) -> list[int]:
    """For each token's text the number of the first one that reads like it, counted
    without repeats: letters without case and accents, any white space as one space."""
    known: dict[str, int] = {}
    return [known.setdefault(_plain(text), len(known)) for text in characters]


def _plain(text: str) -> str:
    apart = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    bare = "".join(c for c in apart if unicodedata.category(c) != "Mn").lower()
    spaced = " ".join("".join(" " if c in ALIKE else c for c in bare).split(" "))
    return " " if spaced == " " else spaced.strip() or text


def primes(least: int) -> Iterator[int]:
    """The primes from `least` on."""
    number = least
    while True:
        if all(number % divisor for divisor in range(2, int(number**0.5) + 1)):
            yield number
        number += 1


@dataclass(frozen=True)
class Hashes:
    """The hashes of the layers that have a table, for one vocabulary."""

    layers: tuple[int, ...]
    tokens: tuple[int, ...]
    """What `compressed` makes of the vocabulary."""
    least: int = LEAST
    """Rows of a column, at least."""

    @property
    def sizes(self) -> list[list[int]]:
        """For each layer the primes of its columns; no two columns share one."""
        found = primes(self.least)
        return [[next(found) for _ in range(COLUMNS)] for _ in self.layers]

    def rows(
        self, text: Sequence[int], place: int, unread: int | None = None
    ) -> torch.Tensor:
        """The table's rows of each token of a text, `[T, columns]`, in the layer that
        is `place` among those with a table. An n-gram begins after the last token
        `unread`; the rows of that token itself mean nothing."""
        sizes = self.sizes[place]
        starts = numpy.cumsum([0, *sizes[:-1]])
        factors = self._factors(self.layers[place])
        ids = numpy.array([self.tokens[token] for token in text], numpy.int64)
        dead = numpy.array([token == unread for token in text])
        joined = ids * factors[0]
        columns, cut = [], dead.copy()
        for order in ORDERS:
            back = order - 1
            before = numpy.full(len(ids), self.tokens[PAD], numpy.int64)
            before[back:] = ids[: max(len(ids) - back, 0)]
            cut[back:] |= dead[: max(len(ids) - back, 0)]
            before[cut] = self.tokens[PAD]
            joined = joined ^ (before * factors[back])
            own = slice((order - 2) * HEADS, (order - 1) * HEADS)
            columns.append(joined[:, None] % numpy.array(sizes[own]) + starts[own])
        return torch.from_numpy(numpy.concatenate(columns, 1))

    def _factors(self, layer: int) -> numpy.ndarray:
        """Odd, and so small that a product with any token stays below 2^63."""
        bound = (2**63 - 1) // (max(self.tokens) + 1) // 2
        drawn = numpy.random.default_rng(10007 * layer).integers(
            bound, size=ORDERS[-1], dtype=numpy.int64
        )
        return drawn * 2 + 1
