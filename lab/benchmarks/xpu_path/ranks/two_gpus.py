# SPDX-License-Identifier: Apache-2.0
"""What is asked of engines over two GPUs of one machine, and beside them on one."""

import json
from dataclasses import replace
from typing import Any

from ..jobs import (
    ANSWERS,
    DECODE_GRAPHS,
    DRAFTS,
    FLASH,
    GRAPHS,
    IMAGE,
    MIXED,
    OFF,
    REPEATED,
    SAME,
    THREE_IMAGES,
    TWO_DRAFTS,
    V41,
    V41_MIXED,
    VISION,
    VOCABULARY,
    WITHOUT,
    Job,
    seen,
    soak,
    written,
)

SIXTEEN = {
    "compilation_config": {
        **GRAPHS["compilation_config"],
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
    }
}
WORKER = "standins.emulated_xpu.on_cuda.worker.XpuPathOnCudaWorker"
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
"""Two GPUs of one machine."""
SERVED: dict[str, Any] = {
    "vocabulary": 1000,
    "longest": 300,
    "different": 40,
    "requests": 200,
    "concurrency": 16,
    "rounds": 2,
    "flags": [
        *("--served-model-name", "tiny", "--tensor-parallel-size", "2"),
        *("--kv-cache-dtype", "fp8", "--block-size", "256"),
        *("--max-num-seqs", "16", "--max-num-batched-tokens", "512"),
        *("--kv-cache-memory-bytes", str(1 << 30)),
        *("--compilation-config", json.dumps(SIXTEEN["compilation_config"])),
    ],
}


LEADS = 6
"""Log-probabilities of each token that are kept, so that a lead is on record."""
SHARED = {"attention_config": {"indexer_tp_shard_min_rows": 2}}
"""Ranks share the indexer's rows of prefill from two on."""
TRITON = {"moe_backend": "triton"}
"""Experts of step `experts`."""
WHOLE = {"enable_expert_parallel": True}
CACHED = {"moe_expert_cache_size": 4}
"""As many slots as a token has experts, of eight."""
KNOWN = "one-v41"
"""The job whose texts a draft knows: it runs before."""


def on_second_rank(
    name: str,
    fault: str,
    *expected: str,
    engine: dict[str, Any] = DECODE_GRAPHS,
    **told: Any,
) -> Job:
    """Two ranks, of which the second has a fault in its graphs; what both must say."""
    worker = "lab.benchmarks.xpu_path.ranks.graph_check_ranks.SecondRankWorker"
    return Job(
        f"two-graph-check-{name}",
        program="lab.benchmarks.xpu_path.ranks.graph_check_ranks",
        engine={**TWO, **engine, "worker_cls": worker},
        told={"fault": fault, "expected": expected, "tokens": ANSWERS, **told},
        suffix="json",
        limit=240.0,
    )


def with_drafts(name: str, fault: str, *expected: str) -> list[Job]:
    """The same with drafts, whose graphs have the fault: DSpark's, and MTP's."""
    job = on_second_rank(
        name,
        fault,
        *expected,
        engine=V41 | DRAFTS | DECODE_GRAPHS,
        checkpoint="v4.1 with drafts",
        known=KNOWN,
        tokens=None,
    )
    engine = DECODE_GRAPHS | TWO_DRAFTS
    mtp = on_second_rank(f"mtp-{name}", fault, *expected, engine=engine, tokens=None)
    return [replace(job, waves=(V41_MIXED,)), mtp]


def asked(length: int, chunk: int = 700, **more: Any) -> dict[str, Any]:
    """A prompt as `proof.e2e.running.asked.Asked` has it."""
    return {"length": length, "chunk": chunk, **more}


LENGTHS = [
    asked(20, answered=True),
    asked(191, 100, answered=True),
    asked(255, 33, answered=True),
    asked(600, 100),
    asked(319, 128, answered=True, receiver_knows=256),
    asked(600, 700),
]
"""Lengths beside the ends of blocks and windows, read in chunks, and a beginning that
the receiver has in its prefix cache."""
MTP = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 1}}
KILLED = [asked(20, answered=True), asked(600, 100, answered=True), asked(20)]


def transfer(
    name: str,
    buffers: str,
    prompts: list[dict[str, Any]],
    engine: dict[str, Any] | None = None,
    bound: float = 0.01,
    **told: Any,
) -> Job:
    """One engine that reads prompts and one that answers them, over NIXL, whose
    log-probabilities may lie `bound` apart."""
    policy = told.pop("policy", "fail")
    return Job(
        f"two-transfer-{name}",
        program="lab.benchmarks.xpu_path.ranks.transfers",
        told={
            "engine": {
                "worker_cls": WORKER,
                **(engine or {}),
            },
            "transfer": {"kv_buffer_device": buffers, "kv_load_failure_policy": policy},
            "asked": prompts,
            "bound": bound,
            **told,
        },
        suffix="json",
        limit=240.0,
    )


def transfers(buffers: str) -> list[Job]:
    """All that is asked of one kind of buffers."""
    name = {"cuda": "device", "cpu": "host"}[buffers]
    # What follows is the same for both buffers, so each policy has each moment once.
    killed = {"fail": "within", "recompute": "before"}
    if name == "host":
        killed = {"fail": "before", "recompute": "within"}
    return [
        transfer(name, buffers, LENGTHS),
        # A receiver's first step is padded to the number of drafts.
        transfer(f"{name}-mtp", buffers, [*LENGTHS[:3], asked(319)], MTP, 0.2),
        transfer(f"{name}-graphs", buffers, LENGTHS[:3], DECODE_GRAPHS, 0.2),
        *(
            transfer(f"{name}-tp-{p}-{d}", buffers, LENGTHS, bound=0.2, ranks=(p, d))
            for p, d in ((2, 2), (1, 2), (2, 1))
        ),
        *(
            transfer(
                f"{name}-killed-{policy}", buffers, KILLED, killed=when, policy=policy
            )
            for policy, when in killed.items()
        ),
    ]


