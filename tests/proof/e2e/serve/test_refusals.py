# SPDX-License-Identifier: Apache-2.0
"""What a server refuses, by which status, and that it goes on to answer."""

from pathlib import Path
from typing import Any

import openai
import pytest

from proof.e2e.checkpoints.chat import MAX_LENGTH
from proof.e2e.running.server import MODEL, Server
from proof.e2e.running.serving import Engines
from stack.base.releases import load

pytestmark = pytest.mark.newest

GRAMMAR = "a grammar that is none"
REFUSED: dict[str, tuple[int, str, dict[str, Any]]] = {
    "a prompt that is too long": (
        400,
        str(MAX_LENGTH),
        {"prompt": [5] * (MAX_LENGTH + 1)},
    ),
    "a negative temperature": (400, "temperature", {"temperature": -1.0}),
    "top_p above one": (400, "top_p", {"top_p": 1.5}),
    "no new token": (400, "max_tokens", {"max_tokens": -1}),
    "a token that the model lacks": (400, "vocabulary", {"prompt": [5, 1024]}),
    "several greedy answers": (400, "n must be 1", {"n": 2}),
    GRAMMAR: (
        400,
        "",
        {"extra_body": {"structured_outputs": {"regex": "(("}}},
    ),
    "a model that is not served": (404, "other", {"model": "other"}),
}


def complete(server: Server, **given: Any) -> str:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "temperature": 0.0}
    return server.client.completions.create(**body | given).choices[0].text


def blames_itself(site: Path) -> bool:
    """Whether the engine passes on errors of a type that no grammar raises yet."""
    engine = site / "vllm/v1/engine/async_llm.py"
    grammars = site / "vllm/v1/structured_output/backend_xgrammar.py"
    return (
        "except VLLMClientError" in engine.read_text()
        and "VLLMValidationError" not in grammars.read_text()
    )


@pytest.mark.shows("what must be refused, eight cases", "refused")
@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_says_why(
    engines: Engines,
    server: Server,
    release: str,
    name: str,
    request: pytest.FixtureRequest,
) -> None:
    site = engines.installed(load(engines.project)[release], patched=True)
    if name == GRAMMAR and blames_itself(site):
        reason = "a wrong grammar is answered with 500"
        mark = pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True)
        request.applymarker(mark)
    status, word, given = REFUSED[name]
    with pytest.raises(openai.APIStatusError) as refusal:
        complete(server, **given)
    assert refusal.value.status_code == status, refusal.value
    assert word in str(refusal.value)


@pytest.mark.shows("an answer after refusals", "equal")
def test_the_server_answers_after_refusals(server: Server) -> None:
    before = complete(server)
    for _, _, given in REFUSED.values():
        with pytest.raises(openai.APIStatusError):
            complete(server, **given)
    assert complete(server) == before
