# SPDX-License-Identifier: Apache-2.0
"""Both forms of the checkpoint mean the same weights, bit for bit."""

import re
from collections.abc import Iterator

import torch

from proof.e2e.checkpoints import checkpoint
from proof.e2e.running.serving import Engines
from proof.e2e.twins.twin import Twin

E2M1 = torch.tensor(checkpoint.E2M1)
RENAMED = (
    (r"^embed\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^norm\.", "model.norm."),
    (r"^hc_head_(\w+)$", r"model.hc_head.hc_\1"),
    (r"^layers\.", "model.layers."),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_", r".\1_hc."),
    (r"\.ffn\.gate\.bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn\.indexer\.compressor\.", ".attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj", ".attn.compressor.indexer.scorer.weights_proj"),
    (r"\.attn\.indexer\.wq_b", ".attn.compressor.indexer.q_b_proj"),
    (r"\.attn_sink$", ".sinks"),
    (r"\.attn\.", ".self_attn."),
    (r"\.ape$", ".position_bias"),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"shared_experts\.w1", "shared_experts.gate_proj"),
    (r"shared_experts\.w3", "shared_experts.up_proj"),
    (r"shared_experts\.w2", "shared_experts.down_proj"),
)
EXPERT = re.compile(r"^layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.weight$")


def meaning(folder: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Float64 values of the published tensors, computed from their codes alone."""
    published = dict(checkpoint.tensors(folder))  # type: ignore[arg-type]
    for name, codes in published.items():
        scale = published.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale") or name.startswith("mtp."):
            continue
        if scale is None:
            yield name, codes.double()
            continue
        powers = torch.pow(2.0, scale.view(torch.uint8).double() - 127)
        if codes.dtype == torch.int8:
            low, high = codes.view(torch.uint8) & 15, codes.view(torch.uint8) >> 4
            nibbles = torch.stack((low, high), -1).flatten(-2).long()
            values = E2M1.double()[nibbles % 8] * (1 - 2 * (nibbles // 8))
            yield name, values * powers.repeat_interleave(32, 1)
        else:
            spread = powers.repeat_interleave(128, 0).repeat_interleave(128, 1)
            yield name, codes.double() * spread


def test_hugging_face_has_the_published_values(engines: Engines, twin: Twin) -> None:
    assert not any(twin.loading.values()), twin.loading
    state = twin.model.state_dict()
    compared = set()
    for name, values in meaning(engines.published):
        if found := EXPERT.match(name):
            layer, expert, part = found[1], int(found[2]), found[3]
            base = f"model.layers.{layer}.mlp.experts."
            key = base + ("down_proj" if part == "w2" else "gate_up_proj")
            theirs = state[key][expert]
            if part != "w2":
                theirs = theirs.chunk(2)[part == "w3"]
        else:
            key = name
            for pattern, replacement in RENAMED:
                key = re.sub(pattern, replacement, key)
            theirs = state[key]
        assert torch.equal(values, theirs.double()), name
        compared.add(key)
    assert compared == state.keys()


def test_nothing_that_a_fresh_model_leaves_at_zero_is_zero(twin: Twin) -> None:
    suffixes = ("sinks", "position_bias", "e_score_correction_bias", "tid2eid", "base")
    for name, value in twin.model.state_dict().items():
        if name.endswith(suffixes):
            assert value.float().std() > 0.1, name


def test_the_order_of_scales_matters(engines: Engines) -> None:
    """Read in transposed order they make another weight of every FP8 layer."""
    compared = 0
    for name, scale in checkpoint.tensors(engines.published):
        if name.endswith(".scale") and ".experts." not in name and min(scale.shape) > 1:
            powers = scale.view(torch.uint8)
            mirrored = powers.T.contiguous().view_as(powers)
            assert (powers != mirrored).double().mean() >= 0.5, name
            compared += 1
    assert compared >= 6 * len(checkpoint.FLASH.ratios)


@torch.no_grad()
def test_routing_chooses_some_experts_for_good_reasons(twin: Twin) -> None:
    """By the table each token its own; by score the same whatever rounding does."""
    hashed, *scored = twin.model.model.layers
    assert len({tuple(sorted(row)) for row in hashed.mlp.gate.tid2eid.tolist()}) > 20
    for layer in scored:
        bias = layer.mlp.gate.e_score_correction_bias.sort(descending=True).values
        lead = bias[checkpoint.CHOSEN - 1] - bias[checkpoint.CHOSEN]
        assert lead > 2.5, lead


def test_fp8_scales_are_the_least_that_hold_their_block() -> None:
    torch.manual_seed(0)
    weight = torch.randn(128, 256) * 100
    weight[:, :128].clamp_(-99, 99)
    weight[0, 0] = 448 * 8
    scale = checkpoint.fp8_blocks(weight).scale.view(torch.uint8).int() - 127
    assert scale[0, 0] == 3
    largest = weight[:, 128:].abs().max()
    assert (
        448 * 2.0 ** (int(scale[0, 1]) - 1) < largest <= 448 * 2.0 ** int(scale[0, 1])
    )
