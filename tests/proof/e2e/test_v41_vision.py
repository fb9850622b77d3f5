# SPDX-License-Identifier: Apache-2.0
"""V4.1 sees images as its float32 twin does, in chunks that may end inside of one.

The prompts of the prefix cache fill the window. With `--full` there are several images
in a prompt, and one with more tokens than the window, and than a step takes.
"""

from dataclasses import replace

import pytest
from test_scenarios import computed
from test_v41 import check

from proof.e2e.checkpoints import dspark, v41
from proof.e2e.judging.checks import (
    EXPERTS,
    check_attention,
    check_experts,
    check_same_tokens,
    check_tower,
)
from proof.e2e.judging.v41_checks import STREAMS, stream_errors
from proof.e2e.judging.v41_draft import check_draft
from proof.e2e.pictures import Picture
from proof.e2e.running.choices import sizes
from proof.e2e.running.serving import Engines, Job, Prompt, Served
from proof.e2e.twins import v41_vision
from proof.e2e.twins.comparison import feed_forward_errors
from proof.e2e.twins.tower import Tower
from proof.e2e.twins.twin import Roundings
from proof.e2e.twins.v41_vision import V41VisionTwin

pytestmark = pytest.mark.newest

KIND = "v4.1 with images"
SERVER = tuple((dict(v41.SERVER) | {"limit_mm_per_prompt": {"image": 3}}).items())
LARGE = (30, 39)
"""Ten rows of thirteen tokens, and a token at the end of each."""


def prompt(
    length: int, new: int, seed: int, *images: Picture, own_tail: int = 0
) -> Prompt:
    return Prompt(length, new, seed, own_tail, images=images, image_token=v41.IMAGE)


ONE = prompt(12, 4, 1, Picture(5, *LARGE, seed=1))
THREE = prompt(9, 4, 2, Picture(2, 7, 10, 2), Picture(3, 4, 4, 3), Picture(7, 9, 20, 4))
LONG = prompt(150, 3, 3, Picture(120, *LARGE, seed=5))
TEXT = prompt(5, 4, 4)
IMAGES = Job("v4.1, images", ((ONE, THREE, TEXT), (LONG,)), SERVER, checkpoint=KIND)
AGAIN = prompt(140, 2, 6, Picture(118, 9, 20, seed=6), own_tail=2)
OTHER = prompt(140, 2, 6, Picture(118, 9, 20, seed=7), own_tail=3)
TWICE = Job(
    "v4.1, images and the prefix cache",
    ((prompt(140, 2, 6, Picture(118, 9, 20, seed=6), own_tail=1),), (AGAIN, OTHER)),
    (*SERVER, ("enable_prefix_caching", True)),
    checkpoint=KIND,
)
ALIKE = Job(
    "v4.1, images of equal tokens",
    (tuple(prompt(12, 2, 1, Picture(5, 9, 20, seed=seed)) for seed in (1, 2)),),
    SERVER,
    checkpoint=KIND,
)
DRAFTS = {"method": "dspark", "num_speculative_tokens": dspark.BLOCK}
DRAFTED = Job(
    "v4.1, images and drafts",
    ((ONE, TEXT),),
    (*SERVER, ("speculative_config", DRAFTS)),
    checkpoint=f"{KIND} and drafts",
)
SMALL = prompt(12, 2, 1, Picture(5, 9, 20, seed=1))
ANEW = "v4.1, images without drafts"
BROKEN = Job("v4.1, broken images", ((SMALL,),), SERVER, sabotage=True, checkpoint=KIND)
BAD = Job(
    "v4.1, bad images",
    ((TEXT,),),
    SERVER,
    checkpoint=KIND,
    refused=(
        prompt(5, 1, 0, Picture(2, 9, 9, broken=True)),
        prompt(9, 1, 0, *(Picture(place, 4, 4) for place in range(1, 5))),
        prompt(500, 1, 0, Picture(5, *LARGE)),
    ),
)


