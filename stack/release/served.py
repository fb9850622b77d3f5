# SPDX-License-Identifier: Apache-2.0
"""Three probes of `vllm serve`: `served.py [alive|ready|question] [--url URL]`.

alive     the server answers /health: the health check of both images
ready     it answers, and at most --waiting requests wait in its queue
question  a canary from outside: a short prompt gets finite log-probabilities, and not
          one character over and over; with --twice the same answer again

Restart a server that is not alive, send no more to one that is not ready, and look at
one whose answer to the question is unsound: it may answer all clients with noise. A
busy server is alive, and its answer may come late or be another one at --twice, because
sums depend on the batch. Without --url the port, key and role are those of the one
`vllm serve` on this machine. Needs nothing but Python.

Exit code 0: yes. 1: no, and one line says why. 2: nobody knows, the question got no
answer in time.
"""

import argparse
import json
import math
import os
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PORT = 8000
VARIABLE = "XPU_DSV4_HEALTH_URL"
"""Environment variable that names another address, as behind a certificate."""
KEY = "VLLM_API_KEY"
"""vLLM's own, for the server and for whoever asks it."""
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
SECONDS = 60.0
"""Of one request. The images' health check has ten more."""
MOST_BODY = 500
"""Bytes of a refusal that are shown."""
WAITING = "vllm:num_requests_waiting"
RUNNING = "vllm:num_requests_running"
MADE = "vllm:generation_tokens_total"
QUEUE_IS_FULL = 503
PROBES = ("alive", "ready", "question")


class Unsound(Exception):
    """The answer to a probe is no."""


class Unknown(Exception):
    """A probe without an answer: one that came in no time says nothing about a server
    that has much to do."""


@dataclass(frozen=True)
class Server:
    """Where a server listens, and its key; `headless` serves no HTTP at all."""

    url: str
    key: str = ""
    headless: bool = False


def option(words: Sequence[str], name: str) -> list[str]:
    """The values of an option in a command line of vLLM, which takes `_` for `-`; the
    last use counts."""
    found: list[str] = []
    for place, word in enumerate(words):
        given, _, value = word.partition("=")
        if given.replace("_", "-") != name:
            continue
        found = [value] if value else []
        for following in words[place + 1 :] if not value else ():
            if following.startswith("-"):
                break
            found.append(following)
    return found


def command_lines(processes: Path) -> list[list[str]]:
    """The words after `vllm serve` of the processes on this machine, each once."""
    found: list[list[str]] = []
    for path in processes.glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")[:-1]
        except OSError:
            continue  # It ended meanwhile.
        for place, word in enumerate(words[:-1]):
            if Path(word).name == "vllm" and words[place + 1] == "serve":
                if words[place + 2 :] not in found:
                    found.append(words[place + 2 :])
                break
    return found


def here(processes: Path = Path("/proc")) -> Server:
    """The server of this machine, by its own command line if there is one alone."""
    key = os.environ.get(KEY, "")
    lines = command_lines(processes)
    words = lines[0] if len(lines) == 1 else []
    host = (option(words, "--host") or [""])[0]
    if host in ("", "0.0.0.0", "::"):
        host = "127.0.0.1"
    host = f"[{host}]" if ":" in host else host
    port = (option(words, "--port") or [str(PORT)])[0]
    return Server(
        os.environ.get(VARIABLE) or f"http://{host}:{port}",
        (option(words, "--api-key") or [key])[0],
        "--headless" in words,
    )


def ask(
    server: Server,
    path: str,
    question: dict[str, Any] | None = None,
    seconds: float = SECONDS,
) -> bytes:
    """The body of an answer; with a question it is posted.

    Raises:
        Unsound: nobody listens, or the status is not 200.
        Unknown: no answer in time, or the queue takes no more.
    """
    url = server.url.rstrip("/") + path
    headers = {"Content-Type": "application/json"}
    if server.key:
        headers["Authorization"] = f"Bearer {server.key}"
    data = None if question is None else json.dumps(question).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=seconds) as response:
            return bytes(response.read())
    except urllib.error.HTTPError as error:
        with error:
            body = error.read(MOST_BODY).decode(errors="replace").strip()
        said = f"{url}: {error}: {body or 'no reason given'}"
        if question is not None and error.code == QUEUE_IS_FULL:
            raise Unknown(said) from None
        if error.code == 401:
            said += f" (set {KEY})"
        raise Unsound(said) from None
    except (OSError, ValueError) as error:
        if isinstance(getattr(error, "reason", error), TimeoutError):
            raise Unknown(f"{url}: no answer in {seconds:g} s") from None
        raise Unsound(f"{url}: {error}") from None


