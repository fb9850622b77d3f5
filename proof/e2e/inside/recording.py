# SPDX-License-Identifier: Apache-2.0
"""A worker that writes down what passes through the model, request by request.

Lives inside an installed vLLM. It changes nothing: hooks copy the inputs and outputs
of each attention and each feed-forward layer, and counters wrap the launches of
Triton kernels.
"""

import importlib
import io
import os
import re
import time
from collections import Counter, defaultdict
from typing import Any

import torch
from triton.runtime import interpreter as triton_interpreter
from vllm.config import set_current_vllm_config
from vllm.forward_context import get_forward_context

from proof.e2e.inside import blocks, sabotage
from proof.e2e.inside import launches as layer_launches
from standins import interpreter, interpreter_speed
from standins.emulated_xpu import registry
from standins.emulated_xpu.worker import EmulatedXpuWorker

SUBLAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(?:mtp_block\.)?(attn|ffn)$")
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"

records: list[dict[str, Any]] = []
"""One entry per sublayer and step: `layer`, `part`, `rows`, inputs and outputs."""
logits: list[dict[str, Any]] = []
encoded: list[dict[str, torch.Tensor]] = []
"""Of each image that the tower saw, its `patches`, and the `rows` made of them."""
loaded: dict[str, torch.Tensor] = {}
"""Parameters as the loader left them, before vLLM rearranges them."""
keep = records.append
"""What takes an entry. A graph's entries are taken elsewhere while it is captured."""
stopped = False
"""Whether nothing more is written down."""
idle = False
"""Whether the runner computes for no request."""
counting = False
"""Whether the launches of layers are noted, and nothing else."""
broken = False
"""Whether `sabotage.py` shall break the model's layers."""
overwritten = False
"""Whether it shall overwrite a row of a page."""
shared: list[list[int]] = []
"""How many of the indexer's rows each rank scored, whenever ranks shared them."""
layers: Counter[str] = Counter()
outputs: Counter[str] = Counter()
"""How often attention wrote a value of which type."""
launches: Counter[str] = Counter()
programs: Counter[str] = Counter()
seconds: dict[str, float] = defaultdict(float)


class Recording:
    """Loads the model and hooks into it: a part of a worker, whatever its device."""

    model_runner: Any
    keeps_parameters = True

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.keeps_parameters:
            keep_loaded_parameters()
        count_launches()
        note_shared_rows()
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner = self.model_runner
        if counting:
            layer_launches.watch(runner.model)
            return
        if broken:
            sabotage.break_layers(runner.model)
        if overwritten:
            sabotage.overwrite_row(runner.model.model.layers[1].attn)
        keep_batch(runner)
        notice_dummy_runs(runner)
        # V1's runner calls it a drafter, V2's a speculator.
        names = ("drafter", "speculator")
        drafter = next((d for n in names if (d := getattr(runner, n, None))), None)
        draft = getattr(drafter, "model", None)
        hook(runner, runner.model)
        # DSpark's layers see a block of queries in place of the batch's tokens.
        if draft is not None and not hasattr(draft, "markov_bias"):
            hook(runner, draft)
        elif draft is not None and "deepseek_v41" in type(draft).__module__:
            for layer in draft.model.layers:
                keep_core(layer.attn)
            blocks.record(draft, lambda: rows_for_a_draft(runner))
        record_logits(runner)
        if hasattr(runner.model, "_encode_image"):
            record_images(runner.model)

    def stop_recording(self) -> None:
        """Write down nothing more."""
        global stopped
        stopped = True

    def recorded(self) -> bytes:
        """Everything that this rank wrote down so far, as `torch.save` keeps it:
        vLLM's own messages cannot carry tensors of every dtype."""
        found = {
            "process": (os.getpid(), time.process_time()),
            "records": [on_the_host(record) for record in records],
            "logits": [on_the_host(entry) for entry in logits],
            "encoded": [on_the_host(entry) for entry in encoded],
            "shared": shared,
            "contexts": [on_the_host(entry) for entry in blocks.contexts],
            "blocks": [on_the_host(entry) for entry in blocks.blocks],
            "workspace": workspace_bytes(),
            "runner": vllm_class(self.model_runner),
            "loaded": on_the_host(loaded),
            "layers": dict(layers),
            "outputs": dict(outputs),
            "ops": dict(registry.calls),
            "launches": dict(launches),
            "layer_launches": layer_launches.found,
            "programs": dict(programs),
            "seconds": dict(seconds),
        }
        file = io.BytesIO()
        torch.save(found, file)
        return file.getvalue()


