# SPDX-License-Identifier: Apache-2.0
"""What is asked of two GPUs, and how its answers are read."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.benchmarks.xpu_path import beside, prepare
from lab.benchmarks.xpu_path.jobs import command
from lab.benchmarks.xpu_path.ranks import answers, rank_sums, transfers, two_page
from lab.benchmarks.xpu_path.ranks.rank_sums import BATCH_INVARIANT, COMPILING
from lab.benchmarks.xpu_path.ranks.two_gpus import TWO_JOBS
from proof.e2e.judging.transfers import check_pages
from proof.e2e.running.asked import Asked
from stack.core.rows import read_rows

ROOT = Path(__file__).parents[3]
PATCH = ROOT / "patches/all-reduce-in-place/v0.31.0.patch"
RAN = {"release": "v1", "tree_id": "0123456789ab", "made": "2026-11-29"}


@pytest.mark.parametrize("name", TWO_JOBS)
def test_an_order_is_json_and_has_the_prompts_of_its_program(name: str) -> None:
    order = TWO_JOBS[name].order(Path("work"))
    assert json.dumps(order)
    for given in order.get("asked", ()):
        assert len(Asked(**given).order(0)["tokens"]) == given["length"]
    kept = TWO_JOBS[name].logprobs
    for prompt in (p for wave in order["waves"] for p in wave if kept):
        assert prompt["sampling"] == {"logprobs": kept}


def test_a_job_is_held_to_one_that_exists() -> None:
    others = {name: answers.other_of(name) for name in TWO_JOBS}
    assert others["two-experts-whole-graphs"] == "one-experts"
    assert others["two-v41-drafts-eager"] == "two-v41-eager"
    assert others["one-v41"] is None
    assert {other for other in others.values() if other} <= TWO_JOBS.keys()


@pytest.mark.parametrize("guard", [BATCH_INVARIANT, COMPILING])
def test_the_guards_that_are_taken_out_are_those_of_the_step(guard: str) -> None:
    added = [line for line in PATCH.read_text().splitlines() if line.startswith("+")]
    assert sum(guard in line for line in added) == 1


def guarded(x: int) -> int:
    return 0 if x > 9 or x < 0 else x


def test_a_guard_is_taken_out_of_a_function() -> None:
    assert rank_sums.without(guarded, " or x < 0")(-1) == -1
    with pytest.raises(ValueError, match="has not one"):
        rank_sums.without(guarded, " or x < 1")


def test_a_check_must_fail_without_its_guard_alone() -> None:
    said = {"kept": "", "compiled": "", "compiled without its guard": "in place"}
    assert rank_sums.wrong([{"outcomes": said}]) == []
    said = {"kept": "lost", "compiled": "", "compiled without its guard": ""}
    assert rank_sums.wrong([{"outcomes": said}]) == [
        "rank 0: kept: lost",
        "rank 0: compiled without its guard: passes",
    ]


def answer(*tokens: int, logprobs: dict[str, list[float]] | None = None) -> Any:
    kept = [[[logprobs] * len(tokens)]] if logprobs else [[[]]]
    one = {"tokens": [[list(tokens)]], "read": [[[1]]], "logprobs": kept}
    return {**one, "drafts": {}, "exchanged": [0, 0]}


def test_tokens_count_up_to_the_first_other_one() -> None:
    theirs = answer(4, 5, 6, logprobs={"5": [-0.5, 1], "7": [-0.75, 2]})
    found = answers.compared("a", answer(4, 7, 6), "b", theirs)
    assert (found.tokens, found.same, found.behind) == (3, 1, (0.25,))
    assert str(found) == "a beside b: 1 of 3 tokens; first others behind by 0.250"
    unknown = answers.compared("a", answer(4, 8, 6), "b", theirs)
    assert unknown.leads == "?"


def entry(**changed: int) -> dict[str, int]:
    return {"compared": 2, "known": 0, "wrong": 0, "missing": 0, **changed}


def fetched(stray: int = 0, unlike: int = 0, **changed: int) -> dict[str, Any]:
    groups = {"a": entry(), "b": entry(**changed)}
    pages = {"stray": stray, "unlike": unlike, "groups": groups}
    return {"pages": pages, "preemptions": 0}


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (fetched(wrong=1), "bytes are wrong"),
        (fetched(missing=1), "blocks are missing"),
        (fetched(compared=0), "nothing came"),
        (fetched(stray=1), "other blocks were written"),
        (fetched(unlike=1), "ranks have different bytes"),
    ],
)
def test_each_way_in_which_a_transfer_is_wrong_is_seen(
    found: dict[str, Any], said: str
) -> None:
    check_pages(fetched(), Asked(20))
    with pytest.raises(AssertionError, match=said):
        check_pages(found, Asked(20))


def killed(reason: str, *tokens: int, states: Any = ()) -> list[dict[str, Any]]:
    right = {"tokens": [1, 2]}
    first = {"reason": "length", "tokens": [1, 2], "alone": right}
    second = {"reason": reason, "tokens": list(tokens), "alone": right}
    second["states"] = [*states]
    return [first, second, {"reason": "length", "tokens": [3], "alone": None}]


def test_rows_say_what_became_of_a_prompt_whose_sender_died() -> None:
    rows = [
        dict(two_page.of_killed(one))
        for one in (killed("error"), killed("length", 1, 2), killed("length", 1, 9))
    ]
    assert [row["the prompt"] for row in rows] == [
        "ends with error, no token",
        "ends with length, right tokens",
        "ends with length, other tokens",
    ]


class Agent:
    """NIXL's, whose transfer tells whether its sender lives."""

    def __init__(self, sender: int) -> None:
        self.sender = sender

    def transfer(self, handle: str) -> str:
        try:
            os.kill(self.sender, 0)
        except ProcessLookupError:
            return "dead"
        return "PROC"


