# SPDX-License-Identifier: Apache-2.0
"""Tool calls and JSON schemas: a grammar makes a random model write what is asked."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer

from e2e.chat import DSML
from e2e.server import MODEL, Server

pytestmark = pytest.mark.newest

TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer", "enum": [1, 2]}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
}
CALL = (
    f"<{DSML}tool_calls>\n"
    f'<{DSML}invoke name="f">\n'
    f'<{DSML}parameter name="x" string="false">[12]</{DSML}parameter>\n'
    f"</{DSML}invoke>\n"
    f"</{DSML}tool_calls>"
)
"""A tool call as the model writes it, as a regular expression."""
SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": TOOL["function"]["parameters"]},
}
PLAIN = {"chat_template_kwargs": {"thinking": False}}
THINKING = {"chat_template_kwargs": {"thinking": True}, "thinking_token_budget": 3}
"""A random model would go on thinking."""
MODES = pytest.mark.parametrize(
    "mode",
    [
        pytest.param(PLAIN, id="plain", marks=pytest.mark.full),
        pytest.param(THINKING, id="thinking"),
    ],
)


def ask(server: Server, mode: dict[str, Any], **given: Any) -> Any:
    extra = mode | given.pop("extra_body", {})
    return server.client.chat.completions.create(
        model=MODEL,
        temperature=0.0,
        messages=[{"role": "user", "content": "hi"}],
        max_completion_tokens=120,
        extra_body=extra,
        **given,
    )


def check_call(function: str, arguments: str) -> None:
    assert function == "f"
    assert json.loads(arguments) in ({"x": 1}, {"x": 2})


@pytest.mark.shows("a streamed tool call, with and without thinking", "equal")
@pytest.mark.full
@MODES
def test_a_streamed_tool_call(server: Server, mode: dict[str, Any]) -> None:
    """The parser reads what the model writes, piece by piece."""
    parts = ask(
        server,
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
@pytest.mark.full
def test_a_required_tool_call(server: Server) -> None:
    """The release makes the grammar of the call by itself. A random model may add calls
    and keys without end, so what closes is favoured; so is white space, and the model
    need not come to the arguments."""
    tokenizer = Tokenizer.from_file(str(server.model / "tokenizer.json"))
    closing = {tokenizer.token_to_id(mark): 100 for mark in "}]"}
    given = {"tools": [TOOL], "tool_choice": "required", "logit_bias": closing}
    (choice,) = ask(server, PLAIN, **given).choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "f"


@pytest.mark.shows("a JSON schema, with and without thinking", "equal")
@MODES
def test_an_answer_follows_a_json_schema(server: Server, mode: dict[str, Any]) -> None:
    (choice,) = ask(server, mode, response_format=SCHEMA).choices
    assert choice.finish_reason == "stop", choice
    check_call("f", choice.message.content)
    assert bool(choice.message.reasoning) == (mode is THINKING)
