# SPDX-License-Identifier: Apache-2.0
"""`engine JOB FILE`: serve a job with vLLM; tokens, log probabilities, seconds.

JOB has the model, the engine's arguments and waves of prompts, in tokens or as text.
Each wave is one call of `LLM.generate`, greedy, and gives its answers, its seconds,
what is not finite, and where experts lie in host memory, what their cache counted.
"""

import dataclasses
import itertools
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_batched_tokens": 512,
    "max_num_seqs": 32,
    "block_size": 256,
    "kv_cache_dtype": "fp8",
    "kv_cache_memory_bytes": 64 << 20,
    "enable_prefix_caching": False,
    "seed": 0,
}

EXPERT_CACHE = "vllm:expert_cache_"


def serve(job: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if not current_platform.is_xpu():
        kind = current_platform.device_type
        raise SystemExit(f"vLLM takes this for a {kind} machine, not for an XPU")
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if lacks := sorted(job["engine"].keys() - known):
        return {"lacks": lacks}
    counts = "moe_expert_cache_size" in job["engine"]
    arguments = {**ENGINE, "disable_log_stats": not counts, **job["engine"]}
    llm = LLM(model=job["model"], **arguments)
    ready = time.perf_counter()
    waves, strange, seconds = [], 0, []
    caches = [expert_cache(llm)] if counts else []
    for number, wave in enumerate(job["waves"], 1):
        begin_of_wave = time.perf_counter()
        outputs = llm.generate(
            [
                prompt["text"]
                if "text" in prompt
                else {"prompt_token_ids": prompt["tokens"]}
                for prompt in wave
            ],
            [
                SamplingParams(
                    temperature=0.0,
                    max_tokens=prompt["new"],
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=1,
                )
                for prompt in wave
            ],
            use_tqdm=False,
        )
        seconds.append(time.perf_counter() - begin_of_wave)
        if counts:
            caches.append(expert_cache(llm))
        answers = [output.outputs[0] for output in outputs]
        waves.append([list(answer.token_ids) for answer in answers])
        strange += sum(
            not all(math.isfinite(p.logprob) for p in place.values())
            for answer in answers
            for place in answer.logprobs or ()
        )
        print(f"wave {number} of {len(job['waves'])} served", flush=True)
    return {
        "waves": waves,
        "seconds": seconds,
        "expert_cache": [
            {name: new[name] - old.get(name, 0) for name in new}
            for old, new in itertools.pairwise(caches)
        ],
        "not_finite": strange,
        "seconds_to_ready": ready - begin,
        "seconds_to_serve": time.perf_counter() - ready,
    }


def expert_cache(llm: Any) -> dict[str, int]:
    """What the cache of experts in host memory has counted: experts that steps needed
    (`queries`), those that had a slot (`hits`), and bytes of the others."""
    return {
        metric.name.removeprefix(EXPERT_CACHE): metric.value
        for metric in llm.get_metrics()
        if metric.name.startswith(EXPERT_CACHE)
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(serve(json.loads(Path(sys.argv[1]).read_text())))
    )
