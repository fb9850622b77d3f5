# SPDX-License-Identifier: Apache-2.0
"""`engine JOB FILE`: serve a job with vLLM; tokens, log probabilities, seconds.

JOB has the model, the engine's arguments and waves of prompts. Each wave is one call of
`LLM.generate`, greedy, and gives its answers and what is not finite in them.
"""

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
    "disable_log_stats": True,
    "seed": 0,
}


def serve(job: dict[str, Any]) -> dict[str, Any]:
    begin = time.perf_counter()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    if not current_platform.is_xpu():
        kind = current_platform.device_type
        raise SystemExit(f"vLLM takes this for a {kind} machine, not for an XPU")
    llm = LLM(model=job["model"], **{**ENGINE, **job["engine"]})
    ready = time.perf_counter()
    waves, strange = [], 0
    for number, wave in enumerate(job["waves"], 1):
        outputs = llm.generate(
            [{"prompt_token_ids": prompt["tokens"]} for prompt in wave],
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
        "not_finite": strange,
        "seconds_to_ready": ready - begin,
        "seconds_to_serve": time.perf_counter() - ready,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(
        json.dumps(serve(json.loads(Path(sys.argv[1]).read_text())))
    )
