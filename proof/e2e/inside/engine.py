# SPDX-License-Identifier: Apache-2.0
"""`python -m proof.e2e.inside.engine JOB RESULT` serves one job.

JOB names the checkpoint, the arguments of `LLM`, and waves of prompts, and may say how
many waves are written down, and whether decode splits keys. Each wave is one call of
`LLM.generate`, or the engine's own steps where a request is aborted. RESULT holds the
tokens, their log-probabilities, and what the worker wrote down.
`E2E_HOME` names the module that chooses the emulated XPU's home; by default the CPU.
"""

import copy
import importlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from proof.e2e.pictures import Picture

HOME = "standins.emulated_xpu.pytest_plugin"
OPS = "proof.e2e.inside.engine_ops"
DEVICE = "vllm.model_executor.kernels.xpu_dsv4._device"
HASH = "mm_hasher_algorithm"
importlib.import_module(os.environ.get("E2E_HOME", HOME))
if "E2E_HOME" not in os.environ:
    importlib.import_module(OPS)

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "block_size": 256,
    "kv_cache_dtype": "fp8",
    "kv_cache_memory_bytes": 16 << 20,
    "enable_prefix_caching": False,
    "worker_cls": "proof.e2e.inside.recording.RecordingWorker",
    "seed": 0,
}
"""What every job takes unless it says otherwise."""


def split_no_keys() -> None:
    """Divide decode as on a device that is full with one program for each tile of
    heads."""
    device: Any = importlib.import_module(DEVICE)
    device.XE_CORES = 0


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Serve the job's waves; tokens by wave and prompt, and the worker's records."""
    started = time.perf_counter()
    import torch

    llm = start(job)
    ready = time.perf_counter()
    drafting = "speculative_config" in job.get("engine", {})
    waves = []
    for number, wave in enumerate(job["waves"]):
        if number == job.get("recorded_waves"):
            llm.collective_rpc("stop_recording")
        waves.append(serve(llm, wave))
    served = time.perf_counter()
    ranks = [
        torch.load(io.BytesIO(recorded), weights_only=False)
        for recorded in llm.collective_rpc("recorded")
    ]
    return {
        **ranks[0],
        "ranks": ranks,
        "read": [[list(output.prompt_token_ids) for output in wave] for wave in waves],
        "tokens": tokens_of(waves),
        "logprobs": [[logprobs_of(output) for output in wave] for wave in waves],
        "drafts": drafts_of(llm) if drafting else {},
        "refusals": [refusal(llm, prompt) for prompt in job.get("refused", ())],
        "tokens_after_refusals": tokens_of([serve(llm, job["waves"][0][:1])])
        if job.get("refused")
        else [],
        "seconds_to_ready": ready - started,
        "seconds_to_serve": served - ready,
        "cpu_seconds": sum({**dict(r["process"] for r in ranks), **own()}.values()),
    }


def start(job: dict[str, Any]) -> Any:
    """The job's `LLM`."""
    from proof.e2e.inside import recording

    recording.broken = bool(job.get("sabotage"))
    recording.overwritten = bool(job.get("overwrites"))
    recording.counting = bool(job.get("counting"))
    os.environ.update(job.get("environment", {}))
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    if engine_ops := sys.modules.get(OPS):
        engine_ops.provide()
    # A model's class is looked at here, not in a process that imports vLLM anew.
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    if not job.get("splits_keys", True):
        split_no_keys()
    given = {**ENGINE, **job.get("engine", {})}
    if hasattr(EngineArgs, HASH):
        # Images are hashed; the default needs a package that nothing else here does.
        given.setdefault(HASH, "sha256")
    # Drafts are counted by the statistics alone.
    drafting = "speculative_config" in given
    return LLM(model=job["model"], **given | {"disable_log_stats": not drafting})


def own() -> dict[int, float]:
    """This process and its CPU time in seconds."""
    return {os.getpid(): time.process_time()}


def tokens_of(waves: list[list[Any]]) -> list[list[list[int]]]:
    return [[list(output.outputs[0].token_ids) for output in wave] for wave in waves]


def asked(prompt: dict[str, Any]) -> dict[str, Any]:
    """The prompt as vLLM takes it."""
    given = {"prompt_token_ids": prompt["tokens"]}
    pictures = [Picture(**drawn).image() for drawn in prompt.get("images", ())]
    return given | ({"multi_modal_data": {"image": pictures}} if pictures else {})


def serve(llm: Any, wave: list[dict[str, Any]]) -> list[Any]:
    """The `RequestOutput` of each prompt of a wave."""
    if any("abort_after" in prompt for prompt in wave):
        return serve_and_abort(llm, wave)
    outputs: list[Any] = llm.generate(
        [asked(prompt) for prompt in wave],
        [sampling(prompt) for prompt in wave],
        use_tqdm=False,
        priority=[prompt.get("priority", 0) for prompt in wave],
    )
    return outputs


def serve_and_abort(llm: Any, wave: list[dict[str, Any]]) -> list[Any]:
    """As `serve`; a prompt with `abort_after` is aborted once it has that many tokens,
    and its text ends there."""
    engine, texts = llm.llm_engine, {}
    names = [str(next(llm.request_counter)) for _ in wave]
    for name, prompt in zip(names, wave, strict=True):
        engine.add_request(name, asked(prompt), sampling(prompt))
    limits = {
        name: prompt["abort_after"]
        for name, prompt in zip(names, wave, strict=True)
        if "abort_after" in prompt
    }
    while engine.has_unfinished_requests():
        for output in engine.step():
            name = output.request_id
            texts[name] = output
            read = output.outputs[0].token_ids
            if len(read) >= limits.get(name, sys.maxsize):
                texts[name] = copy.deepcopy(texts[name])
                del limits[name]
                engine.abort_request([name])
    return [texts[name] for name in names]


def sampling(prompt: dict[str, Any]) -> Any:
    """Greedy, unless the prompt says otherwise."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(prompt.get("sampling", {}))
    if "regex" in given:
        rule = StructuredOutputsParams(regex=given.pop("regex"))
        given["structured_outputs"] = rule
    greedy = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**greedy | given, max_tokens=prompt["new"])


def logprobs_of(output: Any) -> list[dict[int, tuple[float, int]]]:
    """For each token, log-probability and rank by token."""
    return [
        {token: (found.logprob, found.rank) for token, found in place.items()}
        for place in output.outputs[0].logprobs or ()
    ]


def drafts_of(llm: Any) -> dict[str, int]:
    """How many tokens were drafted, and how many of them accepted."""
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = {"drafted": "draft", "accepted": "accepted"}
    return {
        name: counts[f"vllm:spec_decode_num_{part}_tokens"]
        for name, part in names.items()
    }


def refusal(llm: Any, prompt: dict[str, Any]) -> str:
    """What the engine says to a request that it must refuse."""
    try:
        serve(llm, [prompt])
    except Exception as error:
        return str(error)
    raise AssertionError(f"a prompt of {len(prompt['tokens'])} tokens was served")


if __name__ == "__main__":
    import torch

    job = json.loads(Path(sys.argv[1]).read_text())
    torch.save(generate(job), sys.argv[2])
