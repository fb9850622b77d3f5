# SPDX-License-Identifier: Apache-2.0
"""V4.1 and V4 Vision over HTTP, each from a server of its own, without drafts and with
those of their own draft model."""

import base64
import io
import json
from dataclasses import replace

import pytest

from proof.e2e.checkpoints import dspark
from proof.e2e.checkpoints.chat import ASSISTANT, SPECIAL, THOUGHT, USER
from proof.e2e.checkpoints.v41 import SERVER
from proof.e2e.checkpoints.v41_chat import FIRST, Chat
from proof.e2e.checkpoints.vision import Vision
from proof.e2e.judging import checks
from proof.e2e.pictures import Picture, block
from proof.e2e.running.chat_drafts import ACCEPTED, ALONE, DRAFTING, DSPARK
from proof.e2e.running.server import MODEL, Server
from proof.e2e.running.serving import Engines, Job, Prompt
from proof.e2e.twins.twin import Roundings
from proof.e2e.twins.vision_twin import VisionTwin

pytestmark = [pytest.mark.newest, pytest.mark.full]

GREEDY = {"model": MODEL, "temperature": 0.0}
PLAIN = {"thinking": False}
V41 = "v4.1 that chats"
V41_FLAGS = (
    *("--block-size", "128"),
    *("--limit-mm-per-prompt", '{"image": 0}'),
    *("--reasoning-parser", "deepseek_v41"),
    *("--tool-call-parser", "deepseek_v41"),
)
PROMPT = Prompt(40, 6, seed=2)
PICTURE = Picture(at=0, down=6, along=9, seed=1)
PICTURES = PICTURE, replace(PICTURE, seed=2)
ROUNDED = Roundings(activations=True, output_fp8=True)
"""What an engine of v0.33.0 rounds."""
DRAFTS = ("--speculative-config", json.dumps(DRAFTING[DSPARK]))
with_drafts = pytest.mark.parametrize("drafts", [ALONE, DSPARK])


@pytest.mark.shows("a completion and a chat of V4.1", "equal")
@with_drafts
def test_v41(engines: Engines, release: str, drafts: str) -> None:
    """The completion has the engine's own tokens; the chat is V4.1's encoding, and has
    the tokens of a completion of it."""
    if not engines.has_v41(release):
        pytest.skip(f"{release} has no V4.1")
    sizes = tuple(pair for pair in SERVER if pair[0] != "skip_tokenizer_init")
    engine = engines.serve(release, Job("V4.1", ((PROMPT,),), sizes, checkpoint=V41))
    flags, name = V41_FLAGS, V41
    if drafts == DSPARK:
        flags, name = (*flags, *DRAFTS), f"{V41}, with drafts, {release}"
        engines.add_checkpoint(name, Chat(0, dspark.following(engine.new_tokens())))
    with Server(engines, release, *flags, checkpoint=name) as server:
        client = server.wait().client
        completed = client.completions.create(
            **GREEDY,
            prompt=PROMPT.tokens,
            max_tokens=PROMPT.new,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        chat = client.chat.completions.create(
            **GREEDY,
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=4,
            extra_body={
                "chat_template_kwargs": PLAIN,
                "return_token_ids": True,
                "ignore_eos": True,
            },
        )
        of_chat = client.completions.create(
            **GREEDY,
            prompt=chat.prompt_token_ids,
            max_tokens=4,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        assert drafts == ALONE or server.metric(ACCEPTED), "no draft was accepted"
    (choice,) = completed.choices
    assert [choice.token_ids] == engine.new_tokens()
    assert chat.choices[0].token_ids == of_chat.choices[0].token_ids
    marks = [SPECIAL[t - FIRST] for t in chat.prompt_token_ids if t >= FIRST]
    assert marks[-3:] == [USER, ASSISTANT, THOUGHT]
    assert len(chat.choices[0].token_ids) == 4


def data_url(picture: Picture) -> str:
    file = io.BytesIO()
    picture.image().save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def see(server: Server) -> list[tuple[list[int], list[int]]]:
    """The tokens that were read and those of the answer, of each picture."""
    answers = []
    for picture in PICTURES:
        image = {"type": "image_url", "image_url": {"url": data_url(picture)}}
        answer = server.client.chat.completions.create(
            **GREEDY,
            messages=[{"role": "user", "content": [image]}],
            max_completion_tokens=6,
            extra_body={
                "chat_template_kwargs": PLAIN,
                "return_token_ids": True,
                "ignore_eos": True,
            },
        )
        answers.append((answer.prompt_token_ids, answer.choices[0].token_ids))
    return answers


@pytest.mark.shows("a chat with an image by data URL (V4 Vision)", "equal")
@with_drafts
def test_an_image(engines: Engines, release: str, drafts: str) -> None:
    """Hugging Face's model with our tower chooses the answer's tokens, wherever it is
    sure; another image has another answer."""
    if not engines.has_step(release, "vision-model"):
        pytest.skip(f"{release} has no V4 Vision")
    twin = engines.twin_of("vision")
    assert isinstance(twin, VisionTwin)
    # The default hash needs a package that nothing else here does.
    hashed = ("--mm-hasher-algorithm", "sha256")
    with Server(engines, release, *hashed, checkpoint="vision") as server:
        answers = see(server.wait())
    if drafts == DSPARK:
        name, texts = f"vision with drafts, {release}", [new for _, new in answers]
        engines.add_checkpoint(name, Vision(0, dspark.following(texts)))
        with Server(engines, release, *hashed, *DRAFTS, checkpoint=name) as server:
            answers = see(server.wait())
            assert server.metric(ACCEPTED), "no draft was accepted"
    (prompt, _), _ = answers
    start = prompt.index(block(PICTURE, 3)[0][0])
    assert prompt[start:][: len(block(PICTURE, 3)[0])] == block(PICTURE, 3)[0]
    sure = 0
    for picture, (read, new) in zip(PICTURES, answers, strict=True):
        text = [*read, *new]
        twin.pictures[tuple(text)] = (picture,)
        with twin.rounded(ROUNDED):
            logits = twin.logits(text)
        for place, token in enumerate(new, len(read)):
            best = logits[place - 1].topk(2)
            if best.values[0] - best.values[1] > checks.MARGIN:
                sure += 1
                assert best.indices[0] == token, place
    assert sure, "the twin is sure of no token"
    assert answers[0][1] != answers[1][1], "another image has the same answer"
