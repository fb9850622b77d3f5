# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.ranks.graph_check_ranks ORDER RESULT`: a fault
that is planted in the captured graphs of the second of two ranks, on two GPUs.

ORDER is that of `graph_check`, and may name a checkpoint as `written` does. Exits with
1 if a rank's check said something else than expected, if one rank has graphs and the
other none, if a healthy engine's took too long, or if the tokens differ.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

# The first prepares the process for the second.
from lab.benchmarks.xpu_path.graph_check import ENGINE, answers, plant
from lab.benchmarks.xpu_path.written import folder_of
from proof.e2e.inside.engine import drafts_of
from standins.emulated_xpu.on_cuda.worker import XpuPathOnCudaWorker

FAULT, SAID = "XPU_PATH_FAULT", "XPU_PATH_SAID"
"""Environment variables of the ranks: the fault, and the files that they write."""
RANKS = 2
SECONDS = 5.0
"""Within which a healthy engine passes."""


class SecondRankWorker(XpuPathOnCudaWorker):
    """Plants the fault on the second rank alone."""

    def init_device(self) -> None:
        self.said: list[str] = []
        self.seconds: list[float] = []
        plant(os.environ[FAULT] if self.rank == 1 else "", self.said, self.seconds)
        super().init_device()

    def compile_or_warm_up_model(self) -> Any:
        try:
            return super().compile_or_warm_up_model()
        finally:
            runner = self.model_runner
            owners = [vars(one) for one in (runner, runner.speculator) if one]
            graphs = [
                manager._graphs_captured
                for owner in owners
                for name, manager in owner.items()
                if name.endswith("cudagraph_manager") and manager.graphs
            ]
            found = {"said": self.said, "seconds": self.seconds}
            # Dropped ones have none.
            found["has_graphs"] = any(graphs)
            found["managers"] = len(graphs)
            said_by(self.rank).write_text(json.dumps(found))


def said_by(rank: int) -> Path:
    """The file that a rank writes."""
    return Path(f"{os.environ[SAID]}.{rank}.json")


def main() -> None:
    """Serve one order."""
    order = json.loads(Path(sys.argv[1]).read_text())
    os.environ |= {FAULT: order["fault"], SAID: sys.argv[2]}
    from vllm import LLM

    if "checkpoint" in order:
        order["model"] = folder_of(order, Path(sys.argv[2]))
    engine = ENGINE | order["engine"]
    # Drafts are counted by the statistics alone.
    drafting = "speculative_config" in engine
    tokens: list[list[int]] = []
    drafts: dict[str, int] = {}
    error = ""
    try:
        llm = LLM(model=order["model"], **engine, disable_log_stats=not drafting)
        tokens = answers(llm, order["waves"][0])
        drafts = drafts_of(llm) if drafting else {}
    except RuntimeError as raised:
        error = str(raised)
    ranks = [json.loads(said_by(rank).read_text()) for rank in range(RANKS)]
    result = {"fault": order["fault"], "ranks": ranks, "tokens": tokens, "error": error}
    result["drafts"] = drafts
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    wrong = [
        f"rank {rank} did not say {word!r}"
        for rank, found in enumerate(ranks)
        for word in order["expected"]
        if word not in " ".join(found["said"])
    ]
    if len({found["has_graphs"] for found in ranks}) > 1:
        wrong.append("one rank has graphs and the other none")
    slow = [found["seconds"] for found in ranks if max(found["seconds"]) > SECONDS]
    if not order["fault"] and slow:
        wrong.append(f"the check took {slow} s")
    if order.get("tokens") and tokens != order["tokens"]:
        wrong.append(f"the tokens are not {order['tokens']}")
    if wrong:
        sys.exit(f"{order['fault'] or 'healthy'}: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
