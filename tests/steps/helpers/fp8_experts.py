# SPDX-License-Identifier: Apache-2.0
"""Routed experts in FP8 with block scales, as DeepSeek-V4's base models have them."""

import inspect
from typing import Any

import torch

from . import block_fp8, layout, model_configs, moe_layers


class Experts:
    """The routed experts of the model's layer, with random weights.

    `w13` `[E, 2 * I, H]` and `w2` `[E, H, I]` are what the weights stand for, in
    float64. The gate and the up projection of most tokens lie beyond the limit.
    """

    def __init__(self, limit: float | None) -> None:
        torch.manual_seed(0)
        config = model_configs.vllm_config(quantized=True)
        config.model_config.hf_config.expert_dtype = "fp8"
        config.model_config.hf_config.swiglu_limit = limit
        self._config = config
        whole = moe_layers.experts(config)
        self._layer = next(m for m in whole.modules() if hasattr(m, "w13_weight"))
        self.w13 = self._fill("w13_weight")
        self.w2 = self._fill("w2_weight")
        self._method = self._layer.quant_method
        with model_configs.current(config):
            self._method.process_weights_after_loading(self._layer)

    def _fill(self, name: str) -> torch.Tensor:
        weight = getattr(self._layer, name)
        scale = getattr(self._layer, f"{name}_scale_inv")
        values = torch.randn(weight.shape).to(torch.float8_e4m3fn)
        powers = torch.exp2(torch.randint(-3, 1, scale.shape).float())
        weight.data.copy_(values)
        scale.data.copy_(powers)
        each = powers.repeat_interleave(block_fp8.BLOCK, 1)
        each = each.repeat_interleave(block_fp8.BLOCK, 2)
        return values.double() * each.double()

    def run(
        self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """The sum of each token's experts, `[T, H]`, by vLLM."""
        given = {
            "layer": self._layer,
            "x": x.to(layout.device()),
            "topk_weights": topk_weights.to(layout.device()),
            "topk_ids": topk_ids.to(layout.device()),
        }
        known: Any = inspect.signature(self._method.apply).parameters
        others = {name: None for name in known if name not in given}
        layout.workspace()
        with model_configs.current(self._config):
            found: torch.Tensor = self._method.apply(**given, **others)
        return found.cpu()

    def reference(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        """The same in float64: silu(min(gate, limit)) · clamp(up, ±limit), with the
        inputs of both products in e4m3 by groups of 128."""
        rows = block_fp8.as_e4m3(x, block_fp8.BLOCK, power_of_two=False)
        gate_up = torch.einsum("th,enh->ten", rows, self.w13)
        gate, up = gate_up.bfloat16().double().chunk(2, dim=-1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        each = (torch.nn.functional.silu(gate) * up).bfloat16()
        each = block_fp8.as_e4m3(each, block_fp8.BLOCK, power_of_two=False)
        out = torch.einsum("ten,eon->teo", each, self.w2)
        chosen = topk_ids.long()[..., None].expand(-1, -1, out.shape[-1])
        weights = topk_weights.double()[..., None]
        return (out.gather(1, chosen) * weights).sum(1)
