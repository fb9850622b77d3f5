# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint of `e2e` through vLLM's engine, on the device.

Eager and captured engines must give the same tokens, and those of Hugging Face's model
wherever that is sure. Two devices serve it as two ranks, after a probe of their
all-reduce. Then some hundred requests come twice, in batches.
"""

import json
import random
from collections.abc import Sequence
from typing import Any

from xpustack.device.records import Finding
from xpustack.device.stages import PROGRAMS, Bench, Outcome, crashed, hung

VOCABULARY = 128
"""Of the tiny checkpoint."""
SURE = 0.2
"""How far the reference's best logit must lead, in logits with a spread of 1, so that
its token counts as sure. As in `tests/e2e`."""
SOAK = 240
"""Requests of the soak, in waves of 24."""
WAVE = 24
MOST_REPEATS = 0.9
"""Share of one token in an answer of the soak that counts as repeated characters."""
ALL_REDUCE_SECONDS = 120.0
"""A right all-reduce takes seconds, the start of two ranks included."""
Prompt = dict[str, Any]


class StageStopped(Exception):
    """A program of the stage failed: nothing after it means anything."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.summary)
        self.outcome = outcome


def serve(bench: Bench) -> Outcome:
    """Run the stage `serve`."""
    if not bench.probe["distributions"].get("vllm"):
        return Outcome(
            "left out",
            "vllm is not installed",
            (
                Finding(
                    "serving needs the patched vLLM beside torch",
                    "install its wheel: docs/deploying.md",
                ),
            ),
        )
    if bench.kind != "xpu":
        return Outcome(
            "left out", "the XPU code path of vLLM needs an XPU; this is a CUDA device"
        )
    checks: list[dict[str, str]] = []
    try:
        _checks(bench, checks)
    except StageStopped as stopped:
        outcome = stopped.outcome
        return Outcome("failed", outcome.summary, outcome.findings, {"checks": checks})
    failed = [check for check in checks if check["verdict"] == "failed"]
    return Outcome(
        "failed" if failed else "passed",
        f"{len(checks) - len(failed)} of {len(checks)} checks passed",
        tuple(Finding(f"{check['check']}: {check['figure']}") for check in failed),
        {"checks": checks},
    )


def _checks(bench: Bench, checks: list[dict[str, str]]) -> None:
    """Run all checks, each added to `checks` as soon as it is known.

    Raises:
        StageStopped: an engine or the reference did not end well.
    """

    def check(name: str, faults: Sequence[str], figure: str) -> None:
        verdict = "failed" if faults else "passed"
        checks.append(
            {"check": name, "verdict": verdict, "figure": "; ".join(faults) or figure}
        )

    model = bench.folder("serve") / "checkpoint"
    _program(bench, "checkpoint", [str(model)], 0.1)
    prompts = [prompt(129, 12, 1), prompt(5, 12, 2), prompt(1, 12, 3)]
    eager = _engine(bench, "eager", [prompts], enforce_eager=True)
    captured = _engine(bench, "graphs", [prompts, *soak(), *soak()])
    first = captured["waves"][0]
    check(
        "eager and captured engines give the same tokens",
        differences(eager["waves"][0], first),
        f"{sum(map(len, first))} tokens",
    )
    _against_reference(bench, prompts, eager["waves"][0], check)
    waves = captured["waves"][1:]
    answers = [answer for wave in waves for answer in wave]
    half = len(waves) // 2
    check(
        "no log probability is NaN or infinite",
        [f"{captured['not_finite']} are"] if captured["not_finite"] else [],
        f"{len(answers)} requests",
    )
    check("no answer repeats one token", repeated(answers), f"{len(answers)} answers")
    check(
        "the same requests get the same tokens again",
        differences(
            [a for wave in waves[:half] for a in wave],
            [a for wave in waves[half:] for a in wave],
        ),
        f"{len(answers) // 2} requests",
    )
    device = bench.probe["device"]
    if device["count"] < 2:
        return
    _all_reduce(bench, check)
    ranks = _engine(
        bench, "two ranks", [prompts], enforce_eager=True, tensor_parallel_size=2
    )
    check(
        "two ranks give the tokens of one",
        differences(eager["waves"][0], ranks["waves"][0]),
        f"{sum(map(len, first))} tokens",
    )


