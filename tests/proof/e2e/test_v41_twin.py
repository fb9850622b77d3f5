# SPDX-License-Identifier: Apache-2.0
"""The float32 twin of V4.1 sees no token before it comes, and every mechanism matters.

`proof/e2e/twins/foreign.py` holds it to an implementation that nobody here wrote.
"""

import random
from collections.abc import Callable

import pytest
import torch

from proof.e2e.checkpoints import checkpoint, engram, v41
from proof.e2e.judging.checks import PLAIN
from proof.e2e.running.serving import Prompt
from proof.e2e.twins import rounding
from proof.e2e.twins.comparison import relative
from proof.e2e.twins.twin import Given, Roundings
from proof.e2e.twins.v41_twin import Mixes, V41Twin

Make = Callable[[type[V41Twin]], V41Twin]
SEEN = 0.02
"""A mechanism that is left out moves the logits by more."""


class WithoutCandidates(V41Twin):
    """Later indexers choose among all entries."""

    def blocks(self, source: int) -> torch.Tensor:
        return torch.ones_like(super().blocks(source))


class NewestNotKept(V41Twin):
    """The newest block has to earn its place."""

    def _newest(self, source: int, size: int) -> torch.Tensor:
        return torch.full_like(super()._newest(source, size), -1)


class WithoutEngram(V41Twin):
    """The tables say nothing."""

    def remembered(
        self, layer: int, streams: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        return streams


class OtherSource(V41Twin):
    """Layers behind the candidates' source go on with its choice."""

    def _source(self, kind: str, layer: int) -> int:
        found = super()._source(kind, layer)
        return min(found, v41.CANDIDATES) if kind == "index" else found


class OwnMixes(V41Twin):
    """Each sublayer collapses the streams with its own mixes, as V4's do."""

    def mixes(self, name: str, streams: torch.Tensor) -> Mixes:
        self.own = super().mixes(name, streams)
        return self.own

    def _collapsed(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        return super()._collapsed(streams, self.own.pre)


class BothTurned(V41Twin):
    """Window layers turn by the compressed layers' speeds."""

    def _speeds(self, compresses: bool) -> torch.Tensor:
        return super()._speeds(True)


BROKEN = (
    WithoutCandidates,
    NewestNotKept,
    WithoutEngram,
    OtherSource,
    OwnMixes,
    BothTurned,
)


@pytest.fixture(scope="module")
def make(
    tmp_path_factory: pytest.TempPathFactory,
) -> Make:
    folder = checkpoint.write(tmp_path_factory.mktemp("v41"), v41.V41(0))[1]
    return lambda kind: kind(folder)


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    drawn = random.Random(1)
    return [drawn.randrange(2, checkpoint.VOCABULARY) for _ in range(300)]


@pytest.mark.parametrize("length", [1, 2, 17, 127, 130, 257])
def test_a_beginning_alone_gives_what_it_gives_in_the_whole(
    make: Make, tokens: list[int], length: int
) -> None:
    """At the edges of an entry, a block and the window, and inside of them."""
    twin = make(V41Twin)
    whole, alone = twin.logits(tokens), twin.logits(tokens[:length])
    assert relative(alone, whole[:length]) < 1e-5


def test_what_reads_alike_has_the_same_rows() -> None:
    hashes = v41.V41(0).hashes
    text = [ord(c) for c in "The cat sat"]
    upper = [ord(c) for c in "THE CAT SAT"]
    for place in range(len(v41.ENGRAM_LAYERS)):
        rows = hashes.rows(text, place)
        assert rows.shape == (len(text), engram.COLUMNS)
        assert rows.equal(hashes.rows(upper, place))
        assert not rows.equal(hashes.rows(text[::-1], place))


def test_n_grams_share_rows(tokens: list[int]) -> None:
    """Some rows stand for different n-grams of the prompt that the engines read."""
    tokens = tokens[:161]
    assert tokens == Prompt(161, 8, seed=1).tokens
    hashes = v41.V41(0).hashes
    known = [hashes.tokens[token] for token in tokens]
    pairs = list(zip([hashes.tokens[engram.PAD], *known], known, strict=False))
    for place in range(len(v41.ENGRAM_LAYERS)):
        first = hashes.rows(tokens, place)[:, 0].tolist()
        assert len(set(first)) < len(set(pairs))


@pytest.mark.parametrize("kind", BROKEN)
def test_every_mechanism_matters(
    make: Make, tokens: list[int], kind: type[V41Twin]
) -> None:
    broken, right = make(kind).logits(tokens), make(V41Twin).logits(tokens)
    error, others = relative(broken, right), broken.argmax(1) != right.argmax(1)
    print(f"{kind.__name__}: {error:.3f}, {int(others.sum())} other tokens")
    assert error > SEEN and others.any()


@torch.no_grad()
def test_a_layer_goes_on_from_what_it_is_given(make: Make, tokens: list[int]) -> None:
    """Its own choice and core change nothing; another choice changes the core."""
    twin = make(V41Twin)
    inputs: dict[int, torch.Tensor] = {}

    def note(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        if part == "attn":
            inputs[layer] = x
            return twin.attention(layer, x)
        return twin.feed_forward(layer, x, tokens)

    twin.states(tokens, note)
    for layer, x in inputs.items():
        twin.beside(inputs)
        free = Given()
        output = twin.attention(layer, x, free)
        assert twin.attention(layer, x, Given(free.own_topk, free.own_core)).equal(
            output
        )
        if free.own_topk is not None:
            same = Given(free.own_topk)
            twin.attention(layer, x, same)
            assert same.overlap(twin.ratio(layer)) == 1.0
            other = Given(free.own_topk.roll(1, 0))
            twin.attention(layer, x, other)
            assert other.own_core is not None and free.own_core is not None
            assert relative(other.own_core, free.own_core) > SEEN


class Replayed(V41Twin):
    """A request that found 256 tokens in the prefix cache, all but the window, of which
    the last 128 are computed again: they see none before them there. Inputs of the
    tokens before them, and of those that wrote the cached entries, are `whole`."""

    whole: dict[int, torch.Tensor]
    FOUND, AGAIN = 256, 128

    def near(self, positions: torch.Tensor) -> torch.Tensor:
        known = (positions >= self.AGAIN) | (positions[:, None] < self.AGAIN)
        return super().near(positions) & known

    def latent(self, source: int) -> torch.Tensor:
        own = self._inputs[source]
        cached = self.whole[source][: self.FOUND]
        self._inputs[source] = torch.cat((cached, own[self.FOUND :]))
        entries = super().latent(source)
        self._inputs[source] = own
        return entries


@torch.no_grad()
def test_a_replayed_window_gives_other_logits(make: Make, tokens: list[int]) -> None:
    """Which is why replay is off on XPU: what follows a cached prefix would differ from
    the same text read whole by more than FP8 makes of it."""
    twin, again = make(V41Twin), make(Replayed)
    assert isinstance(again, Replayed)
    again.whole = whole = {}

    def read(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        if part == "ffn":
            return twin.feed_forward(layer, x, tokens)
        whole[layer] = x
        return twin.attention(layer, x)

    def replay(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        if part == "ffn":
            return again.feed_forward(layer, x, tokens)
        first = again.AGAIN
        return again.attention(layer, torch.cat((whole[layer][:first], x[first:])))

    exact = twin.spoken(twin.states(tokens, read))[Replayed.FOUND :]
    found = again.spoken(again.states(tokens, replay))[Replayed.FOUND :]
    others = int((found.argmax(1) != exact.argmax(1)).sum())
    print(f"{relative(found, exact):.3f}, {others} of {len(exact)} best tokens differ")
    assert relative(found, exact) > PLAIN and others


def test_roundings_are_of_the_size_of_fp8(make: Make, tokens: list[int]) -> None:
    twin = make(V41Twin)
    x = torch.randn(200, twin.config["hidden_size"])
    exact = twin.attention(0, x)
    with twin.rounded(Roundings(activations=True, output_fp8=False)):
        error = relative(twin.attention(0, x), exact)
    assert 0.01 < error < 0.12


def test_e2m1_is_the_nearest_and_of_two_the_even_one() -> None:
    grid = torch.tensor(checkpoint.E2M1)
    between = (grid[1:] + grid[:-1]) / 2
    wanted = torch.where(torch.arange(len(between)) % 2 == 0, grid[:-1], grid[1:])
    assert rounding.e2m1(between).equal(wanted)
    assert rounding.e2m1(-between).equal(-wanted)
    assert rounding.e2m1(grid).equal(grid)
    some = torch.linspace(-7, 7, 4001)
    nearest = (some.abs()[:, None] - grid).abs().amin(1)
    assert (rounding.e2m1(some).abs() - some.abs()).abs().allclose(nearest)