def metric(server: Server, name: str) -> int:
    """The sum of a metric over the server's engines.

    Raises:
        Unsound: `/metrics` does not have it.
    """
    lines = ask(server, "/metrics").decode(errors="replace").splitlines()
    found = [line for line in lines if line.startswith((f"{name}{{", f"{name} "))]
    if not found:
        raise Unsound(f"{server.url}/metrics has no {name}")
    return int(sum(float(line.rpartition(" ")[2]) for line in found))


def alive(server: Server) -> str:
    """That the server answers, in a line.

    Raises:
        Unsound: it does not.
    """
    if server.headless:
        return "alive: a --headless host, which ends with its engine"
    ask(server, "/health")
    return f"alive: {server.url}"


def ready(server: Server, most: int = 0) -> str:
    """How many requests wait, where that is at most `most`.

    Raises:
        Unsound: more wait, or the server is not alive.
    """
    if server.headless:
        return "ready: a --headless host, whose requests wait at the first host"
    alive(server)
    waiting, running = metric(server, WAITING), metric(server, RUNNING)
    if waiting > most:
        raise Unsound(f"not ready: {waiting} requests wait, {running} run")
    return f"ready: {waiting} requests wait, {running} run"


def asked(server: Server, seconds: float) -> tuple[str, str, list[float]]:
    """The model's name, and the text and log-probabilities of its answer."""
    try:
        model = json.loads(ask(server, "/v1/models"))["data"][0]["id"]
        given = ask(server, "/v1/completions", {"model": model, **QUESTION}, seconds)
        (choice,) = json.loads(given)["choices"]
        return model, choice["text"], choice["logprobs"]["token_logprobs"]
    except (ValueError, LookupError, TypeError) as error:
        raise Unsound(f"{server.url} is no OpenAI server of vLLM: {error!r}") from None


def question(server: Server, *, twice: bool = False, seconds: float = SECONDS) -> str:
    """What a sound server answered, in a line.

    Args:
        twice: ask the same again, and insist on the same answer.
        seconds: how long an answer may take.

    Raises:
        Unsound: the server is not alive, or an answer is not sound.
        Unknown: no answer in time; the message says what the server did meanwhile.
    """
    if server.headless:
        raise Unknown("a --headless host answers nobody: ask the first host")
    alive(server)
    answers = []
    try:
        made = metric(server, MADE)
    except Unsound:
        made = None
    try:
        for _ in range(1 + twice):
            model, text, logprobs = asked(server, seconds)
            answers.append(text)
            if not logprobs or not all(map(math.isfinite, logprobs)):
                raise Unsound(f"log-probabilities are not finite: {logprobs}")
            most = max(Counter(text).values(), default=0)
            if len(text) >= SHORT and most > MOST_REPEATS * len(text):
                raise Unsound(f"one character over and over: {text!r}")
    except Unknown as late:
        raise Unknown(f"{late}; {meanwhile(server, made)}") from None
    if len(set(answers)) > 1:
        raise Unsound(f"the same question, two answers: {answers}")
    return f"{model}: {answers[0]!r}"


def meanwhile(server: Server, made: int | None) -> str:
    """What a server that gave no answer did since it had made so many tokens."""
    try:
        waiting, now = metric(server, WAITING), metric(server, MADE)
    except (Unsound, Unknown) as error:
        return f"what it does is unknown: {error}"
    new = "unknown" if made is None else str(now - made)
    return f"{waiting} requests wait; tokens made for others meanwhile: {new}"


def main() -> int:
    """Ask one probe; what it found goes to standard output."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("probe", nargs="?", choices=PROBES, default=PROBES[0])
    parser.add_argument("--url", help=f"or in {VARIABLE}; its key in {KEY}")
    parser.add_argument("--waiting", type=int, default=0, metavar="REQUESTS")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--twice", action="store_true")
    given = parser.parse_args()
    server = Server(given.url, os.environ.get(KEY, "")) if given.url else here()
    try:
        if given.probe == "question":
            print(question(server, twice=given.twice, seconds=given.seconds))
        else:
            is_alive = given.probe == "alive"
            print(alive(server) if is_alive else ready(server, given.waiting))
    except Unsound as unsound:
        print(unsound)
        return 1
    except Unknown as unknown:
        print(unknown)
        return 2 if given.probe == "question" else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