class RecordingWorker(Recording, EmulatedXpuWorker):
    """On the CPU, with kernels interpreted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Each rank of several is a fresh process, with Triton's own interpreter."""
        interpreter.repair()
        interpreter_speed.speed_up()
        super().__init__(*args, **kwargs)


class ToldMemoryWorker(RecordingWorker):
    """Profiles as the base class does, and says that a step leaves `E2E_MEMORY_LEFT`
    bytes: the emulated device has none."""

    def determine_available_memory(self) -> int:
        with set_current_vllm_config(self.vllm_config):
            self.model_runner.profile_run()
        return int(os.environ["E2E_MEMORY_LEFT"])


def workspace_bytes() -> int:
    """What vLLM's workspace of this rank has grown to."""
    from vllm.v1.worker.workspace import current_workspace_manager

    found = current_workspace_manager()._current_workspaces
    return max(0 if one is None else one.nbytes for one in found)


def on_the_host(record: dict[str, Any]) -> dict[str, Any]:
    """The record with its tensors on the CPU."""
    return {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in record.items()
    }


def keep_loaded_parameters() -> None:
    """Copy the parameters between loading and vLLM's own processing of them."""
    from vllm.model_executor.model_loader import base_loader

    process = base_loader.process_weights_after_loading

    def keep_and_process(model: torch.nn.Module, *args: Any) -> None:
        for name, parameter in model.named_parameters():
            loaded.setdefault(name, parameter.detach().clone())
        process(model, *args)

    base_loader.process_weights_after_loading = keep_and_process


def count_launches() -> None:
    """Count launches, programs and CPU seconds of each interpreted kernel."""
    run = triton_interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        start = time.process_time()
        result = run(self, *args, **kwargs)
        seconds[name] += time.process_time() - start
        launches[name] += 1
        grid = self.grid
        if callable(grid):
            bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
            grid = grid(bound)
        size = 1
        for extent in grid if isinstance(grid, tuple | list) else (grid,):
            size *= int(extent)
        programs[name] += size
        return result

    triton_interpreter.GridExecutor.__call__ = counted


def note_shared_rows() -> None:
    """Note each exchange of the entries that ranks chose for their rows of prefill, in
    releases where they can share these."""
    indexer: Any = importlib.import_module(INDEXER)
    if not hasattr(indexer, "PrefillRowShard"):
        return
    shard = indexer.PrefillRowShard
    exchange = shard.exchange_topk

    def noted(self: Any, *args: Any) -> None:
        shared.append(list(self.sizes))
        exchange(self, *args)

    shard.exchange_topk = noted


def hook(runner: Any, model: torch.nn.Module) -> None:
    for name, module in model.named_modules():
        if found := SUBLAYER.search(name):
            layer, part = int(found[1]), found[2]
            recorder = record_attention if part == "attn" else record_ffn
            if part == "attn":
                keep_core(module)
                record_keys(runner, layer, module)
            module.register_forward_hook(recorder(runner, layer), with_kwargs=True)


def vllm_class(thing: Any) -> str:
    """The name of the vLLM class that `thing` is of, or derived from."""
    kinds = [k for k in type(thing).__mro__ if k.__module__.startswith("vllm.")]
    return str(kinds[0].__name__)


