# SPDX-License-Identifier: Apache-2.0
"""V4 Vision sees images as its float32 twin does, whatever a scheduler does to them.

The largest image has more tokens than the window. A step takes one such image and a
little text, so that a prompt around it comes in chunks; without `--full` this is so in
the engine that is broken on purpose, whose other layers keep the bounds.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from test_scenarios import computed

from proof.e2e import pictures
from proof.e2e.checkpoints import dspark, vision
from proof.e2e.judging.checks import (
    EXPERTS,
    TIGHT,
    check_attention,
    check_experts,
    check_logits,
    check_same_tokens,
    check_tower,
)
from proof.e2e.judging.drafts import check_drafts
from proof.e2e.judging.ranks import FORKED, PATIENT
from proof.e2e.pictures import Picture
from proof.e2e.running.choices import sizes
from proof.e2e.running.serving import Engines, Job, Prompt, Served
from proof.e2e.twins.comparison import attention_errors, feed_forward_errors
from proof.e2e.twins.twin import Roundings
from proof.e2e.twins.vision_twin import VisionTwin, rows_of

pytestmark = pytest.mark.newest

SERVER = (*vision.ENGINE, ("limit_mm_per_prompt", {"image": 3}))
LARGE = (30, 39)
"""Ten rows of thirteen tokens, and a token at the end of each."""
ONE = Prompt(12, 4, seed=1, images=(Picture(5, *LARGE, seed=1),))
THREE = Prompt(
    9,
    4,
    seed=2,
    images=(Picture(2, 7, 10, 2), Picture(3, 4, 4, 3), Picture(7, 9, 20, 4)),
)
LONG = Prompt(150, 3, seed=3, images=(Picture(120, *LARGE, seed=5),))
TEXT = Prompt(5, 4, seed=4)
IMAGES = Job("images", ((ONE, THREE, TEXT), (LONG,)), SERVER, checkpoint="vision")
FEW = replace(IMAGES, name="few images", waves=IMAGES.waves[:1], short=True)
CROSSING = Prompt(140, 2, seed=6, own_tail=0, images=(Picture(118, *LARGE, seed=6),))
BEFORE = Prompt(130, 2, seed=7, own_tail=0, images=(Picture(3, *LARGE, seed=7),))
TWICE = Job(
    "images and the prefix cache",
    tuple(
        tuple(
            Prompt(p.length, p.new, p.seed, own_tail=tail, images=p.images)
            for p in (CROSSING, BEFORE)
        )
        for tail in (1, 2)
    ),
    (*SERVER, ("enable_prefix_caching", True)),
    checkpoint="vision",
)
DRAFTS = {"method": "dspark", "num_speculative_tokens": dspark.BLOCK}
SPECULATING = Job(
    "images and drafts",
    ((ONE, TEXT),),
    (*SERVER, ("speculative_config", DRAFTS)),
    checkpoint="vision with drafts",
)
SPECULATING_FEW = replace(
    SPECULATING,
    name="few images and drafts",
    waves=((THREE, TEXT),),
    splits_keys=False,
    short=True,
)
TWO_RANKS = Job(
    "images over two ranks",
    IMAGES.waves,
    (*SERVER, ("tensor_parallel_size", 2), ("distributed_executor_backend", "mp")),
    checkpoint="vision",
)
TWO_STAGES = Job(
    "images over two stages",
    ((ONE, TEXT),),
    (*SERVER, ("pipeline_parallel_size", 2), ("distributed_executor_backend", "mp")),
    checkpoint="vision of six layers",
    splits_keys=False,
    environment=(FORKED, PATIENT),
)
AROUND = Prompt(60, 2, seed=3, images=(Picture(50, *LARGE, seed=5),))
BROKEN = Job("broken images", ((AROUND,),), SERVER, sabotage=True, checkpoint="vision")
BAD = Job(
    "bad images",
    ((TEXT,),),
    SERVER,
    checkpoint="vision",
    refused=(
        Prompt(5, 1, images=(Picture(2, 9, 9, broken=True),)),
        Prompt(9, 1, images=tuple(Picture(place, 4, 4) for place in range(1, 5))),
        Prompt(500, 1, images=(Picture(5, *LARGE),)),
    ),
)
BLIND = Job(
    "an image for a text model",
    ((TEXT,),),
    (("skip_tokenizer_init", False),),
    refused=(Prompt(5, 1, images=(Picture(2, 9, 9),)),),
)


@pytest.fixture(autouse=True)
def release_that_sees(engines: Engines, release: str) -> None:
    if not engines.has_step(release, "vision-model"):
        pytest.skip(f"{release} refuses V4 Vision on XPU")


def twin_after(engines: Engines, result: Served, name: str = "vision") -> VisionTwin:
    """The twin, which knows the pictures of each text."""
    twin = engines.twin_of(name)
    assert isinstance(twin, VisionTwin)
    twin.look_at(result)
    return twin


@sizes(FEW, IMAGES)
def test_images_take_their_places(engines: Engines, release: str, job: Job) -> None:
    """The processor's tokens are those of the description, in each prompt."""
    result = engines.serve(release, job)
    for prompt, read in zip(result.job.prompts, result.read, strict=True):
        wanted: list[int] = []
        drawn = {picture.at: picture for picture in prompt.images}
        for place, token in enumerate(prompt.tokens):
            if picture := drawn.get(place):
                wanted += pictures.block(picture, len(wanted))[0]
            else:
                wanted.append(token)
        assert read == wanted
    assert max(end - start for start, end in pictures.spans(result.read[0])) > 128


