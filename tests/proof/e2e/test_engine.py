# SPDX-License-Identifier: Apache-2.0
"""The patched engine on the emulated XPU equals Hugging Face's model.

The prompt of 129 tokens comes in chunks of at most 48 while the shorter ones decode:
chunked prefill, and prefill beside decode in one batch. It fills the window, makes an
entry of 128 tokens, and gives the indexer twice as many entries as it may choose.
"""

from dataclasses import replace

import pytest
import torch
from packaging.version import Version

from proof.e2e.checkpoints import checkpoint, mtp
from proof.e2e.judging.checks import (
    OVERLAP,
    TIGHT,
    check_attention,
    check_experts,
    check_logits,
    check_same_tokens,
)
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.running.choices import sizes
from proof.e2e.running.report import OWN
from proof.e2e.running.serving import Engines, Job, Prompt
from proof.e2e.twins.comparison import attention_errors
from proof.e2e.twins.twin import Roundings, Twin
from stack.base.releases import load
from standins.emulated_xpu.wheel.pins import schemas

V2_SINCE = Version("0.28.0")
"""The first release that chooses the model runner V2 by itself."""
INSERT = "_xpu_C::deepseek_qnorm_rope_kv_insert"
MIXED = Job(
    "mixed", ((Prompt(129, 8, seed=1), Prompt(5, 6, seed=2), Prompt(1, 4, seed=3)),)
)
BROKEN = Job("broken", ((Prompt(72, 2, seed=1),),), sabotage=True)
SPECULATING = Job(
    "speculation",
    MIXED.waves,
    (("speculative_config", {"method": "mtp", "num_speculative_tokens": 1}),),
    checkpoint="a draft that knows",
)
FEWER_DRAFTS = replace(
    SPECULATING,
    name="speculation, fewer tokens",
    waves=((Prompt(129, 4, seed=1), Prompt(5, 4, seed=2)),),
    splits_keys=False,
)


@pytest.mark.serves(MIXED)
def test_each_attention_layer(engines: Engines, twin: Twin, release: str) -> None:
    errors = check_attention(engines.serve(release, MIXED), twin)
    assert {error.ratio for error in errors} == {1, 4, 128}
    assert {error.tokens for error in errors} == {136, 10, 4}


def test_each_layer_of_experts(engines: Engines, twin: Twin, release: str) -> None:
    errors = check_experts(engines.serve(release, MIXED), twin)
    assert len(errors) == 3 * len(checkpoint.FLASH.ratios)


def test_logits_and_greedy_tokens(engines: Engines, twin: Twin, release: str) -> None:
    check_logits(engines.serve(release, MIXED), twin)


def test_the_whole_path_ran(engines: Engines, release: str) -> None:
    answer = engines.serve(release, MIXED).answer
    second = Version(release.removeprefix("v")) >= V2_SINCE
    assert answer["runner"] == ("XPUModelRunnerV2" if second else "XPUModelRunner")
    layers = {name.partition(" ratio ")[::2] for name in answer["layers"]}
    attention = {kind for kind, ratio in layers if ratio}
    assert attention == {"DeepseekV4XPUAttention"}
    assert {ratio for _, ratio in layers if ratio} == {"1", "4", "128"}
    ours = " ".join(name for name in answer["launches"] if name.startswith(OWN))
    for module in ("_decode_kernel", "_prefill_kernel"):
        assert module in ours, ours
    ops = answer["ops"]
    pinned = schemas(load(engines.project)[release].xpu_kernels.version)
    assert (INSERT in ops) == (INSERT in pinned), ops
    assert ("qnorm_rope_kv_insert" in ours) == (INSERT not in pinned), ours
    inverse_rope = {name for name in pinned if "deepseek_inv_rope" in name}
    (written,) = answer["outputs"]
    apart = bool(inverse_rope) and written == "Tensor"
    assert bool(inverse_rope & ops.keys()) == apart, (written, ops)
    assert written == "Tensor" or "_xpu_C::fp8_bmm" in ops, (written, ops)
    assert ops["_xpu_C::cutlass_grouped_gemm_interface"] >= 2 * len(answer["layers"])
    steps = [record["rows"] for record in answer["records"] if record["layer"] == 0]
    counts = [[count for _, count in rows] for rows in steps]
    assert any(1 in step and max(step) > 1 for step in counts), "no mixed batch"
    long = [n for rows in steps for name, n in rows if name.startswith("0") and n > 1]
    assert len(long) >= 2 * 3, "the long prompt was not cut into chunks"