def notice_dummy_runs(runner: Any) -> None:
    """Note while the runner computes for no request, as it does beside an engine that
    has some; it then has the batch of the step before."""
    run = runner._dummy_run

    def run_for_nobody(*args: Any, **kwargs: Any) -> Any:
        global idle
        idle = True
        try:
            return run(*args, **kwargs)
        finally:
            idle = False

    runner._dummy_run = run_for_nobody


def keep_batch(runner: Any) -> None:
    """Keep the batch of a step as `input_batch`, where vLLM's V1 runner has it; V2
    makes a new one for each step."""
    if hasattr(runner, "input_batch"):
        return
    prepare = runner.prepare_inputs

    def prepare_and_keep(*args: Any, **kwargs: Any) -> Any:
        runner.input_batch = prepare(*args, **kwargs)
        return runner.input_batch

    runner.prepare_inputs = prepare_and_keep


def requests_of_this_step(runner: Any) -> list[str]:
    batch = getattr(runner, "input_batch", None)
    return [] if batch is None else list(batch.req_ids[: batch.num_reqs])


def rows_of_this_step(runner: Any, tokens: int) -> list[tuple[str, int]] | None:
    """Each request's id and token count in batch order; None in a dummy run, and where
    a draft goes on from its own token, so that there are fewer `tokens`."""
    if idle or get_forward_context().attn_metadata is None:
        return None
    rows = rows_of_a_part(runner) or rows_of_the_batch(runner)
    return None if sum(count for _, count in rows) > tokens else rows


def rows_of_a_part(runner: Any) -> list[tuple[str, int]]:
    """The same in V4.1's later layers while these compute a part of the batch."""
    later = getattr(getattr(runner, "model_state", None), "decoder_replay_layers", None)
    part = getattr(later, "replay_batch", None)
    if part is None or get_forward_context() is not part.forward_context:
        return []
    requests = requests_of_this_step(runner)
    start = runner.input_batch.query_start_loc_np[: len(requests) + 1]
    owners = torch.bucketize(part.rows, torch.from_numpy(start).long(), right=True) - 1
    counts = torch.bincount(owners, minlength=len(requests))
    return list(zip(requests, counts.tolist(), strict=True))


def rows_for_a_draft(runner: Any) -> list[tuple[str, int]]:
    """The same of a draft that runs behind the model; none in a dummy run."""
    return [] if idle or stopped else rows_of_the_batch(runner)


def rows_of_the_batch(runner: Any) -> list[tuple[str, int]]:
    """Each request's id and token count in batch order; none before the first batch."""
    if hasattr(runner, "query_start_loc"):
        start = runner.query_start_loc.np
    elif hasattr(runner, "input_batch"):
        start = runner.input_batch.query_start_loc_np
    else:
        return []
    return [
        (request, int(start[i + 1] - start[i]))
        for i, request in enumerate(requests_of_this_step(runner))
    ]


def owner_of(name: str, module: Any) -> Any:
    """The layer, or the part of it in older releases, that has an attribute.

    Raises:
        AttributeError: no part has it.
    """
    for part in module.modules():
        if getattr(part, name, None) is not None:
            return part
    raise AttributeError(f"no part of {type(module).__name__} has {name}")


def attention_class(module: Any) -> str:
    """What computes the attention: the class that an older layer delegates to, or the
    innermost owner of the window's cache."""
    parts = list(module.modules())
    for part in parts:
        if hasattr(part, "impl_cls"):
            return str(part.impl_cls.__name__)
    return type([p for p in parts if hasattr(p, "swa_cache_layer")][-1]).__name__