@pytest.mark.parametrize(
    ("when", "answers"), [("before", ["dead", "dead"]), ("within", ["PROC", "dead"])]
)
def test_a_sender_dies_once_before_a_transfer_or_within_it(
    when: str, answers: list[str]
) -> None:
    sender = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    agent = Agent(sender.pid)
    states = transfers.kill_at_a_transfer(agent, sender.pid, when)
    assert [agent.transfer("a"), agent.transfer("b")] == answers
    assert states == (["PROC"] if when == "within" else [])


def test_a_sender_must_have_died_when_it_was_to() -> None:
    in_flight = killed("error", states=["PROC"])
    transfers.check_without_its_sender(in_flight, "fail", "within")
    transfers.check_without_its_sender(killed("length", 1, 2), "recompute", "before")
    assert (
        dict(two_page.of_killed(in_flight))["the copy when its sender died"] == "PROC"
    )
    for found, policy, when in (
        (killed("error"), "fail", "within"),
        (killed("error", states=["DONE"]), "fail", "within"),
        (killed("error"), "recompute", "before"),
        (killed("length", 1, 9), "fail", "before"),
    ):
        with pytest.raises(AssertionError):
            transfers.check_without_its_sender(found, policy, when)


def test_rows_say_whether_both_ranks_have_graphs() -> None:
    def said(*kept: bool) -> str:
        ranks = [{"has_graphs": one, "seconds": [1.0]} for one in kept]
        return dict(two_page.of_graph_check(ranks, {}))["graphs"]

    assert said(True, True) == "stay"
    assert said(False, False) == "go from both ranks"
    assert said(False, True) == "differ between the ranks"


def test_bytes_are_those_of_each_ranks_misses() -> None:
    counts = [{"misses": 6, "hits": 2, "copies": 0}, {"misses": 0, "hits": 0}]
    case = {"batch": 1, "length": 16, "new": 3, "long": [1.0], "token": 0.002}
    case |= {"rank counts": counts, "received": [None, 5e9]}
    rows = dict(two_page.of_times({"bytes": [1_000_000, 1], "cases": [case]}))
    assert rows["1 of 16 tokens, a step"] == "2.00 ms"
    assert rows["1 of 16 tokens, rank 0's link"].startswith("2.0 MB a step: 6 misses")
    assert rows["1 of 16 tokens, rank 1's link by its counters"] == "10.0 MB a step"


def test_a_job_that_ran_again_has_its_newer_rows_alone() -> None:
    before = [RAN | {"job": job, "what": "x", "found": "1"} for job in ("b", "a")]
    found = [RAN | {"job": "b", "what": "y", "found": "2"}]
    rows = two_page.merged(before, found)
    assert [(row["job"], row["what"]) for row in rows] == [("a", "x"), ("b", "y")]


def test_rows_name_the_jobs_that_gave_them() -> None:
    texts = ["one-v41", "two-v41-eager"]
    assert two_page.jobs_of("two-v41-drafts-eager") == [*texts, "two-v41-drafts-eager"]
    for row in read_rows(ROOT / "docs/data/two_gpus.csv"):
        assert row["command"] == command(*two_page.jobs_of(row["job"]))
    for row in read_rows(ROOT / "docs/data/e2e_gpu.csv"):
        assert row["command"] == beside.asked_by(row["checkpoint"], row["where"])


def test_of_nixl_what_moves_pages_travels_alone() -> None:
    kept = (
        "nixl_cu13/_bindings.cpython-312-x86_64-linux-gnu.so",
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_UCX.so",
        "nixl_cu13.libs/ucx/libuct_cuda.so.0.0.0",
        "nixl-1.5.1.dist-info/METADATA",
    )
    left = (
        "nixl_ep_cu13/nixl_ep_cpp_torch214.so",
        ".nixl_cu13.mesonpy.libs/plugins/libplugin_GDS.so",
        "nixl_cu13.libs/nixl/libplugin_UCX.so",
        "nixl_cu13.libs/ucx/libuct_ib.so.0.0.0",
        "pycountry/locales/de/x.mo",
    )
    assert not any(map(prepare.UNREAD.match, kept))
    assert all(map(prepare.UNREAD.match, left))
