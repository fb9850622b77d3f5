# SPDX-License-Identifier: Apache-2.0
"""What a release gives over several ranks, beside what it gives on one.

Every split answers the same prompts. Its layers keep the bounds of one rank's, and its
tokens are one rank's, up to a token of which Hugging Face's model is not sure either.
"""

import socket
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from proof.e2e.checkpoints import dspark, mtp
from proof.e2e.judging.checks import (
    MARGIN,
    check_attention,
    check_experts,
    check_logits,
)
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.judging.endings import Verdict, ended
from proof.e2e.pictures import Text
from proof.e2e.running.serving import (
    SHARING,
    Engines,
    EngineStopped,
    Job,
    Prompt,
    Served,
)
from proof.e2e.twins.twin import Reference, Roundings

FORKED = ("VLLM_WORKER_MULTIPROC_METHOD", "fork")
"""A rank starts with what the engine's process has imported. On a device each is
spawned, because a queue does not outlive a fork."""
PATIENT = ("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "900")
"""An interpreted step of several ranks takes minutes on a busy machine."""
LONG = (Prompt(130, 6, seed=1), Prompt(6, 5, seed=2))
"""The first makes an entry of 128 tokens."""
SHORT = (Prompt(40, 7, seed=21), Prompt(6, 6, seed=337))
"""Their tokens lead by more than those of other seeds, on one rank."""
STAGED = (Prompt(40, 7, seed=152), Prompt(6, 6, seed=29))
"""The same of six layers: for Hugging Face's model each token leads by 0.24."""
DSPARK = "DSpark"


@dataclass(frozen=True)
class Split:
    """How ranks share the model: tensor-parallel ranks, pipeline stages, engines (data
    parallelism), whether each expert is whole on one rank, and from how many rows of
    prefill on they share the indexer's, if not from the release's own number."""

    tensor: int = 1
    stages: int = 1
    engines: int = 1
    experts: bool = False
    rows: int | None = None

    @property
    def name(self) -> str:
        if self.experts and self.engines == 1:
            return f"EP {self.tensor}"
        sizes = {"TP": self.tensor, "PP": self.stages, "DP": self.engines}
        parts = [f"{part} {size}" for part, size in sizes.items() if size > 1]
        whole = ", EP" if self.experts else ""
        shared = f", {self.rows} rows" if self.rows else ""
        return " x ".join(parts or ["one rank"]) + whole + shared

    @property
    def arguments(self) -> dict[str, Any]:
        """An engine's."""
        several = self.tensor * self.stages > 1
        shared = {SHARING: self.rows}
        return ({"attention_config": shared} if self.rows else {}) | {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.stages,
            "distributed_executor_backend": "mp" if several else "uni",
            "enable_expert_parallel": self.experts,
            "enable_ep_weight_filter": self.engines > 1,
        }

    def environments(self) -> list[dict[str, str]]:
        """What each engine finds of the others."""
        if self.engines == 1:
            return [{}]
        with socket.socket() as opened:
            opened.bind(("127.0.0.1", 0))
            port = opened.getsockname()[1]
        return [
            {
                "VLLM_DP_MASTER_IP": "127.0.0.1",
                "VLLM_DP_MASTER_PORT": str(port),
                "VLLM_DP_RANK": str(rank),
                "VLLM_DP_SIZE": str(self.engines),
                # In the caller's process their steps are not kept together.
                "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            }
            for rank in range(self.engines)
        ]


SPLITS = {
    split.name: split
    for split in (
        *(Split(tensor=size) for size in (2, 4, 8)),
        Split(stages=2),
        Split(tensor=2, stages=2),
        *(Split(tensor=size, experts=True) for size in (2, 4)),
        Split(engines=2, experts=True),
        Split(tensor=8, stages=2),
    )
}
FEATURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "MTP 1": {"method": "mtp", "num_speculative_tokens": 1},
    "MTP 3": {"method": "mtp", "num_speculative_tokens": 3},
    DSPARK: {"method": "dspark", "num_speculative_tokens": dspark.BLOCK},
}
"""What drafts, if anything."""


Answers = tuple[Served, list[Served], EngineStopped | None]
"""One rank's answer, each engine's, and what stopped an engine."""


class Case:
    """One cell of the matrix: a release, a split and a feature."""

    def __init__(
        self, engines: Engines, release: str, split: Split, feature: str
    ) -> None:
        self.engines, self.release = engines, release
        self.split, self.feature = split, feature
        self.drafting = FEATURES[feature]
        six = split.stages > 1
        self.layers = "six layers" if six else "three layers"
        self.size = mtp.SIX_LAYERS if six else mtp.THREE_LAYERS
        leading = STAGED if six else SHORT
        # The indexer scores no rows of the leading prompts, which choose all entries.
        self.prompts = leading if self.drafting and not split.rows else LONG
        engines.add_checkpoint(self.layers, mtp.Mtp(0, {}, self.size))

    def jobs(self, split: Split, name: str, drafting: dict[str, Any]) -> list[Job]:
        """What each engine of a split is asked, with the checkpoint of that name."""
        more = {"speculative_config": drafting} if drafting else {}
        asked = self.feature if drafting else len(self.prompts[0].tokens)
        return [
            Job(
                f"{name}, {asked}, {split.name}, {rank}",
                (self.prompts[rank :: split.engines],),
                tuple((split.arguments | more).items()),
                checkpoint=name,
                splits_keys=False,
                environment=(FORKED, *others.items()),
            )
            for rank, others in enumerate(split.environments())
        ]

    def on_one_rank(self) -> Served:
        """The answer to the same prompts, without drafts."""
        (job,) = self.jobs(Split(), self.layers, {})
        return self.engines.serve(self.release, job)

    def served(self, known: dict[int, int]) -> list[Served]:
        """Each engine's answer; a draft says what is `known` to follow a token."""
        name = self.layers
        if self.drafting:
            draft = dspark.DSpark if self.feature == DSPARK else mtp.Mtp
            # What follows may differ from release to release.
            name = f"{name}, {draft.__name__} of {self.release}"
            self.engines.add_checkpoint(name, draft(0, known, self.size))
        asked = self.jobs(self.split, name, self.drafting)
        running = [self.engines.order(self.release, job) for job in asked]
        return [one.result() for one in running]

    def begin(self) -> Future[Answers]:
        """Serve the case beside other jobs, if it was not begun before."""
        return self.engines.begin(answers, self.release, self.split, self.feature)

    def judge(self) -> Verdict:
        """Hold the split to the bounds and to one rank's tokens.

        Raises:
            AssertionError: a layer, a token or the number of accepted drafts is wrong.
        """
        if self.feature == DSPARK and not self.engines.has_dspark(self.release):
            return Verdict("no such feature", "the release has no DSpark on XPU")
        one, results, stop = self.begin().result()
        known = successors(one)
        if stop:
            found = ended(str(stop))
            assert found.kind == "refuses", stop
            return Verdict("refused", found.why)
        twin = self.engines.twin_of(self.layers)
        near = near_ties(results, one, twin)
        for result in results:
            check_attention(result, twin)
            if self.drafting:
                says = known.get if self.feature == DSPARK else mtp.says_after(known)
                count = self.drafting["num_speculative_tokens"]
                check_drafts(result, says, count)
            else:
                check_experts(result, twin)
                check_logits(result, twin)
            if self.split.rows:
                check_shared(result, self.split)
        return Verdict("near tie" if near else "equal", "; ".join(near))


def answers(engines: Engines, release: str, split: Split, feature: str) -> Answers:
    """Those of a case, on one rank and then on several."""
    case = Case(engines, release, split, feature)
    one = case.on_one_rank()
    try:
        return one, case.served(successors(one)), None
    except EngineStopped as stop:
        return one, [], stop


def check_shared(result: Served, split: Split) -> None:
    """Ranks shared rows of prefill, and each had some of them.

    Raises:
        AssertionError: one never did, or scored none.
    """
    assert len(result.shared) == split.tensor * split.stages
    for rank, exchanges in enumerate(result.shared):
        assert exchanges, f"rank {rank} of {split.name} never shared rows"
        for sizes in exchanges:
            assert len(sizes) == split.tensor, f"{split.name} shared {sizes}"
        assert any(all(sizes) for sizes in exchanges), f"{split.name}: {exchanges}"


def near_ties(results: list[Served], one: Served, twin: Reference) -> list[str]:
    """The first token of each request that is not one rank's, where Hugging Face's
    model, with the engine's roundings, has both within a hair of its best.

    Raises:
        AssertionError: it is sure that one of them is wrong.
    """
    found, same = [], 0
    wanted = dict(zip(map(tuple, one.read), one.new_tokens(), strict=True))
    for result in results:
        answered = zip(
            result.job.prompts, result.read, result.new_tokens(), strict=True
        )
        for asked, prompt, tokens in answered:
            theirs = wanted[tuple(prompt)]
            assert len(tokens) == len(theirs), (tokens, theirs)
            pairs = enumerate(zip(tokens, theirs, strict=True))
            place = next((i for i, (ours, other) in pairs if ours != other), None)
            same += len(tokens) if place is None else place
            if place is None:
                continue
            with twin.rounded(Roundings.of(result.answer)):
                before = Text(prompt + tokens[:place], asked.images)
                logits = twin.logits(before)[-1]
            behind = float(logits.max() - logits[[tokens[place], theirs[place]]].min())
            where = f"token {place + 1} behind {len(prompt)}"
            assert behind <= MARGIN, (
                f"{where}: {tokens}, one rank {theirs}: {behind:.3f}"
            )
            found.append(f"{where}: {behind:.3f} apart for Hugging Face")
    assert same > len(wanted), "no token after the first is one rank's"
    return found
