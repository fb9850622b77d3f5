# SPDX-License-Identifier: Apache-2.0
"""Tool calls and JSON schemas: a grammar makes a random model write what is asked."""

import json
import re
from typing import Any

import pytest
from tokenizers import Tokenizer

from proof.e2e.running.chat_drafts import ALONE, MTP, asked_of
from proof.e2e.running.chat_requests import (
    CALL,
    PLAIN,
    SCHEMA,
    THINKING,
    TOOL,
    WORD,
    ask,
    budgets_where_they_are,
)
from proof.e2e.running.server import Server

pytestmark = pytest.mark.newest

MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.full),
        pytest.param(THINKING, id="thinking"),
    ],
)


def check_call(function: str, arguments: str) -> None:
    assert function == "f"
    assert json.loads(arguments) in ({"x": 1}, {"x": 2})


@pytest.mark.full
@pytest.mark.shows("a streamed tool call, with and without thinking", "equal")
@asked_of(MTP)
@MODES
@budgets_where_they_are()
def test_a_streamed_tool_call(asked: Server, mode: dict[str, Any]) -> None:
    """The parser reads what the model writes, piece by piece."""
    parts = ask(
        asked,
        mode,
        tools=[TOOL],
        stream=True,
        extra_body={"structured_outputs": {"regex": CALL}},
    )
    choices = [choice for part in parts for choice in part.choices]
    deltas = [choice.delta for choice in choices]
    calls = [call for delta in deltas for call in delta.tool_calls or ()]
    names = [call.function.name for call in calls if call.function.name]
    pieces = [call.function.arguments or "" for call in calls]
    (name,) = names
    check_call(name, "".join(pieces))
    assert choices[-1].finish_reason == "tool_calls"
    thoughts = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    assert bool(thoughts) == (mode is THINKING), thoughts
    contents = "".join(delta.content or "" for delta in deltas)
    assert not contents.strip(), contents


@pytest.mark.shows("a required tool call", "equal")
@asked_of(ALONE)
def test_a_required_tool_call(server: Server, asked: Server, release: str) -> None:
    """The release makes the grammar of the call by itself. It allows white space
    without end, so the model need not come to the arguments. v0.22.1 reads a call only
    once it is whole: there what closes is favoured, which it refuses beside drafts."""
    given: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    if release != "v0.22.1":
        given["max_completion_tokens"] = 40
    elif asked is server:
        tokenizer = Tokenizer.from_file(str(asked.model / "tokenizer.json"))
        given["logit_bias"] = {tokenizer.token_to_id(mark): 100 for mark in "}]"}
    else:
        pytest.skip("a random model beside drafts need not end a call")
    (choice,) = ask(asked, PLAIN, **given).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "f"


@pytest.mark.shows("a JSON schema, with and without thinking", "equal")
@asked_of()
@MODES
@budgets_where_they_are()
def test_an_answer_follows_a_json_schema(asked: Server, mode: dict[str, Any]) -> None:
    (choice,) = ask(asked, mode, response_format=SCHEMA).choices
    assert choice.finish_reason == "stop", choice
    check_call("f", choice.message.content)
    assert bool(choice.message.reasoning) == (mode is THINKING)


@pytest.mark.shows("a regular expression, with and without thinking", "equal")
@asked_of(MTP)
@MODES
@budgets_where_they_are()
def test_an_answer_follows_a_regular_expression(
    server: Server, asked: Server, mode: dict[str, Any]
) -> None:
    """With drafts it is the answer without them."""
    rule = {"structured_outputs": {"regex": WORD}}
    (choice,) = ask(asked, mode, extra_body=rule).choices
    assert re.fullmatch(WORD, choice.message.content or ""), choice
    assert bool(choice.message.reasoning) == (mode is THINKING)
    (alone,) = ask(server, mode, extra_body=rule).choices
    assert choice.message.content == alone.message.content