@pytest.fixture(autouse=True)
def release_that_sees(engines: Engines, release: str) -> None:
    if not engines.has_v41(release):
        pytest.skip(f"{release} refuses V4.1 on XPU")


def twin_after(engines: Engines, result: Served) -> V41VisionTwin:
    """The twin, which knows the pictures of each text."""
    twin = engines.twin_of(KIND)
    assert isinstance(twin, V41VisionTwin)
    twin.look_at(result)
    return twin


@sizes(TWICE, IMAGES)
def test_images_take_their_places(engines: Engines, release: str, job: Job) -> None:
    """The processor's tokens are those of the description, in each prompt."""
    result = engines.serve(release, job)
    for given, read in zip(result.job.prompts, result.read, strict=True):
        wanted: list[int] = []
        drawn = {picture.at: picture for picture in given.images}
        for place, token in enumerate(given.tokens):
            picture = drawn.get(place)
            parts = v41_vision.block(picture) if picture else ()
            wanted += [v41.IMAGE] * len(parts) if parts else [token]
        assert read == wanted
    assert result.read[0].count(v41.IMAGE) > (128 if job is IMAGES else 16)


@sizes(TWICE, IMAGES)
def test_each_layer(engines: Engines, release: str, job: Job) -> None:
    result = engines.serve(release, job)
    check(result, twin_after(engines, result))


@sizes(TWICE, IMAGES)
def test_the_tower(engines: Engines, release: str, job: Job) -> None:
    result = engines.serve(release, job)
    check_tower(result, twin_after(engines, result).weights, Tower.encoded)


@pytest.mark.full
@pytest.mark.serves(ALIKE)
def test_images_of_equal_tokens(engines: Engines, release: str) -> None:
    """Each request's layers are those of its own image."""
    result = engines.serve(release, ALIKE)
    assert result.read[0] == result.read[1]
    check(result, twin_after(engines, result))


@pytest.mark.full
def test_drafts_after_images(engines: Engines, release: str) -> None:
    """Experts too, of rows whose drafts were rejected."""
    plain = engines.serve(release, replace(IMAGES, name=ANEW, waves=DRAFTED.waves))
    known = dspark.following(new[:3] for new in plain.new_tokens())
    engines.add_checkpoint(DRAFTED.checkpoint, v41_vision.Images(0, known))
    result = engines.serve(release, DRAFTED)
    check_same_tokens(result, plain)
    assert 0 < result.answer["drafts"]["accepted"] < result.answer["drafts"]["drafted"]
    twin = engines.twin_of(DRAFTED.checkpoint)
    assert isinstance(twin, V41VisionTwin)
    check_attention(result, twin)
    check_experts(result, twin)
    check_draft(result, twin)


@pytest.mark.serves(TWICE)
def test_a_hit_inside_an_image(engines: Engines, release: str) -> None:
    """The first block ends inside the image; another image is no hit."""
    result = engines.serve(release, TWICE)
    first = [computed(result, number)[0] for number in range(len(result.read))]
    assert first == [0, 128, 0]


@pytest.mark.full
@pytest.mark.serves(BROKEN)
def test_faults_are_seen(engines: Engines, release: str) -> None:
    """No bias for image tokens in layer 0, and Engram of layer 2 changes images."""
    result = engines.serve(release, BROKEN)
    twin = twin_after(engines, result)
    errors = feed_forward_errors(result.answer, twin, Roundings.of(result.answer))
    streams = stream_errors(result, twin)
    print(errors, streams, sep="\n")
    by_layer = {layer: error for (_, layer), error in errors.items()}
    assert by_layer.pop(0) > 5 * EXPERTS
    assert max(by_layer.values()) <= EXPERTS
    assert streams["attn", 2] > 5 * STREAMS


@pytest.mark.serves(BAD)
def test_bad_images_are_refused_and_the_next_request_served(
    engines: Engines, release: str
) -> None:
    result = engines.serve(release, BAD)
    print("\n".join(result.answer["refusals"]))
    assert result.answer["tokens_after_refusals"] == result.answer["tokens"]
