# SPDX-License-Identifier: Apache-2.0
"""The three probes of a server, against servers that are made up."""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stack.release import served

SOUND = (" Wednesday, Thursday, Friday", [-0.1, -0.2])
Answers = Callable[[int], tuple[str, list[float]]]


def metrics(waiting: int, made: int) -> str:
    return f"""\
# HELP vllm:num_requests_waiting of two engines
vllm:num_requests_waiting{{engine="0"}} {waiting}.0
vllm:num_requests_waiting{{engine="1"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0"}} 99.0
vllm:num_requests_running{{engine="0"}} 16.0
vllm:generation_tokens_total{{engine="0"}} {made}.0
"""


@contextmanager
def server(
    answers: Answers,
    status: int = 200,
    key: str = "",
    refusal: str = "",
    refused: int = 400,
    waiting: int = 0,
) -> Iterator[str]:
    """A server whose n-th answer is `answers(n)`, or `refused` and `refusal`, with so
    many requests in the queue of one of its engines; its address."""
    asked: list[object] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            texts = {
                "/health": "",
                "/metrics": metrics(waiting, 7 * len(asked)),
                "/v1/models": json.dumps({"data": [{"id": "flash"}]}),
            }
            self.answer(texts[self.path])

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            question = json.loads(self.rfile.read(length))
            assert (question["model"], question["temperature"]) == ("flash", 0)
            asked.append(question)
            if refusal:
                self.send_response(refused)
                self.end_headers()
                self.wfile.write(refusal.encode())
                return
            text, logprobs = answers(len(asked))
            choice = {"text": text, "logprobs": {"token_logprobs": logprobs}}
            self.answer(json.dumps({"choices": [choice]}))

        def answer(self, text: str) -> None:
            given = self.headers["Authorization"] == f"Bearer {key}"
            allowed = not key or given or self.path == "/health"
            self.send_response(status if allowed else 401)
            self.end_headers()
            # A client may have had enough.
            with suppress(OSError):
                self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{running.server_port}"
        finally:
            running.shutdown()
            thread.join()


def test_a_sound_server() -> None:
    with server(lambda _: SOUND, key="secret") as url:
        asked = served.Server(url, "secret")
        assert served.question(asked, twice=True) == f"flash: {SOUND[0]!r}"


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        (lambda _: (SOUND[0], [-0.1, float("nan")]), 200, "are not finite"),
        (lambda _: (SOUND[0], []), 200, "are not finite"),
        (lambda _: ("!!!!!!!!!!!!", [-0.1]), 200, "one character over and over"),
        (lambda n: (f"{SOUND[0]} {n}", [-0.1]), 200, "two answers"),
        (lambda _: SOUND, 503, "503"),
        (lambda _: (None, None), 200, "are not finite"),
    ],
)
def test_a_server_that_is_not_sound(answers: Answers, status: int, said: str) -> None:
    with server(answers, status) as url, pytest.raises(served.Unsound, match=said):
        served.question(served.Server(url), twice=True)


def late(seconds: float) -> Answers:
    def answer(_: int) -> tuple[str, list[float]]:
        time.sleep(seconds)
        return SOUND

    return answer


def test_a_busy_server_is_alive_and_nothing_is_said_of_its_soundness() -> None:
    """What was asked waits in the queue, or the queue takes no more."""
    with server(late(1.0), waiting=11) as url:
        asked = served.Server(url)
        assert served.alive(asked) == f"alive: {url}"
        with pytest.raises(served.Unknown, match=r"no answer in 0\.3 s") as caught:
            served.question(asked, seconds=0.3)
    assert "12 requests wait; tokens made for others meanwhile: 7" in str(caught.value)
    with (
        server(lambda _: SOUND, refusal="the queue is full", refused=503) as url,
        pytest.raises(served.Unknown, match="the queue is full"),
    ):
        served.question(served.Server(url))


def test_ready_is_a_short_queue() -> None:
    """The sum over engines; reasons of waiting are another metric."""
    with server(lambda _: SOUND, key="secret", waiting=3) as url:
        asked = served.Server(url, "secret")
        assert served.ready(asked, 4) == "ready: 4 requests wait, 16 run"
        with pytest.raises(served.Unsound, match="not ready: 4 requests wait, 16 run"):
            served.ready(asked, 3)
        with pytest.raises(served.Unsound, match="set VLLM_API_KEY"):
            served.ready(served.Server(url), 4)
        assert served.alive(served.Server(url)) == f"alive: {url}"


PYTHON = ("/opt/venv/bin/python3", "/opt/venv/bin/vllm", "serve", "/model")


