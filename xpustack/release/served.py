# SPDX-License-Identifier: Apache-2.0
"""Ask a running `vllm serve` whether it answers soundly: `served.py [--url URL]`.

The health check of both images, and of any server from outside. A server that is up
may still answer with noise: log-probabilities must be finite, and the answer not one
character over and over. With `--twice` the same question must get the same answer
again; a busy server may not pass that, because sums depend on the batch. Needs nothing
but Python. Exit code 1 says that the server is not sound, and one line says why.
"""

import argparse
import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections import Counter
from typing import Any

URL = "http://127.0.0.1:8000"
VARIABLE = "XPU_DSV4_HEALTH_URL"
"""Environment variable that names another address, as after `--port`."""
QUESTION = {
    "prompt": "The days of the week are Monday, Tuesday,",
    "max_tokens": 16,
    "temperature": 0.0,
    "seed": 0,
    "logprobs": 1,
}
MOST_REPEATS = 0.9
"""Share of one character in an answer that counts as repeated characters."""
SHORT = 8
"""Answers of fewer characters are not judged by that."""
SECONDS = 20.0
"""Of one request."""
MOST_BODY = 500
"""Bytes of a refusal that are shown."""


class Unsound(Exception):
    """The server does not answer, or not soundly."""


def ask(url: str, question: dict[str, Any] | None = None) -> bytes:
    """The body of an answer; with a question it is posted.

    Raises:
        Unsound: no answer, or one with another status than 200.
    """
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(MOST_BODY).decode(errors="replace").strip()
        raise Unsound(f"{url}: {error}: {body or 'no reason given'}") from None
    except (OSError, ValueError) as error:
        raise Unsound(f"{url}: {error}") from None


def judge(url: str = URL, *, twice: bool = False) -> str:
    """What a sound server answered, in a line.

    Args:
        url: where the server listens.
        twice: ask the same again, and insist on the same answer.

    Raises:
        Unsound: the server is not sound.
    """
    url = url.rstrip("/")
    ask(f"{url}/health")
    try:
        model = json.loads(ask(f"{url}/v1/models"))["data"][0]["id"]
        answers = []
        for _ in range(1 + twice):
            given = ask(f"{url}/v1/completions", {"model": model, **QUESTION})
            (choice,) = json.loads(given)["choices"]
            answers.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    except (ValueError, LookupError, TypeError) as error:
        raise Unsound(f"{url} is no OpenAI server of vLLM: {error!r}") from None
    for text, logprobs in answers:
        if not logprobs or not all(map(math.isfinite, logprobs)):
            raise Unsound(f"log-probabilities are not finite: {logprobs}")
        most = max(Counter(text).values(), default=0)
        if len(text) >= SHORT and most > MOST_REPEATS * len(text):
            raise Unsound(f"one character over and over: {text!r}")
    texts = [text for text, _ in answers]
    if len(set(texts)) > 1:
        raise Unsound(f"the same question, two answers: {texts}")
    return f"{model}: {texts[0]!r}"


def main() -> int:
    """Judge the server; its answer or what is wrong goes to standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default=os.environ.get(VARIABLE, URL))
    parser.add_argument("--twice", action="store_true")
    given = parser.parse_args()
    try:
        print(judge(given.url, twice=given.twice))
    except Unsound as unsound:
        print(unsound)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
