# SPDX-License-Identifier: Apache-2.0
"""The router of V4 Vision chooses the experts of image tokens by their own bias."""

from typing import Any

import pytest
import torch
from helpers import layout, model_configs, model_layers, moe_layers

TOPK, EXPERTS, HIDDEN = 2, 4, 256
# The first and the last of the five ids of images, and their neighbours.
IDS = [129_256, 129_257, 129_261, 129_262]
BY_TEXT, BY_TABLE, BY_IMAGE = {0, 1}, {1, 2}, {2, 3}


class Experts(torch.nn.Module):
    """Takes the place of a layer's experts."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()


def vision_config(**options: Any) -> Any:
    config = model_configs.vllm_config(quantized=True, **options)
    model_configs.take_images(config)
    return config


def let_the_first_be_hashed(config: Any) -> None:
    """Older releases read a number of layers, newer ones the kind of each."""
    hf = config.model_config.hf_config
    hf.num_hash_layers = 1
    if hasattr(hf, "mlp_layer_types"):
        hf.mlp_layer_types[0] = "hash_moe"


def lifted(chosen: set[int]) -> torch.Tensor:
    """A bias of more than a score can be for the chosen experts."""
    return torch.tensor([9.0 * (expert in chosen) for expert in range(EXPERTS)])


def layer_of_experts(*, hashed: bool) -> Any:
    """The experts of V4 Vision, with a router as published for the kind of layer."""
    config = vision_config()
    if hashed:
        let_the_first_be_hashed(config)
    moe = moe_layers.experts(config, layer=0)
    published = {
        "weight": torch.randn(EXPERTS, HIDDEN),
        "e_score_correction_bias": lifted(BY_TEXT),
        "bias_vl": lifted(BY_IMAGE),
    }
    if hashed:
        published["tid2eid"] = torch.tensor([[1, 2]]).expand(129_280, TOPK)
    parameters = dict(moe.gate.named_parameters())
    for name, values in published.items():
        assert name in parameters, f"the router of V4 Vision has no {name}"
        parameters[name].data.copy_(values)
    return moe


def chosen(moe: Any) -> list[set[int]]:
    """The experts that the layer's router chooses for `IDS`."""
    x = torch.randn(len(IDS), HIDDEN, dtype=torch.bfloat16, device=layout.device())
    _, experts = moe.experts.router._compute_routing(
        x,
        moe.gate(x)[0],
        torch.int32,
        input_ids=torch.tensor(IDS, device=layout.device()),
    )
    return [set(row) for row in experts.tolist()]


@pytest.mark.parametrize("hashed", [False, True])
def test_their_bias_chooses_for_image_tokens(hashed: bool) -> None:
    text = BY_TABLE if hashed else BY_TEXT
    found = chosen(layer_of_experts(hashed=hashed))
    assert found == [text, BY_IMAGE, BY_IMAGE, text]


def test_a_layer_without_ids_says_so() -> None:
    moe = layer_of_experts(hashed=False)
    with pytest.raises(ValueError, match="vision MoE routing requires input_ids"):
        moe(torch.randn(3, HIDDEN, dtype=torch.bfloat16))
    text = moe_layers.experts(model_configs.vllm_config(quantized=True))
    for layer in (moe, text):
        layer._forward_fused_moe = lambda *given: given
    assert moe("rows", "ids") == ("rows", "ids")
    assert text("rows") == ("rows", None)


def test_the_draft_is_given_the_ids() -> None:
    given: list[Any] = []

    def block(*, x: torch.Tensor, input_ids: Any, **_: Any) -> tuple[Any, ...]:
        given.append(input_ids)
        return x, x, None, None

    layer = model_layers.draft_layer(vision_config(speculative_tokens=1), Experts)
    layer.e_proj = layer.h_proj = torch.nn.Identity()
    layer.mtp_block.forward, layer.mtp_block.hc_post = block, lambda x, *_: x
    ids = torch.tensor([5, 129_259], device=layout.device())
    x = torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device=layout.device())
    layer(ids, torch.arange(2, device=layout.device()), x.repeat(1, 4), x)
    assert given[0] is ids, "the router of V4 Vision has no ids in a draft"


@pytest.mark.unchanged
@pytest.mark.parametrize("hashed", [False, True])
def test_a_model_without_images_stays(hashed: bool) -> None:
    config = model_configs.vllm_config(quantized=True)
    if hashed:
        let_the_first_be_hashed(config)
    moe = moe_layers.experts(config, layer=0)
    names = {name for name, _ in moe.gate.named_parameters()}
    assert names == {"weight", "tid2eid" if hashed else "e_score_correction_bias"}
    assert moe.experts.router.image_sentinel_lo == 0
