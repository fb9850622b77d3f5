# SPDX-License-Identifier: Apache-2.0
"""A decoder layer from top to bottom, and which steps change which part of it."""

import html
from collections.abc import Iterable, Sequence

from xpustack.pages.status import StepStatus

PARTS = (
    ("Start", "platform, warm-up, refusals", "platform-guards", "events", "jit-warmup"),
    ("Hyper-connections", "mix the residual streams", "mhc-forward-xpu"),
    (
        "Projections of query and key",
        "linear layers in FP8, FP4, INT4 or bf16",
        "fp8-quant",
        "block-fp8-triton",
        "mxfp4-linear",
        "nvfp4-linear",
        "packed-projections",
        "overlap-streams",
    ),
    (
        "Compressor",
        "sums of 4 or 128 tokens into one entry",
        "ue8m0-exponent",
        "compressor-op",
        "c128-skip",
    ),
    (
        "Insert",
        "norm, RoPE and FP8 of the keys, into pages",
        "kv-insert",
        "dspark-insert",
    ),
    (
        "Indexer",
        "chooses the entries that attention reads",
        "indexer",
        "indexer-mxfp4",
        "indexer-query-op",
        "indexer-speculation",
        "cpu-tile-scheduler",
    ),
    (
        "Attention",
        "window, chosen entries and a sink",
        "attention-layer",
        "attention-decode",
        "attention-prefill",
        "prefill-chunks",
    ),
    (
        "Output projection",
        "inverse RoPE, wo_a by groups, wo_b",
        "swa-rope",
        "o-proj",
        "o-proj-bf16",
        "o-proj-rope",
        "inv-rope-launch",
        "packed-wo-a",
    ),
    ("Router", "scores and chooses experts", "router-logits", "router-op"),
    (
        "Routed experts",
        "grouped products in MXFP4, NVFP4 or INT4",
        "moe-swiglu-clamp",
        "mxfp4-experts",
        "int4-experts-clamp",
        "expert-map",
        "eplb-refusal",
    ),
    (
        "Shared experts",
        "one dense block",
        "shared-experts-padding",
        "shared-experts-swiglu",
    ),
    (
        "Draft model",
        "speculation",
        "mtp",
        "mtp-weights",
        "merge-once",
        "pipeline-draft",
    ),
)
"""The parts in the order in which a token meets them: name, what it does, its steps."""
ELSEWHERE = "Elsewhere"


def layer_steps(slugs: Iterable[str]) -> list[tuple[str, str, list[str]]]:
    """Each part with what it does and those of its steps that any series has. A step
    that no part names stands in a part of its own, `Elsewhere`, at the end."""
    known = list(dict.fromkeys(slugs))
    parts = [
        (name, does, [slug for slug in steps if slug in known])
        for name, does, *steps in PARTS
    ]
    named = {slug for _, _, *steps in PARTS for slug in steps}
    other = [slug for slug in known if slug not in named]
    if other:
        parts.append((ELSEWHERE, "switches, and models that are refused", other))
    return parts


def layer_page(statuses: Sequence[StepStatus]) -> tuple[str, dict[str, str]]:
    """The page of the layer: its text, and no further files."""
    releases: dict[str, list[str]] = {}
    subjects: dict[str, str] = {}
    for status in statuses:
        releases.setdefault(status.step, []).append(status.release)
        subjects[status.step] = status.subject
    boxes = []
    for name, does, slugs in layer_steps(releases):
        steps = []
        for slug in slugs:
            names = releases[slug]
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            steps.append(
                f'<li title="{html.escape(subjects[slug])}"><code>{slug}</code>'
                f" <small>{len(names)} releases, {span}</small></li>"
            )
        boxes.append(
            f"<li><strong>{html.escape(name)}</strong>: {html.escape(does)}"
            f"<ul>{''.join(steps)}</ul></li>"
        )
    text = "\n\n".join(
        [
            "# A decoder layer and its steps",
            "From top to bottom as a token passes it. Point at a step for its subject;"
            " [Steps](steps.md) says which release has it, and"
            " [launches](docs/layers.md) what the device runs.",
            f'<ol class="layer">\n{chr(10).join(boxes)}\n</ol>',
        ]
    )
    return text + "\n", {}