def keep_core(module: Any) -> None:
    """Keep what the attention kernel gave, which goes into the output projection.

    Where attention writes the FP8 operands of that projection, it runs once more to
    bf16; the layer's output then shows whether the operands were right.
    """
    owner = owner_of("_o_proj", module)
    project: Any = owner._o_proj
    attend: Any = getattr(owner, "forward_mqa", None)

    def attend_and_keep(
        q: torch.Tensor, kv: torch.Tensor, positions: torch.Tensor, output: Any
    ) -> None:
        attend(q, kv, positions, output)
        if not isinstance(output, torch.Tensor):
            module.kept_core = torch.empty_like(q)
            attend(q, kv, positions, module.kept_core)

    def keep_and_project(o: Any, *args: Any, **kwargs: Any) -> Any:
        outputs[type(o).__name__] += 1
        if isinstance(o, torch.Tensor):
            module.kept_core = o.clone()
        return project(o, *args, **kwargs)

    owner._o_proj = keep_and_project
    if attend is not None:
        owner.forward_mqa = attend_and_keep


def record_attention(runner: Any, layer: int) -> Any:
    def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        given = dict(zip(("positions", "hidden_states"), args, strict=False)) | kwargs
        rows = rows_of_this_step(runner, len(given["positions"]))
        if rows is None or stopped:
            return
        ratio = owner_of("compress_ratio", module).compress_ratio
        layers[f"{attention_class(module)} ratio {ratio}"] += 1
        entry = {
            "layer": layer,
            "part": "attn",
            "ratio": ratio,
            "rows": rows,
            "positions": given["positions"].clone(),
            "input": given["hidden_states"].clone(),
            "core": module.kept_core,
            "output": output.clone(),
        }
        # In V4.1 layers of every ratio read a choice, most of them another layer's.
        if ratio == 4 or (ratio and hasattr(module, "index_source_layers")):
            buffer = owner_of("topk_indices_buffer", module).topk_indices_buffer
            entry["topk"] = buffer[: len(entry["positions"])].clone()
        source = getattr(module, "candidate_source_layer", -1)
        if 0 <= layer < source:
            module.candidate_block_buffer.fill_(blocks.NO_BLOCKS)
        elif source >= 0:
            buffer = module.candidate_block_buffer
            entry["blocks"] = buffer[: len(entry["positions"])].clone()
        keep(entry)

    return record


def record_keys(runner: Any, layer: int, module: Any) -> None:
    """Note the inputs of V4.1's last KV source, of which it writes all keys before it
    computes a part of the rows."""
    write: Any = getattr(module, "forward_kv", None)

    def write_and_record(positions: torch.Tensor, hidden_states: torch.Tensor) -> None:
        write(positions, hidden_states)
        rows = rows_of_this_step(runner, len(positions))
        if rows is not None and not stopped:
            inputs = {"positions": positions.clone(), "input": hidden_states.clone()}
            keep({"layer": layer, "part": "keys", "rows": rows, **inputs})

    if write is not None:
        module.forward_kv = write_and_record


def record_ffn(runner: Any, layer: int) -> Any:
    def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        rows = rows_of_this_step(runner, len(args[0]))
        if rows is None or stopped:
            return
        layers[type(module).__name__] += 1
        ids = args[1] if len(args) > 1 else kwargs.get("input_ids")
        keep(
            {
                "layer": layer,
                "part": "ffn",
                "rows": rows,
                "input": args[0].clone(),
                "ids": None if ids is None else ids.clone(),
                "output": output.clone(),
            }
        )

    return record


def record_images(model: Any) -> None:
    encode = model._encode_image

    def record(patches: torch.Tensor, *args: Any) -> torch.Tensor:
        rows: torch.Tensor = encode(patches, *args)
        encoded.append({"patches": patches.float(), "rows": rows.float()})
        return rows

    model._encode_image = record


def record_logits(runner: Any) -> None:
    compute = runner.model.compute_logits

    def record(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = compute(hidden_states, *args, **kwargs)
        if stopped:
            return result
        logits.append(
            {
                "requests": requests_of_this_step(runner),
                "values": result.float().clone(),
                "after": len(records),
            }
        )
        return result

    runner.model.compute_logits = record
