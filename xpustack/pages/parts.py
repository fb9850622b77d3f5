# SPDX-License-Identifier: Apache-2.0
"""The parts of a decoder layer, and which steps change each of them."""

from collections.abc import Iterable

PARTS = (
    (
        "Start",
        "platform, warm-up, refusals",
        "platform-guards",
        "events",
        "capture-state",
        "graph-check",
        "jit-warmup",
        "v41-warmup",
    ),
    (
        "Hyper-connections",
        "mix the residual streams",
        "mhc-forward-xpu",
        "mhc-delayed",
    ),
    ("Engram", "rows of n-grams out of host memory", "engram-xpu"),
    (
        "Projections of query and key",
        "linear layers in FP8, FP4, INT4 or bf16",
        "fp8-quant",
        "block-fp8-triton",
        "mxfp4-linear",
        "nvfp4-linear",
        "packed-projections",
        "v41-mxfp8",
    ),
    (
        "Compressor",
        "sums of 4 or 128 tokens into one entry",
        "ue8m0-exponent",
        "compressor-op",
        "compressor-kernel",
        "c128-skip",
        "v41-ue8m0",
    ),
    (
        "Insert",
        "norm, RoPE and FP8 of the keys, into pages",
        "kv-insert",
        "kv-insert-cleanup",
        "query-norm",
        "dspark-insert",
    ),
    (
        "Indexer",
        "chooses attention's entries",
        "indexer",
        "indexer-mxfp4",
        "indexer-speculation",
        "candidate-blocks",
        "candidate-rows",
        "v41-indexer",
        "decode-logits",
        "indexer-rows",
        "cpu-tile-scheduler",
    ),
    (
        "Attention",
        "window, chosen entries and a sink",
        "attention-layer",
        "attention-decode",
        "attention-decode-cleanup",
        "attention-prefill",
        "prefill-chunks",
        "shared-attention",
    ),
    (
        "Output projection",
        "inverse RoPE, wo_a by groups, wo_b",
        "swa-rope",
        "o-proj",
        "attention-fp8-output",
        "o-proj-bf16",
        "o-proj-rope",
        "inv-rope-launch",
        "packed-wo-a",
    ),
    ("Router", "scores and chooses experts", "router-logits", "router-op"),
    (
        "Routed experts",
        "grouped products in MXFP4, NVFP4, FP8 or INT4",
        "moe-swiglu-clamp",
        "mxfp4-experts",
        "fp8-experts",
        "int4-experts-clamp",
        "expert-map",
        "eplb-refusal",
    ),
    (
        "Shared experts",
        "one dense block",
        "shared-experts-padding",
        "shared-experts-common",
        "shared-experts-swiglu",
    ),
    (
        "Draft model",
        "speculation",
        "mtp",
        "mtp-norm-warps",
        "mtp-embedding",
        "nvfp4-draft",
        "draft-prefix-cache",
        "mtp-weights",
        "merge-once",
        "pipeline-draft",
        "draft-workspace",
        "draft-tensors",
    ),
    (
        "Images",
        "tokens that see their whole image, and V4.1's",
        "vision-router",
        "vision-visibility",
        "whole-images",
        "image-spans",
        "stage-images",
        "vision-model",
        "v41-images",
    ),
    (
        "V4.1",
        "the model of V4.1 around V4's parts",
        "v41-model",
        "v41-dspark",
        "v41-gather",
    ),
    (
        "Loading",
        "which checkpoints and tensors are served",
        "checkpoint-faults",
        "checkpoint-parts",
        "truncated-shard",
        "scale-format",
        "checkpoint-scales",
        "fp8-wo-a",
        "quantization-refusal",
        "online-arguments",
    ),
)
"""The parts in the order in which a token meets them: name, what it does, its steps."""
ELSEWHERE = "Elsewhere"


def layer_steps(slugs: Iterable[str]) -> list[tuple[str, str, list[str]]]:
    """Each part with what it does and those of its steps that any series has. A step
    that no part names is in a part of its own, `Elsewhere`, at the end."""
    known = list(dict.fromkeys(slugs))
    parts = [
        (name, does, [slug for slug in steps if slug in known])
        for name, does, *steps in PARTS
    ]
    named = {slug for _, _, *steps in PARTS for slug in steps}
    other = [slug for slug in known if slug not in named]
    if other:
        parts.append((ELSEWHERE, "switches, pages, what is refused", other))
    return parts
