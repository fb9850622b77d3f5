# SPDX-License-Identifier: Apache-2.0
"""The doctor of a served engine, against servers that are made up."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from xpustack.release import served

SOUND = (" Wednesday, Thursday, Friday", [-0.1, -0.2])
Answers = Callable[[int], tuple[str, list[float]]]


@contextmanager
def server(
    answers: Answers, status: int = 200, key: str = "", refusal: str = ""
) -> Iterator[str]:
    """A server whose n-th answer is `answers(n)`, or 400 and `refusal`; its address."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            models = {"data": [{"id": "flash"}]}
            self.answer("" if self.path == "/health" else json.dumps(models))

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            question = json.loads(self.rfile.read(length))
            assert (question["model"], question["temperature"]) == ("flash", 0)
            asked.append(question)
            if refusal:
                self.send_response(400)
                self.end_headers()
                self.wfile.write(refusal.encode())
                return
            text, logprobs = answers(len(asked))
            choice = {"text": text, "logprobs": {"token_logprobs": logprobs}}
            self.answer(json.dumps({"choices": [choice]}))

        def answer(self, text: str) -> None:
            allowed = not key or self.headers["Authorization"] == f"Bearer {key}"
            self.send_response(status if allowed else 401)
            self.end_headers()
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


def test_a_sound_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    with server(lambda _: SOUND, key="secret") as url:
        assert served.judge(url, twice=True) == f"flash: {SOUND[0]!r}"


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
        served.judge(url, twice=True)


def test_a_refusal_is_shown_with_the_server_s_reason() -> None:
    """A NaN in the answer's log-probabilities: the server itself cannot write it."""
    reason = '{"error": {"message": "Out of range float values: nan"}}'
    said = r"400.*Out of range float values: nan"
    with (
        server(lambda _: SOUND, refusal=reason) as url,
        pytest.raises(served.Unsound, match=said),
    ):
        served.judge(url)
    with (
        server(lambda _: SOUND, refusal="x" * 10_000) as url,
        pytest.raises(served.Unsound) as caught,
    ):
        served.judge(url)
    assert len(str(caught.value)) < 2 * served.MOST_BODY


def test_the_program_stands_alone(tmp_path: Path) -> None:
    """As in an image and on a deployer's machine: no package of ours."""
    program = tmp_path / "served.py"
    program.write_bytes(Path(served.__file__).read_bytes())

    def run(url: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", str(program), *words],
            env={served.VARIABLE: url},
            capture_output=True,
            text=True,
        )

    with server(lambda n: (f"{SOUND[0]} {n}", [-0.1])) as url:
        done = run(url)
        assert (done.returncode, "flash" in done.stdout) == (0, True), done
        done = run("", "--twice", "--url", url)
        assert (done.returncode, "two answers" in done.stdout) == (1, True), done
    done = run(url)
    assert (done.returncode, "refused" in done.stdout) == (1, True), done