def test_every_weight_arrives(engines: Engines, release: str) -> None:
    loaded = engines.serve(release, MIXED).answer["loaded"]
    published = dict(checkpoint.tensors(engines.published))
    compared = 0
    for name, values in loaded.items():
        expected = published_form(name, published)
        if expected is None:
            continue
        ours = values[: len(expected)] if name.endswith("attn_sink") else values
        assert bytes_of(ours).equal(bytes_of(expected.to(kind(expected, ours)))), name
        compared += 1
    assert compared >= 100, sorted(loaded)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def kind(expected: torch.Tensor, ours: torch.Tensor) -> torch.dtype:
    """Tables of indices may be narrower in vLLM; all else keeps its bytes."""
    return ours.dtype if expected.dtype == torch.int64 else expected.dtype


def published_form(
    name: str, published: dict[str, torch.Tensor]
) -> torch.Tensor | None:
    """What the checkpoint has for a parameter of vLLM's model."""
    name = name.removeprefix("model.").replace("embed_tokens", "embed")
    name = name.replace("lm_head.", "head.").replace("routed_experts.", "")
    name = name.replace(".mla_attn.", ".")
    name = name.replace("weight_scale_inv", "scale").replace("weight_scale", "scale")
    name = name.replace("gate.e_score_correction_bias", "gate.bias")
    prefix, _, leaf = name.rpartition(".")
    owner, _, part = prefix.rpartition(".")
    fused = {
        "fused_wqa_wkv": ("wq_a", "wkv"),
        "fused_wkv_wgate": ("wkv", "wgate"),
        "gate_up_proj": ("w1", "w3"),
        "down_proj": ("w2",),
    }
    if part in fused:
        names = [f"{owner}.{piece}.{leaf}" for piece in fused[part]]
    elif part == "experts":
        stem, _, form = leaf.partition("_")
        pieces = {"w13": ("w1", "w3"), "w2": ("w2",)}[stem]
        return torch.stack(
            [
                torch.cat(
                    [
                        published[f"{prefix}.{e}.{p}.{form}"].view(torch.uint8)
                        for p in pieces
                    ]
                )
                for e in range(checkpoint.FLASH.experts)
            ]
        )
    else:
        names = [name]
    if any(piece not in published for piece in names):
        return None
    return torch.cat([published[piece].view(raw(published[piece])) for piece in names])


def raw(tensor: torch.Tensor) -> torch.dtype:
    """Concatenation has no kernel for every 8-bit float."""
    return torch.uint8 if tensor.element_size() == 1 else tensor.dtype


@pytest.mark.newest
@sizes(FEWER_DRAFTS, SPECULATING, first=MIXED)
def test_a_speculated_token_changes_nothing(
    engines: Engines, twin: Twin, release: str, job: Job
) -> None:
    """With two tokens per step the indexer still sees each token's own entries."""
    plain = engines.serve(release, MIXED)
    known = successors(plain)
    engines.add_checkpoint(SPECULATING.checkpoint, mtp.Mtp(0, known))
    speculated = engines.serve(release, job)
    print(plain.new_tokens(), speculated.new_tokens())
    check_same_tokens(speculated, plain)
    check_attention(speculated, twin)
    drafts = [r for r in speculated.answer["records"] if r["layer"] == 3]
    assert drafts, "the MTP layer did not run"
    check_drafts(speculated, mtp.says_after(known), 1)


@pytest.mark.newest
@pytest.mark.serves(BROKEN)
def test_faults_are_seen(engines: Engines, twin: Twin, release: str) -> None:
    """Forgotten sinks, a wrong index, a damaged page and a wrong table turn red."""
    result = engines.serve(release, BROKEN)
    errors = attention_errors(result.answer, twin, Roundings.of(result.answer))
    for error in errors:
        print(error)
    sinks, chosen, table = sorted(errors, key=lambda error: error.layer)
    assert sinks.core > 5 * TIGHT, sinks
    assert chosen.overlap is not None and chosen.overlap < OVERLAP, chosen
    assert chosen.core > TIGHT, chosen
    assert table.core > 5 * TIGHT, table