@sizes(FEW, IMAGES)
def test_each_layer(engines: Engines, release: str, job: Job) -> None:
    result = engines.serve(release, job)
    twin = twin_after(engines, result)
    errors = check_attention(result, twin)
    assert {error.ratio for error in errors} == {1, 4, 128}
    check_experts(result, twin)


@sizes(FEW, IMAGES)
def test_the_tower(engines: Engines, release: str, job: Job) -> None:
    result = engines.serve(release, job)
    check_tower(result, twin_after(engines, result).weights, rows_of)


@sizes(FEW, IMAGES)
def test_logits_and_greedy_tokens(engines: Engines, release: str, job: Job) -> None:
    result = engines.serve(release, job)
    check_logits(result, twin_after(engines, result))


@pytest.mark.full
@pytest.mark.serves(TWICE)
def test_a_hit_never_cuts_an_image(engines: Engines, release: str) -> None:
    result = engines.serve(release, TWICE)
    check_attention(result, twin_after(engines, result))
    first = [computed(result, number)[0] for number in range(len(result.read))]
    assert first == [0, 0, 0, 256]


@sizes(SPECULATING_FEW, SPECULATING, first=FEW)
def test_drafts_change_nothing(engines: Engines, release: str, job: Job) -> None:
    """The draft's routers have a bias for images, too; it knows what follows a token
    of the answers."""
    plain = engines.serve(release, FEW)
    known = {
        token: after for new in plain.new_tokens() for token, after in pairwise(new)
    }
    engines.add_checkpoint(SPECULATING.checkpoint, vision.Vision(0, known))
    speculated = engines.serve(release, job)
    check_same_tokens(speculated, plain)
    check_attention(speculated, twin_after(engines, speculated))
    check_drafts(speculated, known.get, dspark.BLOCK)


@pytest.mark.full
@pytest.mark.serves(IMAGES, TWO_RANKS)
def test_two_ranks(engines: Engines, release: str) -> None:
    """Half the heads and experts of the text, and half the tower, on each."""
    result = engines.serve(release, TWO_RANKS)
    check_same_tokens(result, engines.serve(release, IMAGES))
    twin = twin_after(engines, result)
    check_attention(result, twin)
    check_experts(result, twin)
    check_logits(result, twin)


@pytest.mark.full
@pytest.mark.serves(TWO_STAGES)
def test_two_stages(engines: Engines, release: str) -> None:
    """The second routes an image's tokens by their ids, which only the first embeds."""
    result = engines.serve(release, TWO_STAGES)
    twin = twin_after(engines, result, TWO_STAGES.checkpoint)
    check_attention(result, twin)
    check_experts(result, twin)
    check_logits(result, twin)


@pytest.mark.full
@pytest.mark.serves(BROKEN)
def test_faults_are_seen(engines: Engines, release: str) -> None:
    """No bias for image tokens, with and without a table, and images seen as text. The
    layers that see them as they should do so in a prompt that is cut before its
    image."""
    result = engines.serve(release, BROKEN)
    twin = twin_after(engines, result)
    roundings = Roundings.of(result.answer)
    experts = feed_forward_errors(result.answer, twin, roundings)
    print(experts)
    by_layer = {layer: error for (_, layer), error in experts.items()}
    assert min(by_layer[0], by_layer[1]) > 5 * EXPERTS, by_layer
    assert by_layer[2] <= EXPERTS, by_layer
    errors = attention_errors(result.answer, twin, roundings)
    cores = {error.layer: error.core for error in errors}
    print(cores)
    assert max(cores[0], cores[1]) <= TIGHT and cores[2] > 5 * TIGHT, cores


@pytest.mark.serves(BAD, BLIND)
def test_bad_images_are_refused_and_the_next_request_served(
    engines: Engines, release: str
) -> None:
    bad, blind = engines.serve(release, BAD), engines.serve(release, BLIND)
    said = [*bad.answer["refusals"], *blind.answer["refusals"]]
    print("\n".join(said))
    for result in (bad, blind):
        assert result.answer["tokens_after_refusals"] == result.answer["tokens"]
