# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.graph_check ORDER RESULT`: a fault that is planted
in captured graphs, and what vLLM's check of them says, on the GPU.

ORDER names the checkpoint, the arguments of `LLM`, the fault, and what the check must
say; RESULT holds what it said, and the tokens that the engine then gave. Exits with 1
if the check said something else, or if the engine still replays a wrong graph.
"""

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

HOME = "standins.emulated_xpu.on_cuda.environment"
importlib.import_module(HOME)

CHECK = "vllm.plugins.xpu_dsv4"
"""The logger of the plugin, which has the check."""
LAYER = 1
"""The layer in which faults are planted."""
ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 8,
    "block_size": 256,
    "kv_cache_dtype": "fp8",
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
    "worker_cls": "standins.emulated_xpu.on_cuda.worker.XpuPathOnCudaWorker",
    "seed": 0,
}


def stale_pointer(runner: Any) -> None:
    """Move a weight after the capture; its old memory gets another owner."""
    wanted = f"layers.{LAYER}.", "attn_norm.weight"
    move(runner, lambda name: all(w in name for w in wanted), torch.Tensor.normal_)


def host_value(runner: Any) -> None:
    """Change a number of the host that was another one during the capture."""
    runner.planted[0] = 1.5


def moved_workspace(runner: Any) -> None:
    """Give vLLM's workspace other memory after the capture; a weight now lies where
    it was, and replays still write there."""
    from vllm.v1.worker.workspace import current_workspace_manager

    spaces = current_workspace_manager()._current_workspaces
    old = spaces[0]
    spaces[0] = old.clone()
    weight = norm_of(runner, LAYER)
    size = weight.numel() * weight.element_size()
    memory = old.view(-1)[:size].view(weight.dtype).view(weight.shape)
    weight.data = memory.copy_(weight.data)


def compressor_position(runner: Any) -> None:
    """As `stale_pointer`, for the embeddings of positions in compressors."""
    move(runner, lambda name: name.endswith("compressor.ape"), torch.Tensor.normal_)


def query_norm(runner: Any) -> None:
    """A graph multiplies all queries by a quarter more, which no sum shows."""
    move(
        runner, lambda name: name.endswith("q_norm.weight"), lambda old: old.mul_(1.25)
    )


def indexer_weights(runner: Any) -> None:
    """A graph chooses other entries, where there are more than it takes."""
    moved = "indexer.weights_proj.weight"
    move(runner, lambda name: moved in name, torch.Tensor.normal_)


def draft_norms(runner: Any) -> None:
    """As `stale_pointer`, for all norms of the draft's own layers."""
    own = {id(p) for p in runner.model.parameters()}
    draft = runner.speculator.model
    move(
        runner,
        lambda name: "norm" in name,
        torch.Tensor.normal_,
        [(name, p) for name, p in draft.named_parameters() if id(p) not in own],
    )


def move(
    runner: Any,
    chosen: Callable[[str], bool],
    spoil: Callable[[torch.Tensor], Any],
    among: list[tuple[str, torch.Tensor]] | None = None,
) -> None:
    """Give the chosen parameters, the model's unless told, other memory after the
    capture, and spoil the old."""
    parameters = among or list(runner.model.named_parameters())
    found = [p for name, p in parameters if chosen(name)]
    assert found, "the model has no such parameter"
    for parameter in found:
        old = parameter.data
        parameter.data = old.clone()
        spoil(old)


FAULTS: dict[str, Callable[[Any], None]] = {
    "stale pointer": stale_pointer,
    "host value": host_value,
    "moved workspace": moved_workspace,
    "compressor's positions": compressor_position,
    "query norm": query_norm,
    "indexer's weights": indexer_weights,
    "draft's norms": draft_norms,
}


def norm_of(runner: Any, layer: int) -> Any:
    """The weight of the norm before a layer's attention."""
    for name, parameter in runner.model.named_parameters():
        if f"layers.{layer}." in name and name.endswith("attn_norm.weight"):
            return parameter
    raise KeyError(f"layer {layer} has no attn_norm.weight")


def scale_by_host(runner: Any) -> None:
    """Let a layer's experts multiply by a number of the host, which is 1."""
    runner.planted = [1.0]
    experts = runner.model.model.layers[LAYER].ffn
    forward = experts.forward

    def scaled(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs) * runner.planted[0]

    experts.forward = scaled


def plant(fault: str, said: list[str], seconds: list[float]) -> None:
    """Plant a fault between the capture and the check; keep what the check says, and
    the time that it takes."""
    import vllm_xpu_dsv4.worker as plugin

    from standins.emulated_xpu.on_cuda import worker

    check = plugin.check_captured_graphs
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore

    def planted(runner: Any) -> None:
        if fault:
            FAULTS[fault](runner)
        # Not before: vLLM's own configuration of logging drops it.
        logging.getLogger(CHECK).addHandler(handler)
        started = time.monotonic()
        try:
            check(runner)
        finally:
            seconds.append(time.monotonic() - started)

    plugin.check_captured_graphs = planted
    if FAULTS.get(fault) is not host_value:
        return
    for runner in (worker._Runner, worker._RunnerV2):
        load = runner.load_model

        def loaded(self: Any, *args: Any, load: Any = load, **kwargs: Any) -> None:
            load(self, *args, **kwargs)
            scale_by_host(self)

        runner.load_model = loaded


def answers(llm: Any, asked: list[dict[str, Any]]) -> list[list[int]]:
    """The new tokens of each prompt that is asked."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": p["tokens"]} for p in asked]
    params = [
        SamplingParams(temperature=0, max_tokens=p["new"], ignore_eos=True)
        for p in asked
    ]
    outputs = llm.generate(prompts, params)
    return [list(o.outputs[0].token_ids) for o in outputs]


def main() -> None:
    """Serve one order."""
    order = json.loads(Path(sys.argv[1]).read_text())
    os.environ.update(order.get("environment", {}))
    said: list[str] = []
    seconds: list[float] = []
    from vllm import LLM

    if "load_format" in order["engine"]:
        importlib.import_module("lab.benchmarks.xpu_path.flash").write_config(
            Path(order["folder"]),
            json.loads((Path(order["model"]) / "config.json").read_text()),
            {},
        )
        order["model"] = order["folder"]
    plant(order["fault"], said, seconds)
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    tokens: list[list[int]] = []
    error = ""
    try:
        llm = LLM(model=order["model"], **ENGINE | order["engine"])
    except RuntimeError as raised:
        error = str(raised)
    else:
        tokens = answers(llm, order["waves"][0])
    result = {"fault": order["fault"], "seconds": seconds, "tokens": tokens}
    result |= {"said": said, "error": error}
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1))
    print(json.dumps(result))
    words = " ".join([*said, error])
    missing = [word for word in order["expected"] if word not in words]
    if order.get("tokens") and tokens != order["tokens"]:
        missing.append(f"the tokens {order['tokens']}")
    if missing:
        sys.exit(f"{order['fault'] or 'healthy'}: the check did not say {missing}")


if __name__ == "__main__":
    main()
