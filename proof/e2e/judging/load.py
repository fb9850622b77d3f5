# SPDX-License-Identifier: Apache-2.0
"""What vLLM's own load client asks a server, and whether each answer is right."""

import json
import os
import random
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proof.e2e.judging.checks import MARGIN
from proof.e2e.running.server import MODEL, Server

LIMIT = 900


@dataclass(frozen=True)
class Load:
    """Requests of random lengths; several ask the same, and some begin alike."""

    requests: int
    different: int
    concurrency: int
    shared: int
    """Characters of the beginning that every other prompt has; 256 tokens fill a page
    of the prefix cache."""

    def prompts(self) -> list[dict[str, Any]]:
        chosen = random.Random(0)
        beginning = "".join(chosen.choices(string.ascii_letters, k=self.shared))
        asked = []
        for number in range(self.different):
            own = "".join(chosen.choices(string.ascii_letters, k=chosen.randint(3, 16)))
            prompt = own if number % 2 else beginning + own
            asked.append({"prompt": prompt, "output_tokens": chosen.randint(2, 6)})
        return [asked[number % self.different] for number in range(self.requests)]


def bench(
    server: Server, load: Load, folder: Path, url: str | None = None
) -> dict[str, Any]:
    """What `vllm bench serve` measures of a server, or of a proxy before it at `url`,
    with each request's text. None fails.

    Raises:
        AssertionError: the client ended with an error, or a request did.
    """
    asked = folder / "prompts.jsonl"
    asked.write_text("".join(json.dumps(line) + "\n" for line in load.prompts()))
    log = folder / "bench.log"
    client = server.start(
        log,
        *("bench", "serve", "--backend", "openai", "--base-url", url or server.url),
        *("--model", MODEL, "--tokenizer", str(server.model)),
        *("--dataset-name", "custom", "--dataset-path", str(asked)),
        *("--custom-output-len", "-1", "--skip-chat-template", "--disable-shuffle"),
        *("--num-prompts", str(load.requests)),
        *("--max-concurrency", str(load.concurrency)),
        *("--temperature", "0", "--ignore-eos", "--disable-tqdm"),
        *("--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", "result.json"),
    )
    assert client.wait(LIMIT) == 0, log.read_text()
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    assert result["completed"] == load.requests, result["errors"]
    assert not any(result["errors"]), result["errors"]
    return result


@dataclass(frozen=True)
class Alone:
    """A request's answer while no other runs, and the character from which on it may
    be another in a batch: a sum's order there decides between two tokens."""

    text: str
    sure: int

    def is_answered_by(self, text: str) -> bool:
        common = len(os.path.commonprefix([text, self.text]))
        return text == self.text or common >= self.sure


def alone(server: Server, asked: dict[str, Any]) -> Alone:
    """Asked as a stream, whose pieces show which text comes before a token."""
    pieces = server.client.completions.create(
        model=MODEL,
        prompt=asked["prompt"],
        max_tokens=asked["output_tokens"],
        temperature=0.0,
        logprobs=2,
        stream=True,
        extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
    )
    text, sure = "", None
    for choice in (choice for piece in pieces for choice in piece.choices):
        for place in choice.logprobs.top_logprobs if choice.logprobs else ():
            best, second = sorted(place.values())[-1:-3:-1]
            if best - second < MARGIN and sure is None:
                sure = len(text)
        text += choice.text
    return Alone(text, len(text) if sure is None else sure)


def check_texts(server: Server, load: Load, texts: list[str]) -> None:
    """Each is what the server answers while no other request runs, up to a near tie.

    Raises:
        AssertionError: one is not, or few are the very same.
    """
    different = [alone(server, asked) for asked in load.prompts()[: load.different]]
    expected = [different[number % load.different] for number in range(load.requests)]
    pairs = list(zip(texts, expected, strict=True))
    wrong = [(text, one) for text, one in pairs if not one.is_answered_by(text)]
    assert not wrong, wrong
    same = sum(text == one.text for text, one in pairs)
    print(f"{same} of {load.requests} answers are the very text of the request alone")
    assert same > load.requests / 2
