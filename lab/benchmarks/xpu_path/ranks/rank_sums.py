# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.ranks.rank_sums ORDER RESULT`: step
`all-reduce-in-place` on two ranks with a real collective library.

Each check runs on the tree's own code, and those of its two guards once more on code
without that guard, where they must fail. Exits with 1 if one ends otherwise. RESULT has
the outcomes by rank and, on a GPU, the time of a sum with and without a copy.
"""

import importlib
import inspect
import json
import multiprocessing
import os
import socket
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

HOME = "standins.emulated_xpu.pytest_plugin"
RANKS = 2
SHAPES = ((1, 4096), (16, 4096), (8192, 4096))
"""Rows and width of what is summed."""
REPEATS = 200
BATCH_INVARIANT = "envs.VLLM_BATCH_INVARIANT or "
COMPILING = " or torch.compiler.is_compiling()"


class Ranks:
    """One of the ranks, its group, and what the other one gives."""

    def __init__(self, rank: int, address: str) -> None:
        import torch
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm.distributed import parallel_state
        from vllm.platforms import current_platform

        self.rank, self.torch = rank, torch
        self.on_gpu = current_platform.device_type == "cuda"
        self.device = torch.device("cuda", rank) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            current_platform.set_device(self.device)
        with set_current_vllm_config(VllmConfig()):
            parallel_state.init_distributed_environment(
                RANKS, rank, address, rank, current_platform.dist_backend
            )
            parallel_state.initialize_model_parallel(RANKS)
        self.group = parallel_state.get_tp_group()
        self.communicator = self.group.device_communicator

    def given(self, rows: int, width: int) -> list[Any]:
        """What each rank gives, bf16 `[rows, width]`: both know both."""
        torch = self.torch
        random = torch.Generator().manual_seed(rows)
        drawn = torch.randn(RANKS, rows, width, generator=random).bfloat16()
        return list(drawn.to(self.device))

    def summed(self, function: Callable[[Any], Any], shape: tuple[int, int]) -> str:
        """Whether `function` sums, and into whose memory."""
        every = self.given(*shape)
        own = every[self.rank].clone()
        total = function(own)
        # Of two numbers a sum in bf16 has one rounding, whatever the order.
        wanted = (every[0].float() + every[1].float()).bfloat16()
        if not self.torch.equal(total, wanted):
            return "the sum is wrong"
        if total.data_ptr() == own.data_ptr():
            return "in place"
        kept = self.torch.equal(own, every[self.rank])
        return "in a copy" if kept else "the input is lost"


def in_place(ranks: Ranks) -> str:
    """A tensor that a layer gives away holds the sum."""
    return outcome(ranks, ranks.group.all_reduce_, "in place")


def kept(ranks: Ranks) -> str:
    """Who does not give its tensor away keeps it."""
    return outcome(ranks, ranks.group.all_reduce, "in a copy")


def parts(ranks: Ranks) -> str:
    """A tensor in parts is copied."""
    wide = ranks.given(8, 64)[ranks.rank]
    before = wide.clone()
    ranks.group.all_reduce_(wide[:, :32])
    return "" if ranks.torch.equal(wide, before) else "the input is lost"


def batch_invariant(ranks: Ranks) -> str:
    """Batch-invariant sums are gathered and added in the order of the ranks."""
    from vllm.distributed.device_communicators import xpu_communicator

    envs = xpu_communicator.envs
    with replaced(envs, VLLM_BATCH_INVARIANT=True):
        return outcome(ranks, ranks.group.all_reduce_, "in a copy")


def compiled(ranks: Ranks) -> str:
    """Compiled code asks the custom op, which must not return its input."""
    asked: list[str] = []

    def noted(graph: Any, inputs: Any) -> Any:
        asked.extend(str(node.target) for node in graph.graph.nodes)
        return graph

    torch = ranks.torch
    torch._dynamo.reset()
    from vllm.distributed.communication_op import tensor_model_parallel_all_reduce_

    function = torch.compile(
        tensor_model_parallel_all_reduce_, backend=noted, fullgraph=True
    )
    wrong = outcome(ranks, function, "in a copy")
    if wrong:
        return wrong
    return "" if "vllm.all_reduce" in " ".join(asked) else f"it asks {asked}"


def captured(ranks: Ranks) -> str:
    """A graph sums what its input holds at each replay."""
    torch = ranks.torch
    if not ranks.on_gpu:
        return ""
    every = [ranks.given(rows, 4096) for rows in (4, 5, 6)]
    every = [[one[:4].clone() for one in each] for each in every]
    given = torch.zeros_like(every[0][0])
    ranks.group.all_reduce_(given.clone())
    with ranks.group.graph_capture() as context:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=context.stream):
            total = ranks.group.all_reduce_(given * 1)
    for each in every:
        given.copy_(each[ranks.rank])
        graph.replay()
        if not torch.equal(total, (each[0].float() + each[1].float()).bfloat16()):
            return "a replay's sum is wrong"
    return ""


def outcome(ranks: Ranks, function: Callable[[Any], Any], wanted: str) -> str:
    """What is wrong with one of the sums of all shapes; nothing if none is."""
    found = {str(shape): ranks.summed(function, shape) for shape in SHAPES}
    wrong = {shape: how for shape, how in found.items() if how != wanted}
    return f"summed {wrong}, not {wanted}" if wrong else ""


CHECKS = {
    check.__name__: check
    for check in (in_place, kept, parts, batch_invariant, compiled, captured)
}


def without(function: Any, guard: str) -> Any:
    """The function of the tree, its source without the one text `guard`.

    Raises:
        ValueError: the source does not have it once.
    """
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(guard) != 1:
        raise ValueError(f"{function.__qualname__} has not one {guard!r}: {source}")
    made: dict[str, Any] = {}
    exec(source.replace(guard, ""), function.__globals__, made)
    return made[function.__name__]


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Give an object other attributes for a while."""
    missing = object()
    before = {name: vars(owner).get(name, missing) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def outcomes(ranks: Ranks) -> dict[str, str]:
    """What each check says, and those of the guards without them."""
    found = {name: check(ranks) for name, check in CHECKS.items()}
    for name, owner, guard in (
        ("batch_invariant", ranks.communicator, BATCH_INVARIANT),
        ("compiled", ranks.group, COMPILING),
    ):
        kind: Any = type(owner)
        while "all_reduce_" not in vars(kind):
            kind = kind.__base__
        broken = without(vars(kind)["all_reduce_"], guard)
        with replaced(kind, all_reduce_=broken):
            found[f"{name} without its guard"] = CHECKS[name](ranks)
    return found


def times(ranks: Ranks) -> dict[str, dict[str, float]]:
    """Microseconds of a sum, the median of some: into a copy, and in place."""
    torch = ranks.torch
    if not ranks.on_gpu:
        return {}
    found = {}
    for shape in SHAPES:
        x = torch.zeros(shape, dtype=torch.bfloat16, device=ranks.device)
        found[str(list(shape))] = {
            "copy": timed(torch, partial(ranks.group.all_reduce, x)),
            "in place": timed(torch, partial(ranks.group.all_reduce_, x)),
        }
    return found


def timed(torch: Any, function: Callable[[], Any]) -> float:
    """Microseconds of the device between the starts of two calls."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    for event in events:
        event.record()
        function()
    torch.cuda.synchronize()
    pairs = zip(events[REPEATS // 4 :], events[REPEATS // 4 + 1 :], strict=False)
    median: float = statistics.median(a.elapsed_time(b) for a, b in pairs)
    return 1e3 * median


def serve(rank: int, address: str, answer: Path) -> None:
    """One rank."""
    # It is off in the environment of engines.
    os.environ["TORCHDYNAMO_DISABLE"] = "0"
    importlib.import_module(os.environ.get("E2E_HOME", HOME))
    ranks = Ranks(rank, address)
    found = {"outcomes": outcomes(ranks), "microseconds": times(ranks)}
    answer.write_text(json.dumps(found))


def wrong(found: list[dict[str, Any]]) -> list[str]:
    """Checks that failed, and those that saw nothing without their guard."""
    return [
        f"rank {rank}: {name}: {said or 'passes'}"
        for rank, answer in enumerate(found)
        for name, said in answer["outcomes"].items()
        if bool(said) != name.endswith("without its guard")
    ]


def main() -> None:
    """Run all ranks."""
    result = Path(sys.argv[2])
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{opened.getsockname()[1]}"
    answers = [Path(f"{result}.{rank}") for rank in range(RANKS)]
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=serve, args=(rank, address, answer))
        for rank, answer in enumerate(answers)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = [json.loads(answer.read_text()) for answer in answers]
    result.write_text(json.dumps(found, indent=1))
    print(json.dumps(found, indent=1))
    if said := wrong(found):
        sys.exit("; ".join(said))


if __name__ == "__main__":
    main()
