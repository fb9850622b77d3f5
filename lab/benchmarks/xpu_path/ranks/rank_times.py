# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.ranks.rank_times ORDER RESULT`: seconds of
prompts and of decode steps over ranks, and what their experts read from host memory.

A model of Flash's sizes with few layers. Engines of several jobs start together; each
measures while no other starts or measures.
"""

import fcntl
import gc
import importlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

importlib.import_module(
    os.environ.get("E2E_HOME", "standins.emulated_xpu.pytest_plugin")
)

from lab.benchmarks.xpu_path.graph_check import ENGINE  # noqa: E402

WORKER = "lab.benchmarks.xpu_path.ranks.rank_times_worker.CountedWorker"
REPEATS = 3
LOCK = Path("timed")
FEW = 4
"""New tokens of the shorter answer, whose time is taken off a longer one's."""
PERIOD = 0.05
"""Seconds between two looks at what the link carries."""


@contextmanager
def alone(started: Any) -> Iterator[None]:
    """Wait until no other engine starts or measures."""
    fcntl.flock(started, fcntl.LOCK_UN)
    fcntl.flock(started, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(started, fcntl.LOCK_UN)


class Link:
    """Bytes per second that each GPU receives from its host, by NVIDIA's counters:
    a sample each `PERIOD`."""

    def __init__(self, gpus: int) -> None:
        self.samples: list[list[float]] = [[] for _ in range(gpus)]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Link":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _look(self) -> None:
        try:
            nvml: Any = importlib.import_module("pynvml")
            nvml.nvmlInit()
            handles = [
                nvml.nvmlDeviceGetHandleByIndex(gpu) for gpu in range(len(self.samples))
            ]
            while not self._ends.wait(PERIOD):
                for handle, samples in zip(handles, self.samples, strict=True):
                    kib = nvml.nvmlDeviceGetPcieThroughput(
                        handle, nvml.NVML_PCIE_UTIL_RX_BYTES
                    )
                    samples.append(kib * 1024.0)
        except Exception as error:  # A machine may have no such counters.
            print("no counters of the link:", error)

    def means(self) -> list[float | None]:
        """Of each GPU."""
        return [statistics.mean(found) if found else None for found in self.samples]


def measure(llm: Any, case: dict[str, int], ranks: int) -> dict[str, Any]:
    """The median seconds of prompts and a few tokens, those of a further token, and
    what the link carried meanwhile."""
    from vllm import SamplingParams

    def seconds(new: int, seed: int) -> float:
        prompts = [
            {
                "prompt_token_ids": [
                    2 + (place * 7919 + 31 * number + seed) % case.get("tokens", 2000)
                    for place in range(case["length"])
                ]
            }
            for number in range(case["batch"])
        ]
        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - began

    few = min(FEW, case["new"])
    seconds(few, 0)
    short = [seconds(few, 1 + n) for n in range(REPEATS)]
    found: dict[str, Any] = {**case, "short": statistics.median(short)}
    more = case["new"] - few
    if not more:
        return found
    before = llm.collective_rpc("expert_counts")
    with Link(ranks) as link:
        long = [seconds(case["new"], 1 + n) for n in range(REPEATS)]
    after = llm.collective_rpc("expert_counts")
    found["token"] = (statistics.median(long) - found["short"]) / more
    found["long"] = long
    found["rank counts"] = [
        {name: new[name] - old[name] for name in new}
        for old, new in zip(before, after, strict=True)
    ]
    found["received"] = link.means()
    return found


def main() -> None:
    """Serve one order."""
    order = json.loads(Path(sys.argv[1]).read_text())
    result = Path(sys.argv[2])
    with LOCK.open("a") as started:
        fcntl.flock(started, fcntl.LOCK_SH)
        from vllm import LLM

        from lab.benchmarks.xpu_path import flash, written

        folder = Path(f"times-{result.stem}")
        if "checkpoint" in order:
            published = Path(written.folder_of(order, result))
            model = flash.write_v41(folder, published, order["sizes"])
        else:
            tiny = json.loads((Path(order["model"]) / "config.json").read_text())
            model = flash.write_config(folder, tiny, order["sizes"])
        engine = {**ENGINE, **order["engine"]}
        engine |= {"load_format": flash.FORMAT, "worker_cls": WORKER}
        ranks = engine["tensor_parallel_size"]
        began = time.perf_counter()
        llm = LLM(model=str(model), **engine)
        found: dict[str, Any] = {"seconds_to_ready": time.perf_counter() - began}
        found["cases"] = []
        found["bytes"] = llm.collective_rpc("bytes_of_an_expert")
        gc.collect()
        with alone(started):
            for case in order["cases"]:
                found["cases"].append(measure(llm, case, ranks))
                result.write_text(json.dumps(found, indent=1))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