TIMED = {
    **FLASH,
    **TWO,
    **TRITON,
    "max_model_len": 1 << 15,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 4 << 30,
    "compilation_config": {
        **FLASH["compilation_config"],
        "cudagraph_capture_sizes": [1, 8],
    },
}
SHORT = TIMED | {"max_model_len": 4096, "max_num_batched_tokens": 512}
EXPERTS = {
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "n_routed_experts": 32,
    "num_experts_per_tok": 6,
}
"""Experts of Flash's sizes, fewer of them."""


def timed(name: str, engine: dict[str, Any], told: dict[str, Any]) -> Job:
    """Seconds of prompts and of tokens, of Flash's sizes."""
    engine = {key: value for key, value in engine.items() if value is not None}
    return Job(
        f"two-timed-{name}",
        program="lab.benchmarks.xpu_path.ranks.rank_times",
        engine=engine,
        environment=OFF,
        told=told,
        suffix="json",
        limit=300.0,
    )


DECODED = {
    "sizes": EXPERTS,
    "cases": [{"batch": batch, "length": 16, "new": 132} for batch in (1, 8)],
}
PROMPTS = {
    "sizes": {},
    "cases": [{"batch": 1, "length": 1 << power, "new": 1} for power in (13, 14)],
}
V41_PROMPTS = {
    "checkpoint": "v4.1",
    "sizes": {},
    "cases": [
        {"batch": 1, "length": 1 << power, "new": 1, "tokens": VOCABULARY - 2}
        for power in (14, 16)
    ],
}
V41_TIMED = {
    **TIMED,
    **V41,
    "max_model_len": (1 << 16) + 64,
    "kv_cache_memory_bytes": 16 << 30,
}
SLOTS = {"moe_expert_cache_size": 8, "moe_backend": None}
UVA = {"cpu_offload_gb": 100, "cpu_offload_params": ["experts"]}


def on_both(
    name: str, engine: dict[str, Any], *more: tuple[str, dict[str, Any]]
) -> list[Job]:
    """The mixed prompts on one GPU, and on both for each of `more`."""
    return [
        Job(f"one-{name}", engine={**engine}, logprobs=LEADS),
        *(
            Job(f"two-{name}{suffix}", engine={**TWO, **engine, **own}, logprobs=LEADS)
            for suffix, own in more
        ),
    ]


def written_on_both(
    name: str,
    told: dict[str, Any],
    engine: dict[str, Any],
    *more: tuple[str, dict[str, Any]],
) -> list[Job]:
    """The same with a checkpoint that is written there."""
    jobs = [written(f"one-{name}", told, engine)]
    jobs += [
        written(f"two-{name}{suffix}", told, TWO | engine | own) for suffix, own in more
    ]
    return [replace(job, logprobs=LEADS) for job in jobs]


EACH_MODE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("-eager", {}),
    ("-graphs", GRAPHS),
)
TWO_JOBS = {
    job.name: job
    for job in (
        Job(
            "two-sums",
            program="lab.benchmarks.xpu_path.ranks.rank_sums",
            suffix="json",
            limit=120.0,
        ),
        Job("two-eager", engine=TWO, waves=(MIXED, soak())),
        Job("two-graphs", engine={**TWO, **GRAPHS}, waves=REPEATED),
        *on_both("mixed", {}, ("-rows", SHARED)),
        *written_on_both(
            "v41", {"checkpoint": "v4.1"}, V41, *EACH_MODE, ("-rows", SHARED)
        ),
        *written_on_both(
            "v41-drafts",
            {"checkpoint": "v4.1 with drafts", "known": KNOWN},
            V41 | DRAFTS,
            *EACH_MODE,
        ),
        *written_on_both(
            "vision",
            {"checkpoint": "vision", **seen(IMAGE)},
            VISION | THREE_IMAGES,
            *EACH_MODE,
        ),
        *on_both(
            "experts",
            TRITON,
            ("", {}),
            ("-whole", WHOLE),
            ("-graphs", GRAPHS),
            ("-whole-graphs", WHOLE | GRAPHS),
        ),
        *on_both("experts-cached", CACHED, ("", {}), ("-graphs", GRAPHS)),
        on_second_rank("healthy", "", SAME),
        on_second_rank("pointer", "stale pointer", WITHOUT),
        on_second_rank("query-norm", "query norm", WITHOUT),
        *with_drafts("drafts-healthy", "", SAME),
        *with_drafts("drafts", "draft's norms", WITHOUT),
        *transfers("cuda"),
        *transfers("cpu"),
        timed("rows", TIMED, PROMPTS),
        timed("rows-shared", TIMED | SHARED, PROMPTS),
        timed("v41-rows", V41_TIMED, V41_PROMPTS),
        timed("v41-rows-shared", V41_TIMED | SHARED, V41_PROMPTS),
        timed("experts", SHORT, DECODED),
        timed("experts-whole", SHORT | WHOLE, DECODED),
        timed("experts-cached", SHORT | SLOTS, DECODED),
        timed("experts-uva", SHORT | UVA, DECODED),
        timed("experts-whole-uva", SHORT | WHOLE | UVA, DECODED),
        Job(
            "two-served",
            program="lab.benchmarks.xpu_path.served",
            told=SERVED,
            suffix="json",
            limit=400.0,
        ),
    )
}
