# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.served ORDER RESULT`: `vllm serve` on the GPUs.

Asks each different request alone, and then all of them at once, round after round.
RESULT has the tokens of each, and from which token on a sum's order may decide.
"""

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm

from proof.e2e.checkpoints import checkpoint
from proof.e2e.checkpoints.chat import ChatWriter

PORT = 8123
READY, PATIENCE = 240.0, 60.0
"""Seconds until a server must answer, and within which a request must."""
MARGIN = 0.2
"""`proof.e2e.judging.checks.MARGIN`, whose module needs what is not here."""
MAIN = "import sys; from vllm.entrypoints.cli.main import main; sys.exit(main())"


def requests(told: dict[str, Any]) -> list[dict[str, Any]]:
    """Different requests, whose prompts and answers have random lengths."""
    chosen = random.Random(0)
    return [
        {
            "prompt": [
                chosen.randrange(7, told["vocabulary"])
                for _ in range(chosen.randint(1, told["longest"]))
            ],
            "max_tokens": chosen.randint(2, 24),
        }
        for _ in range(told["different"])
    ]


def post(asked: dict[str, Any]) -> dict[str, Any]:
    """A request's tokens, and the first of them that another sum could change."""
    more = {"model": "tiny", "temperature": 0.0, "ignore_eos": True, "logprobs": 2}
    # Two tokens may have one text.
    ids = {"return_token_ids": True, "return_tokens_as_token_ids": True}
    body = json.dumps(asked | more | ids).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions",
        body,
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        (choice,) = json.load(answer)["choices"]
    sure = len(choice["token_ids"])
    for number, place in enumerate(choice["logprobs"]["top_logprobs"]):
        best, second = sorted(place.values())[-1:-3:-1]
        if best - second < MARGIN:
            sure = number
            break
    return {"tokens": choice["token_ids"], "sure": sure}


def healthy(server: subprocess.Popen[bytes]) -> None:
    limit = time.monotonic() + READY
    while time.monotonic() < limit and server.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5)
            return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server is not ready; exit status {server.poll()}")


def measure(told: dict[str, Any]) -> dict[str, Any]:
    different = requests(told)
    order = [different[n % len(different)] for n in range(told["requests"])]
    alone = [post(asked) for asked in different]
    rounds, seconds = [], []
    for _ in range(told["rounds"]):
        began = time.monotonic()
        with ThreadPoolExecutor(told["concurrency"]) as clients:
            rounds.append(list(clients.map(post, order)))
        seconds.append(time.monotonic() - began)
    return {"alone": alone, "rounds": rounds, "seconds": seconds} | verdict(
        alone, rounds
    )


def verdict(
    alone: list[dict[str, Any]], rounds: list[list[dict[str, Any]]]
) -> dict[str, Any]:
    """How many answers are those of the request alone, and how many others first
    differ where another sum cannot explain it."""
    counts = {"equal": 0, "from a near tie on": 0, "different": 0}
    for answers in rounds:
        for number, answer in enumerate(answers):
            one = alone[number % len(alone)]
            pairs = zip(answer["tokens"], one["tokens"], strict=True)
            first = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
            if first is None:
                counts["equal"] += 1
            else:
                tie = first >= one["sure"]
                counts["from a near tie on" if tie else "different"] += 1
    tokens = [[answer["tokens"] for answer in answers] for answers in rounds]
    same = sum(
        len({json.dumps(t) for t in both}) == 1 for both in zip(*tokens, strict=True)
    )
    return {"counts": counts, "requests with equal rounds": same}


def main() -> None:
    told = json.loads(Path(sys.argv[1]).read_text())
    (site,) = vllm.__path__
    model = checkpoint.write(Path("chat"), ChatWriter(Path(site).parent))[0]
    flags = ["serve", str(model), "--port", str(PORT), *told["flags"]]
    env = dict(os.environ)
    env.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    server = subprocess.Popen([sys.executable, "-c", MAIN, *flags], env=env)
    try:
        healthy(server)
        result = measure(told)
    finally:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            print("the server did not end within 30 s of SIGTERM, and was killed")
            server.kill()
    Path(sys.argv[2]).write_text(json.dumps(result))
    print({key: result[key] for key in result if key not in ("alone", "rounds")})
    if result["counts"]["different"]:
        sys.exit("answers differ where no near tie explains it")


if __name__ == "__main__":
    main()
