# SPDX-License-Identifier: Apache-2.0
"""`python -m proof.e2e.inside.other_engine ORDER RESULT` serves other
models than DeepSeek-V4, each in a process that this one forks.

ORDER holds what `other_models.Model.order` gives of each. RESULT holds, by kind, what
it gave, or the error that ended it.
"""

import importlib
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

emulation: Any = importlib.import_module("standins.emulated_xpu.pytest_plugin")
engine_ops: Any = importlib.import_module("proof.e2e.inside.engine_ops")
other_ops: Any = importlib.import_module("proof.e2e.inside.other_ops")
pictures: Any = importlib.import_module("proof.e2e.pictures")

ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
    "enable_prefix_caching": False,
    "disable_log_stats": True,
    "seed": 0,
}
GRAPHS = {
    "worker_cls": "proof.e2e.inside.rerun.RerunWorker",
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4],
    },
}
"""Of a model that decodes."""
NEW = 6
HASH = "mm_hasher_algorithm"
"""The default of newer releases needs a package that nothing else here does."""


def serve(model: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, ask each prompt at once in eager mode, capture graphs as a start
    does, and ask again: tokens and log-probabilities by prompt."""
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.lora.request import LoRARequest

    captures = {"enforce_eager": True} if model["pooling"] else GRAPHS
    given = ENGINE | captures | model["engine"]
    if hasattr(EngineArgs, HASH):
        given |= {HASH: "sha256"}
    llm = LLM(model=model["folder"], **given)
    prompts: list[Any] = [{"prompt_token_ids": tokens} for tokens in model["prompts"]]
    if model["image"]:
        image = pictures.Picture(0, 4, 4, seed=1).image()
        prompts[0]["multi_modal_data"] = {"image": image.resize((28, 28))}
    if model["pooling"]:
        outputs = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
        return {"embeddings": [o.outputs.data.tolist() for o in outputs]}
    adapter = LoRARequest("adapter", 1, model["adapter"]) if model["adapter"] else None
    chosen = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)

    def answers() -> list[Any]:
        asked = (
            llm.generate(prompts, chosen, use_tqdm=False, lora_request=request)
            for request in dict.fromkeys((None, adapter))
        )
        return [
            [
                (t, found.logprob)
                for place in text.logprobs
                for t, found in place.items()
            ]
            for outputs in asked
            for text in (output.outputs[0] for output in outputs)
        ]

    eager = answers()
    (graphs,) = llm.collective_rpc("capture")
    return {"eager": eager, "graphs": graphs, "by graphs": answers()}


def main() -> None:
    """Serve the order, one model after the other."""
    order = json.loads(Path(sys.argv[1]).read_text())
    importlib.import_module("vllm.entrypoints.llm")
    emulation.prepare()
    engine_ops.provide()
    other_ops.provide()
    importlib.import_module("proof.e2e.inside.rerun").provide()
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    found = {}
    for model in order:
        answer = Path(sys.argv[2]).with_suffix(".part")
        answer.unlink(missing_ok=True)
        if not (process := os.fork()):
            os.environ.update(model["environment"])
            try:
                answer.write_text(json.dumps(serve(model)))
            except BaseException as error:
                traceback.print_exc()
                answer.write_text(json.dumps({"stopped": repr(error)}))
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(0)
        os.waitpid(process, 0)
        # A model that ends its process writes nothing.
        written = answer.read_text() if answer.is_file() else ""
        found[model["kind"]] = json.loads(written or '{"stopped": "the process ended"}')
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
