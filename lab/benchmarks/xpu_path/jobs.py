# SPDX-License-Identifier: Apache-2.0
"""What is asked of the engines on the GPU."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VOCABULARY = 128
"""Of the tiny checkpoint of `e2e`."""
MIXED = ((129, 8, 1), (5, 6, 2), (1, 4, 3))
"""Length, new tokens and seed of the prompts of `tests/proof/e2e/test_engine.py`."""
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8],
    },
}
PLAIN = {"worker_cls": "auto"}
SANITIZED = (
    "_decode_kernel",
    "_merge_kernel",
    "_prefill_kernel",
    "_fused_kv_compress_norm_rope_insert",
    "_compress_insert_kernel",
    "_compute_swa_indices_and_lens",
)
"""Names of the kernels that compute-sanitizer looks at: of all it would take hours."""
FLASH: dict[str, Any] = {
    **PLAIN,
    "max_model_len": (1 << 16) + 64,
    "max_num_batched_tokens": 8192,
    "max_num_seqs": 128,
    "kv_cache_memory_bytes": 118 << 30,
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 16, 64, 128],
    },
}
LONG = 12_288
"""The longest context, and the most tokens of a step, of one long prompt."""
RECORDING = "proof.e2e.inside.recording_on_cuda.RecordingOnCudaWorker"
V41_MIXED = ((161, 8, 1), (5, 6, 2), (1, 4, 3))
"""Length, new tokens and seed of the prompts, also of `tests/proof/e2e/test_v41.py`."""
V41 = {
    "skip_tokenizer_init": False,
    "limit_mm_per_prompt": {"image": 0},
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 128,
}
"""`proof.e2e.checkpoints.v41.SERVER`, whose module needs what is not here."""
Drawn = tuple[int, int, int, int]
"""An image: its place, patches down and along, and seed."""
SEEN: tuple[tuple[tuple[int, int, int, tuple[Drawn, ...]], ...], ...] = (
    (
        (12, 4, 12, ((5, 30, 39, 1),)),
        (9, 4, 22, ((2, 7, 10, 2), (3, 4, 4, 3), (7, 9, 20, 4))),
        (5, 4, 31, ()),
    ),
    ((150, 3, 13, ((120, 30, 39, 5),)),),
)
"""Length, new tokens, seed and images of prompts, which have the images of
`tests/proof/e2e/test_vision.py`. Seeds are such that V4.1's twin is sure of the first
two tokens of each. The first image has more tokens than the window; of the second wave,
a text around such an image, tokens alone are kept."""
VISION = {
    "skip_tokenizer_init": False,
    "max_num_batched_tokens": 176,
    "kv_cache_memory_bytes": 64 << 20,
}
"""`proof.e2e.checkpoints.vision.ENGINE`."""
IMAGE, V41_IMAGE = 129_200, 129_264
"""The tokens that stand for an image in prompts of V4 Vision and of V4.1."""
THREE_IMAGES = {"limit_mm_per_prompt": {"image": 3}}
DRAFTS = {"speculative_config": {"method": "dspark", "num_speculative_tokens": 3}}
TWO_DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}}
"""V4's, the second by a graph of its own."""


@dataclass(frozen=True)
class Job:
    """One process: a program, the tree that it runs in, and what it is told."""

    name: str
    patched: bool = True
    program: str = "proof.e2e.inside.engine"
    engine: dict[str, Any] = field(default_factory=dict)
    waves: tuple[tuple[tuple[int, int, int], ...], ...] = (MIXED,)
    environment: tuple[tuple[str, str], ...] = ()
    told: dict[str, Any] = field(default_factory=dict)
    suffix: str = "pt"
    limit: float = 200.0
    wrapped_by: tuple[str, ...] = ()
    logprobs: int = 0
    """How many of each token are kept."""

    def order(self, work: Path) -> dict[str, Any]:
        """What the program reads."""
        engine = {"worker_cls": RECORDING, "async_scheduling": True, **self.engine}
        if engine["worker_cls"] == "auto":
            engine.pop("worker_cls")
        waves = [
            [{"tokens": tokens(length, seed), "new": new} for length, new, seed in wave]
            for wave in self.waves
        ]
        model = str(work / "checkpoint")
        order: dict[str, Any] = {
            "model": model,
            "engine": engine,
            "waves": waves,
            "recorded_waves": 1,
        }
        order |= self.told
        if self.logprobs:
            kept = {"sampling": {"logprobs": self.logprobs}}
            order["waves"] = [[p | kept for p in wave] for wave in order["waves"]]
        return order


