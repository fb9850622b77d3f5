# SPDX-License-Identifier: Apache-2.0
"""The tiny checkpoint of `e2e` through vLLM's engine, on the device.

Eager and captured engines must give the same tokens, and those of Hugging Face's model
wherever that is sure, and so must one whose experts lie in host memory. Two devices
serve it as two ranks, after a probe of their all-reduce. Some hundred requests come
twice, in batches.
"""

import random
from collections.abc import Sequence
from typing import Any

from proof.on_device.stages.programs import Programs, StageStopped, without_vllm
from proof.on_device.stages.records import Finding
from proof.on_device.stages.setup import Outcome, Setup

VOCABULARY = 128
"""Of the tiny checkpoint."""
SURE = 0.2
"""How far the reference's best logit must lead, in logits with a spread of 1, so that
its token counts as sure. As in `tests/proof/e2e`."""
SOAK = 240
"""Requests of the soak, in waves of 24."""
WAVE = 24
MOST_REPEATS = 0.9
"""Share of one token in an answer of the soak that counts as repeated characters."""
SLOTS = 4
"""Of a layer of the tiny checkpoint whose experts lie in host memory: as many as a
token has experts."""
ALL_REDUCE_SECONDS = 120.0
"""A right all-reduce takes seconds, the start of two ranks included."""
Prompt = dict[str, Any]


def serve(setup: Setup) -> Outcome:
    """Run the stage `serve`."""
    if left_out := without_vllm(setup):
        return left_out
    checks: list[dict[str, str]] = []
    try:
        _checks(setup, checks)
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


def _checks(setup: Setup, checks: list[dict[str, str]]) -> None:
    """Run all checks, each added to `checks` as soon as it is known.

    Raises:
        StageStopped: a program of the stage did not end well.
    """

    def check(name: str, faults: Sequence[str], figure: str) -> None:
        verdict = "failed" if faults else "passed"
        checks.append(
            {"check": name, "verdict": verdict, "figure": "; ".join(faults) or figure}
        )

    programs = Programs(setup, "serve")
    folder = programs.folder
    programs.run("proof.e2e.checkpoints.checkpoint", folder / "checkpoint", share=0.1)
    published, twin = (folder / "checkpoint" / name for name in ("published", "twin"))
    prompts = [prompt(129, 12, 1), prompt(5, 12, 2), prompt(1, 12, 3)]
    alone = programs.engine("eager", published, [prompts], enforce_eager=True)
    (eager,) = alone["waves"]
    captured = programs.engine("graphs", published, [prompts, *soak(), *soak()])
    first, *waves = captured["waves"]
    check(
        "eager and captured engines give the same tokens",
        differences(eager, first),
        f"{sum(map(len, first))} tokens",
    )
    whole = [p["tokens"] + a for p, a in zip(prompts, eager, strict=True)]
    references = programs.answer(
        "proof.on_device.reference", "texts", whole, twin, share=0.2
    )
    faults, sure = disagreements(prompts, eager, references)
    check(
        "the tokens are those of Hugging Face's model, where that is sure",
        faults,
        f"{sure} of {sum(map(len, eager))} tokens",
    )
    answers = [answer for wave in waves for answer in wave]
    half = len(answers) // 2
    check(
        "no log probability is NaN or infinite",
        [f"{captured['not_finite']} are"] if captured["not_finite"] else [],
        f"{len(answers)} requests",
    )
    check("no answer repeats one token", repeated(answers), f"{len(answers)} answers")
    check(
        "the same requests get the same tokens again",
        differences(answers[:half], answers[half:]),
        f"{half} requests",
    )
    name = "experts in host memory give the same tokens"
    hosted = programs.engine(
        "host experts", published, [prompts], moe_expert_cache_size=SLOTS
    )
    if lacks := hosted.get("lacks"):
        figure = f"this vLLM has no {lacks[0]}"
        checks.append({"check": name, "verdict": "left out", "figure": figure})
    else:
        (counted,) = hosted["expert_cache"]
        check(
            name,
            differences(eager, hosted["waves"][0]),
            f"{counted['hits']} hits of {counted['queries']}",
        )
    if setup.device["count"] < 2:
        return
    # A fault of the library hangs, and two ranks would hang as well.
    meeting = folder / "meeting"
    meeting.unlink(missing_ok=True)
    seconds = programs.run(
        "proof.on_device.all_reduce",
        setup.kind,
        meeting,
        limit=ALL_REDUCE_SECONDS,
        what="an all-reduce of two ranks",
    )
    check("an all-reduce of two ranks", [], f"{seconds:.0f} s")
    ranks = programs.engine(
        "two ranks",
        published,
        [prompts],
        enforce_eager=True,
        tensor_parallel_size=2,
    )
    check(
        "two ranks give the tokens of one",
        differences(eager, ranks["waves"][0]),
        f"{sum(map(len, first))} tokens",
    )


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