def _engine(
    bench: Bench, name: str, waves: list[list[Prompt]], **engine: Any
) -> dict[str, Any]:
    folder = bench.folder("serve")
    order, answer = (folder / f"{name.replace(' ', '-')}.{x}.json" for x in "ja")
    model = str(folder / "checkpoint/published")
    order.write_text(json.dumps({"model": model, "engine": engine, "waves": waves}))
    answer.unlink(missing_ok=True)
    _program(bench, "engine", [str(order), str(answer)], 0.3, f"the engine, {name}")
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def _program(
    bench: Bench, name: str, words: list[str], share: float, what: str = ""
) -> None:
    """Run one of the programs within its share of the time.

    Raises:
        StageStopped: it failed, or ran into its limit.
    """
    limit = 60 * bench.minutes * share
    ended = bench.execute("serve", [str(PROGRAMS / f"{name}.py"), *words], limit)
    if ended.timed_out:
        raise StageStopped(hung(bench, "serve", what or name, ended))
    if ended.returncode:
        raise StageStopped(crashed(bench, "serve", what or name, ended))


def _against_reference(
    bench: Bench, prompts: list[Prompt], answers: list[list[int]], check: Any
) -> None:
    folder = bench.folder("serve")
    texts, found = folder / "texts.json", folder / "reference.json"
    whole = [p["tokens"] + a for p, a in zip(prompts, answers, strict=True)]
    texts.write_text(json.dumps(whole))
    found.unlink(missing_ok=True)
    twin = str(folder / "checkpoint/twin")
    _program(bench, "reference", [twin, str(texts), str(found)], 0.2)
    references = json.loads(found.read_text())
    faults, sure = disagreements(prompts, answers, references)
    check(
        "the tokens are those of Hugging Face's model, where that is sure",
        faults,
        f"{sure} of {sum(map(len, answers))} tokens",
    )


def _all_reduce(bench: Bench, check: Any) -> None:
    """Add up a tensor over two processes, with a time limit, because a fault hangs.

    Raises:
        StageStopped: they do not end, or do not agree: two ranks would hang.
    """
    folder = bench.folder("serve") / "all-reduce"
    folder.mkdir(exist_ok=True)
    (folder / "meeting").unlink(missing_ok=True)
    program = (
        "import subprocess, sys; words = sys.argv[1:];"
        "ranks = [subprocess.Popen([sys.executable, *words, str(r)]) for r in (0, 1)];"
        "sys.exit(max(abs(rank.wait()) for rank in ranks))"
    )
    words = [str(PROGRAMS / "all_reduce.py"), bench.kind, str(folder)]
    command = ["-c", program, *words]
    ended = bench.execute("serve", command, ALL_REDUCE_SECONDS)
    if ended.timed_out:
        raise StageStopped(hung(bench, "serve", "an all-reduce of two ranks", ended))
    if ended.returncode:
        raise StageStopped(crashed(bench, "serve", "an all-reduce of two ranks", ended))
    check("an all-reduce of two ranks", [], f"{ended.seconds:.0f} s")


def prompt(length: int, new: int, seed: int) -> Prompt:
    """Random tokens, and how many to add."""
    own = random.Random(seed)
    tokens = [own.randrange(2, VOCABULARY) for _ in range(length)]
    return {"tokens": tokens, "new": new}


def soak() -> list[list[Prompt]]:
    """Waves of requests of mixed lengths, always the same."""
    own = random.Random(0)
    requests = [
        prompt(own.choice((1, 7, 63, 129, 300)), own.choice((8, 32)), 100 + i)
        for i in range(SOAK)
    ]
    return [requests[i : i + WAVE] for i in range(0, SOAK, WAVE)]


def differences(first: list[list[int]], second: list[list[int]]) -> list[str]:
    """Answers that differ, and where."""
    found = []
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        if a != b:
            place = next(
                i for i, pair in enumerate(zip(a, b, strict=True)) if len({*pair}) > 1
            )
            found.append(f"request {number}, token {place}: {a[place]} and {b[place]}")
    return found[:5]


def repeated(answers: list[list[int]]) -> list[str]:
    """Long answers that are mostly one token."""
    found = []
    for number, answer in enumerate(answers):
        if len(answer) < 32:
            continue
        most = max(answer.count(token) for token in set(answer))
        if most > MOST_REPEATS * len(answer):
            found.append(f"request {number}: one token {most} times")
    return found[:5]


def disagreements(
    prompts: list[Prompt], answers: list[list[int]], references: list[dict[str, Any]]
) -> tuple[list[str], int]:
    """Tokens that a sure reference would not choose; how many it is sure of."""
    faults, sure = [], 0
    for number, (asked, answer, reference) in enumerate(
        zip(prompts, answers, references, strict=True)
    ):
        start = len(asked["tokens"]) - 1
        for place, token in enumerate(answer):
            wanted = reference["next"][start + place]
            if wanted < 0 or reference["lead"][start + place] <= SURE:
                continue
            sure += 1
            if wanted != token:
                faults.append(
                    f"request {number}, token {place}: {token} instead of {wanted}"
                )
    return faults[:5], sure
