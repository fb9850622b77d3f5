# SPDX-License-Identifier: Apache-2.0
"""Texts and chats over HTTP, by the `openai` client."""

from concurrent.futures import Future
from dataclasses import replace

import pytest

from proof.e2e.checkpoints.chat import END, MAX_LENGTH, SPECIAL
from proof.e2e.judging.checks import MARGIN
from proof.e2e.running.chat_drafts import MTP, asked_of
from proof.e2e.running.chat_requests import budgets_where_they_are
from proof.e2e.running.server import MODEL, Server, checkpoint_of
from proof.e2e.running.serving import Engines, Job, Prompt, Served

pytestmark = pytest.mark.newest

PROMPTS = (Prompt(9, 6, seed=2), Prompt(5, 4, seed=3))
GREEDY = {"model": MODEL, "temperature": 0.0}
USER = [{"role": "user", "content": "hi"}]
PLAIN = {"thinking": False}
CLOSE, DRAFTED = 1e-4, 0.05
"""How far log-probabilities of the same tokens may lie apart; with drafts a step has
other sums, which were seen to make 0.016 and to decide a near tie."""


@pytest.fixture(scope="session")
def alone(engines: Engines, release: str) -> Future[Served]:
    """The engine without a server, started beside it."""
    sampling = (("logprobs", 2),)
    # One after the other, as over HTTP: no sum depends on another request.
    waves = tuple((replace(prompt, sampling=sampling),) for prompt in PROMPTS)
    sizes = (("max_model_len", MAX_LENGTH),)
    name = checkpoint_of(engines, release)
    job = Job("engine", waves, sizes, checkpoint=name)
    return engines.order(release, job, at_once=True)


@pytest.mark.shows("tokens and log-probabilities of a completion", "equal")
@asked_of()
def test_tokens_and_logprobs_are_the_engines_own(
    alone: Future[Served], server: Server, asked: Server
) -> None:
    close = CLOSE if asked is server else DRAFTED
    engine = alone.result()
    for prompt, tokens, (places,) in zip(
        PROMPTS, engine.new_tokens(), engine.answer["logprobs"], strict=True
    ):
        answer = asked.client.completions.create(
            **GREEDY,
            prompt=prompt.tokens,
            max_tokens=prompt.new,
            logprobs=2,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        (choice,) = answer.choices
        pairs = enumerate(zip(choice.token_ids, tokens, strict=True))
        same = next((place for place, (ours, its) in pairs if ours != its), len(tokens))
        if asked is server:
            assert same == len(tokens), (choice.token_ids, tokens)
        elif same < len(tokens):
            values, other = places[same], choice.token_ids[same]
            assert other in values, (choice.token_ids, tokens)
            assert values[tokens[same]][0] - values[other][0] <= MARGIN
        assert choice.logprobs is not None
        own = [place[token][0] for token, place in zip(tokens, places, strict=True)]
        theirs = choice.logprobs.token_logprobs
        assert theirs[:same] == pytest.approx(own[:same], abs=close)


def complete(server: Server, **given: object) -> list[str]:
    """The texts of a completion of eight tokens."""
    body = GREEDY | {"prompt": "Hello you", "max_tokens": 8} | given
    return [choice.text for choice in server.client.completions.create(**body).choices]


@pytest.mark.shows("a streamed completion", "equal")
@asked_of(MTP)
def test_a_stream_brings_the_same_text(asked: Server) -> None:
    (whole,) = complete(asked)
    streamed = asked.client.completions.create(
        **GREEDY, prompt="Hello you", max_tokens=8, stream=True
    )
    parts = [choice.text for part in streamed for choice in part.choices]
    assert "".join(parts) == whole
    assert len(parts) > 1


@pytest.mark.shows("three answers, asked twice with one seed", "equal")
@asked_of(MTP)
def test_several_answers(asked: Server) -> None:
    warm = {"temperature": 1.0, "seed": 5, "n": 3, "max_tokens": 4}
    answers = complete(asked, **warm)
    assert len(set(answers)) == 3, answers
    assert complete(asked, **warm) == answers


@pytest.mark.shows("a stop string", "equal")
@asked_of(MTP)
def test_a_stop_string_ends_the_answer(asked: Server) -> None:
    (whole,) = complete(asked)
    stop = whole[3:5]
    answer = asked.client.completions.create(
        **GREEDY, prompt="Hello you", max_tokens=8, stop=[stop]
    )
    (choice,) = answer.choices
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


@pytest.mark.shows("a chat without thinking", "equal")
@asked_of()
def test_the_prompt_is_deepseeks_encoding(asked: Server) -> None:
    """Without the flag that chooses a tokenizer: vLLM knows the model."""
    begin, _, user, assistant, _, thought, _ = range(len(SPECIAL))
    answer = asked.client.chat.completions.create(
        **GREEDY,
        messages=USER,
        max_completion_tokens=1,
        extra_body={"chat_template_kwargs": PLAIN, "return_token_ids": True},
    )
    prompt = answer.prompt_token_ids
    assert [t for t in prompt if t < len(SPECIAL)] == [begin, user, assistant, thought]


@pytest.mark.shows("a chat with thinking, whole and streamed", "equal")
@asked_of()
@pytest.mark.parametrize(
    "stream",
    [pytest.param(False, marks=pytest.mark.full), True],
    ids=["whole", "streamed"],
)
@budgets_where_they_are()
def test_thinking_comes_apart_from_the_answer(asked: Server, stream: bool) -> None:
    given = GREEDY | {
        "messages": USER,
        "max_completion_tokens": 8,
        "extra_body": {
            "chat_template_kwargs": {"thinking": True},
            "thinking_token_budget": 3,
            "ignore_eos": True,
        },
        "stream": stream,
    }
    answer = asked.client.chat.completions.create(**given)
    parts = [c.delta for p in answer for c in p.choices] if stream else None
    messages = parts or [answer.choices[0].message]
    thoughts = "".join(getattr(m, "reasoning", None) or "" for m in messages)
    contents = "".join(m.content or "" for m in messages)
    assert thoughts and contents, (thoughts, contents)
    assert "think>" not in thoughts + contents


def test_continuing_a_message_continues_after_its_end(server: Server) -> None:
    """The last message should stay open. Upstream's encoding ends it by the token that
    ends a text, on every platform (vllm#46256)."""
    opened = [*USER, {"role": "assistant", "content": "a"}]
    answer = server.client.chat.completions.create(
        **GREEDY,
        messages=opened,
        max_completion_tokens=1,
        extra_body={
            "add_generation_prompt": False,
            "continue_final_message": True,
            "chat_template_kwargs": PLAIN,
            "return_token_ids": True,
        },
    )
    assert answer.prompt_token_ids[-1] == SPECIAL.index(END)