def processes(folder: Path, *commands: tuple[str, ...]) -> Path:
    """A folder like /proc, with the command lines of these processes and of others."""
    others = [("sh", "-c", "vllm serve --port 1"), ("python", "-m", "vllm"), ()]
    for number, words in enumerate([*others, *commands], start=1):
        own = folder / str(number)
        own.mkdir(parents=True)
        (own / "cmdline").write_bytes(b"".join(f"{w}\0".encode() for w in words))
    (folder / "99").mkdir()
    return folder


@pytest.mark.parametrize(
    ("flags", "url", "key", "headless"),
    [
        ((), "http://127.0.0.1:8000", "of the environment", False),
        (("--port", "81", "--api-key", "a"), "http://127.0.0.1:81", "a", False),
        (("--port=81", "--api_key=a=b"), "http://127.0.0.1:81", "a=b", False),
        (("--port", "1", "--port", "2"), "http://127.0.0.1:2", "of the environment", 0),
        (("--api-key", "a", "b", "-tp", "2"), "http://127.0.0.1:8000", "a", False),
        (("--host", "10.0.0.1"), "http://10.0.0.1:8000", "of the environment", False),
        (("--host", "0.0.0.0"), "http://127.0.0.1:8000", "of the environment", False),
        (("--host", "fe80::1"), "http://[fe80::1]:8000", "of the environment", False),
        (("--headless",), "http://127.0.0.1:8000", "of the environment", True),
    ],
)
def test_the_server_of_this_machine_is_known_by_its_command_line(
    flags: tuple[str, ...],
    url: str,
    key: str,
    headless: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(served.KEY, "of the environment")
    monkeypatch.delenv(served.VARIABLE, raising=False)
    command = (*PYTHON, *flags)
    # A forked process has the command line of its parent.
    found = served.here(processes(tmp_path, command, command))
    assert found == served.Server(url, key, bool(headless))


def test_of_two_servers_neither_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(served.KEY, raising=False)
    monkeypatch.delenv(served.VARIABLE, raising=False)
    two = ((*PYTHON, "--port", "1", "--api-key", "a"), (*PYTHON, "--headless"))
    default = served.Server("http://127.0.0.1:8000")
    assert served.here(processes(tmp_path / "two", *two)) == default
    assert served.here(processes(tmp_path / "none")) == default


def test_a_headless_host_is_alive_and_answers_no_question() -> None:
    """Nobody listens there."""
    host = served.Server("http://127.0.0.1:1", headless=True)
    assert "--headless" in served.alive(host)
    assert "--headless" in served.ready(host)
    with pytest.raises(served.Unknown, match="ask the first host"):
        served.question(host)
    with pytest.raises(served.Unsound, match="refused"):
        served.alive(served.Server("http://127.0.0.1:1"))


def test_a_refusal_is_shown_with_the_server_s_reason() -> None:
    """A NaN in the answer's log-probabilities: the server itself cannot write it."""
    reason = '{"error": {"message": "Out of range float values: nan"}}'
    said = r"400.*Out of range float values: nan"
    with (
        server(lambda _: SOUND, refusal=reason) as url,
        pytest.raises(served.Unsound, match=said),
    ):
        served.question(served.Server(url))
    with (
        server(lambda _: SOUND, refusal="x" * 10_000) as url,
        pytest.raises(served.Unsound) as caught,
    ):
        served.question(served.Server(url))
    assert len(str(caught.value)) < 2 * served.MOST_BODY


def test_the_program_stands_alone(tmp_path: Path) -> None:
    """As in an image and on a deployer's machine: no package of ours."""
    program = tmp_path / "served.py"
    program.write_bytes(Path(served.__file__).read_bytes())

    def run(url: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", str(program), *words],
            env={served.VARIABLE: url, served.KEY: "secret"},
            capture_output=True,
            text=True,
        )

    with server(lambda n: (f"{SOUND[0]} {n}", [-0.1]), key="secret") as url:
        done = run(url)
        assert (done.returncode, done.stdout) == (0, f"alive: {url}\n"), done
        done = run(url, "ready")
        assert (done.returncode, "1 requests wait" in done.stdout) == (1, True), done
        done = run(url, "question")
        assert (done.returncode, "flash" in done.stdout) == (0, True), done
        done = run("", "question", "--twice", "--url", url)
        assert (done.returncode, "two answers" in done.stdout) == (1, True), done
    done = run(url)
    assert (done.returncode, "refused" in done.stdout) == (1, True), done
    with server(late(1.0)) as url:
        assert run(url).returncode == 0
        done = run(url, "question", "--seconds", "0.3")
        assert (done.returncode, "no answer in 0.3 s" in done.stdout) == (2, True), done
