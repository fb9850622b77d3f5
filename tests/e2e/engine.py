# SPDX-License-Identifier: Apache-2.0
"""Run inside an installed vLLM: `python engine.py JOB.json RESULT.pt`.

JOB names the checkpoint, the arguments of `LLM`, and waves of prompts, and may say how
many waves are written down; each wave is one call of `LLM.generate`. RESULT holds the
tokens and what the worker wrote down.
`E2E_HOME` names the module that chooses the emulated XPU's home; by default the CPU.
"""

import importlib
import io
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

importlib.import_module(os.environ.get("E2E_HOME", "emulated_xpu.pytest_plugin"))

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
    "disable_log_stats": True,
    "worker_cls": "recording.RecordingWorker",
    "seed": 0,
}
"""What every job takes unless it says otherwise."""


def generate(job: dict[str, Any]) -> dict[str, Any]:
    """Serve the job's waves; tokens by wave and prompt, and the worker's records."""
    started = time.perf_counter()
    import recording
    import torch

    recording.broken = bool(job.get("sabotage"))
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], **{**ENGINE, **job.get("engine", {})})
    ready = time.perf_counter()
    tokens = []
    for number, wave in enumerate(job["waves"]):
        if number == job.get("recorded_waves"):
            llm.collective_rpc("stop_recording")
        outputs = llm.generate(
            [{"prompt_token_ids": prompt["tokens"]} for prompt in wave],
            [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=prompt["new"],
                    ignore_eos=True,
                    detokenize=False,
                )
                for prompt in wave
            ],
            use_tqdm=False,
        )
        tokens.append([list(output.outputs[0].token_ids) for output in outputs])
    served = time.perf_counter()
    ranks = [
        torch.load(io.BytesIO(recorded), weights_only=False)
        for recorded in llm.collective_rpc("recorded")
    ]
    return {
        **ranks[0],
        "ranks": ranks,
        "tokens": tokens,
        "seconds_to_ready": ready - started,
        "seconds_to_serve": served - ready,
    }


if __name__ == "__main__":
    import torch

    torch.save(generate(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
