# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.bench JOB RESULT.json`: times a model with Flash's
attention inside an installed vLLM, on the GPU.

Each case runs twice: in captured graphs, whose replays are timed, and in eager mode,
where attention is checked against float64 and kernels are timed by part. A job may ask
for one of the modes alone.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

importlib.import_module(os.environ["E2E_HOME"])

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "block_size": 256,
    "kv_cache_dtype": "fp8",
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "worker_cls": "lab.benchmarks.xpu_path.worker.TimedWorker",
    "kv_transfer_config": {
        "kv_connector": "FilledPages",
        "kv_connector_module_path": "lab.benchmarks.xpu_path.connector",
        "kv_role": "kv_both",
    },
    "seed": 0,
}


def run(job: dict[str, Any], result: Path) -> None:
    """Run the cases; the file is written anew after each, so a stopped run keeps what
    it has."""
    begin = time.perf_counter()
    import torch
    import triton
    from vllm import LLM, SamplingParams

    from lab.benchmarks.xpu_path import flash

    tiny = json.loads((Path(job["model"]) / "config.json").read_text())
    model = flash.write_config(Path(job["folder"]), tiny, job["sizes"])
    engine = {**ENGINE, **job["engine"], "load_format": flash.FORMAT}
    llm = LLM(model=str(model), **engine)
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "ratios": list(flash.RATIOS),
        "seconds_to_ready": time.perf_counter() - begin,
        "cases": [],
    }
    text = [2 + i * 7919 % 2000 for i in range(1 << 17)]

    def generate(batch: int, length: int, new: int) -> list[list[int]]:
        prompts = [
            {"prompt_token_ids": text[i * 31 : i * 31 + length]} for i in range(batch)
        ]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    for kind, batch, length in job["cases"]:
        decodes = kind == "decode"
        started = time.perf_counter()
        case: dict[str, Any] = {"kind": kind, "batch": batch, "tokens": length}
        for mode in job["modes"]:
            new = 4 if mode == "eager" else job["steps"]
            if not decodes:
                # A prompt is one step; the first compiles, the third is profiled.
                new = 1
            given = (mode == "eager", decodes, batch, length)
            llm.collective_rpc("begin_case", args=given)
            for _ in range(1 if decodes else 3 if mode == "eager" else 5):
                answers = generate(batch, length, new)
            (case[mode],) = llm.collective_rpc("end_case")
            case[mode]["tokens"] = [answer[:4] for answer in answers]
        case["seconds"] = time.perf_counter() - started
        print(kind, batch, length, case["eager"]["errors"], flush=True)
        found["cases"].append(case)
        result.write_text(json.dumps(found))


if __name__ == "__main__":
    run(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