def tokens(length: int, seed: int, others: Mapping[int, int] = {}) -> list[int]:
    """Random tokens, those of `e2e` for the same seed, and `others` at their places."""
    own = random.Random(seed)
    drawn = [own.randrange(2, VOCABULARY) for _ in range(length)]
    return [others.get(place, token) for place, token in enumerate(drawn)]


def soak() -> tuple[tuple[int, int, int], ...]:
    """Requests of mixed lengths: more than run at once, so that prompts arrive while
    others decode."""
    own = random.Random(0)
    return tuple(
        (own.choice((1, 7, 63, 129, 300)), own.choice((8, 32)), 100 + i)
        for i in range(48)
    )


def sanitized(tool: str) -> Job:
    names = ",".join(f"kernel_substring={name}" for name in SANITIZED)
    words = (
        *("compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
        *("--print-limit", "20", "--kernel-name", names),
    )
    short = ((72, 3, 1), (5, 3, 2))
    return Job(
        f"sanitized-{tool}",
        engine={"enforce_eager": True},
        waves=(short,),
        limit=90.0,
        wrapped_by=words,
    )


def long_prompt(name: str, rows: int, *environment: tuple[str, str]) -> Job:
    """One prompt of 12,000 tokens in one step, through tables of RoPE with `rows` rows.

    The tiny checkpoint's own have 512 (factor 16 times 32 original positions).
    """
    scaling = {
        "rope_type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": rows // 16,
        "beta_fast": 32,
        "beta_slow": 1,
    }
    engine = {
        "max_model_len": LONG,
        "max_num_batched_tokens": LONG,
        "kv_cache_memory_bytes": 1 << 30,
        "hf_overrides": {"max_position_embeddings": LONG, "rope_scaling": scaling},
    }
    waves = (((12_000, 4, 1),),)
    told = {"recorded_waves": 0}
    return Job(name, True, "proof.e2e.inside.engine", engine, waves, environment, told)


ANSWERS = [
    [81, 71, 14, 45, 108, 74, 83, 50],
    [41, 53, 78, 73, 71, 27],
    [86, 23, 102, 102],
]
"""The tokens of `MIXED` without graphs: docs/e2e.md has them."""
DECODE_GRAPHS = {key: GRAPHS[key] for key in ("enforce_eager", "compilation_config")}
ALL_GRAPHS = {"enforce_eager": False, "compilation_config": {"mode": 0}}
"""Graphs of decode steps, and in pieces those of prompts: what a server captures."""


V1 = (("VLLM_USE_V2_MODEL_RUNNER", "0"),)
STOP = (("VLLM_XPU_GRAPH_CHECK", "stop"),)
OFF = (("VLLM_XPU_GRAPH_CHECK", "off"),)
SAME, WITHOUT = "are the same by captured graphs", "Serving without graphs"
DAMAGED = "Replays have written to memory of others"


def graph_check(
    name: str,
    fault: str,
    *expected: str,
    engine: dict[str, Any] = DECODE_GRAPHS,
    environment: tuple[tuple[str, str], ...] = (),
    **told: Any,
) -> Job:
    """An engine whose graphs have a fault, and what the check of them must say."""
    return Job(
        f"graph-check-{name}",
        program="lab.benchmarks.xpu_path.graph_check",
        engine={**PLAIN, **engine},
        environment=environment,
        told={"fault": fault, "expected": expected, "tokens": ANSWERS, **told},
        suffix="json",
        limit=120.0,
    )


FLASH_CHECKED: dict[str, Any] = {
    **FLASH,
    "load_format": "random_on_device",
    "max_model_len": 1 << 14,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 4 << 30,
    "compilation_config": {
        **FLASH["compilation_config"],
        "cudagraph_capture_sizes": [1, 4, 16],
    },
}
"""Of a size that six engines have room for."""
HEALTHY = range(20)
FLASH_FAULTS = {
    "pointer": ("stale pointer", "up to model.layers.1.", WITHOUT),
    "host": ("host value", "up to model.layers.2.", WITHOUT),
    "workspace": ("moved workspace", DAMAGED),
    "positions": ("compressor's positions", WITHOUT),
    "query-norm": ("query norm", WITHOUT),
    "indexer": ("indexer's weights", WITHOUT),
}


def flash_check(
    name: str,
    fault: str,
    *expected: str,
    seed: int = 0,
    environment: tuple[tuple[str, str], ...] = (),
) -> Job:
    """The same with Flash's attention; `seed` is that of the weights."""
    return graph_check(
        name,
        fault,
        *expected,
        engine={**FLASH_CHECKED, "seed": seed},
        environment=environment,
        tokens=None,
        folder=f"/tmp/xpu-path/flash-{name}",
    )


def written(
    name: str, told: dict[str, Any], engine: dict[str, Any], patched: bool = True
) -> Job:
    """An engine with the checkpoint that is `told`, which it writes there."""
    program = "lab.benchmarks.xpu_path.written"
    return Job(name, patched, program, engine, (V41_MIXED,), told=told)


def seen(image: int) -> dict[str, Any]:
    """The prompts of `SEEN` with the token `image` where one goes."""
    waves = [
        [
            {
                "tokens": tokens(length, seed, {at: image for at, *_ in images}),
                "new": new,
                "images": [
                    dict(zip(("at", "down", "along", "seed"), numbers, strict=True))
                    for numbers in images
                ],
            }
            for length, new, seed, images in wave
        ]
        for wave in SEEN
    ]
    return {"waves": waves}


def beside_untouched(
    name: str, told: dict[str, Any], engine: dict[str, Any]
) -> list[Job]:
    """In eager mode, with graphs of decode steps, and by the untouched release."""
    return [
        written(f"{name}-eager", told, engine),
        written(f"{name}-graphs", told, engine | GRAPHS),
        written(f"{name}-untouched", told, engine, patched=False),
    ]


def host(patched: bool, round_of: int) -> Job:
    """The host's time of eager decode layers, 4 requests of 300 tokens."""
    told = {"batch": 4, "length": 300, "new": 48, "waves_of_tokens": 4}
    return Job(
        f"host-{'patched' if patched else 'untouched'}-{round_of}",
        patched,
        "lab.benchmarks.xpu_path.host_layer",
        {**PLAIN, "enforce_eager": True},
        told=told,
        suffix="json",
        limit=120.0,
    )


def command(*names: str) -> str:
    """What runs these jobs, on the GPU's machine."""
    start = "python3 -m lab.benchmarks.xpu_path.run --carried .carried --out OUT"
    return " ".join((start, *names))


REPEATED = (MIXED, soak(), soak())
JOBS = {
    job.name: job
    for job in (
        Job("eager", waves=(MIXED, soak())),
        Job("graphs", engine=GRAPHS, waves=REPEATED),
        sanitized("memcheck"),
        sanitized("racecheck"),
        Job("eager-untouched", patched=False),
        long_prompt("long-prompt", 1 << 14),
        *(host(patched, i) for i in (1, 2) for patched in (False, True)),
        *beside_untouched("v41", {"checkpoint": "v4.1"}, V41),
        *beside_untouched(
            "v41-images",
            {"checkpoint": "v4.1 with images", **seen(V41_IMAGE)},
            V41 | THREE_IMAGES,
        ),
        *beside_untouched(
            "v41-drafts",
            # It knows the texts of a job that ran before.
            {"checkpoint": "v4.1 with drafts", "known": "v41-eager"},
            V41 | DRAFTS,
        ),
        *beside_untouched(
            "vision", {"checkpoint": "vision", **seen(IMAGE)}, VISION | THREE_IMAGES
        ),
        graph_check("healthy", "", SAME),
        graph_check("healthy-all", "", SAME, engine=ALL_GRAPHS),
        graph_check("healthy-v1", "", SAME, environment=V1),
        *(
            graph_check(name, fault, said, engine=graphs | TWO_DRAFTS, tokens=None)
            for name, fault, said, graphs in (
                ("mtp-healthy", "", SAME, DECODE_GRAPHS),
                ("mtp-healthy-all", "", SAME, ALL_GRAPHS),
                ("mtp-norms", "draft's norms", WITHOUT, DECODE_GRAPHS),
            )
        ),
        # Each start has weights of its own.
        *(
            flash_check(f"healthy-flash-{seed}", "", SAME, seed=seed)
            for seed in HEALTHY
        ),
        flash_check("healthy-flash-v1", "", SAME, environment=V1),
        *(
            flash_check(f"flash-{name}", fault, *expected)
            for name, (fault, *expected) in FLASH_FAULTS.items()
        ),
        graph_check("pointer", "stale pointer", "up to model.layers.1.", WITHOUT),
        graph_check(
            "host", "host value", "up to model.layers.2.", WITHOUT, tokens=None
        ),
        graph_check(
            "workspace",
            "moved workspace",
            "layers.1.",
            DAMAGED,
            tokens=None,
        ),
        graph_check(
            "pointer-v1",
            "stale pointer",
            "up to model.layers.1.",
            WITHOUT,
            environment=V1,
        ),
        graph_check(
            "pointer-stop",
            "stale pointer",
            "--enforce-eager captures none",
            environment=STOP,
            tokens=None,
        ),
        graph_check("pointer-off", "stale pointer", environment=OFF, tokens=None),
    )
}
