# SPDX-License-Identifier: Apache-2.0
"""Hugging Face's DeepSeek-V4 in float32, and the same model with vLLM's roundings.

The structure is always Hugging Face's. The roundings enter as hooks: FP8 activations
before linear layers, bfloat16 after them, FP8 pages, FP8 indexer vectors. The
indexer's choice can be replaced by the engine's, so that one flipped index does not
hide what the attention computes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

from proof.e2e.checkpoints.checkpoint import WINDOW
from proof.e2e.twins import rounding
from proof.e2e.twins.rounding import Rounding

RATIO = 4
"""Tokens of an entry among which the indexer chooses."""

EXPERTS = ".fused_moe_kernel"
"""The Triton kernel of routed experts."""

INDEX_FP4 = "_xpu_C::deepseek_fused_indexer_q_rope_mxfp4"
"""The op of an indexer in MXFP4."""


@dataclass
class Roundings:
    """Which roundings a release makes, read off the ops that it called and the kernels
    that it launched."""

    activations: bool
    """Linear layers take FP8 activations (else bfloat16)."""
    output_fp8: bool
    """The grouped output projection takes FP8 activations (else bfloat16, and its
    weights, whatever they are stored in, are unpacked into bfloat16)."""
    experts_fp8: bool = False
    """Routed experts take FP8 activations: those that Triton computes."""
    index_fp4: bool = False
    """The indexer's vectors are in MXFP4 (else FP8)."""

    @classmethod
    def of(cls, answer: dict[str, Any]) -> "Roundings":
        """Those of an engine's answer."""
        ops = answer["ops"]
        return cls(
            activations="_C::per_token_group_fp8_quant" in ops,
            output_fp8="_xpu_C::fp8_bmm" in ops,
            experts_fp8=any(name.endswith(EXPERTS) for name in answer["launches"]),
            index_fp4=INDEX_FP4 in ops,
        )


@dataclass
class Given:
    """What the twin takes from the engine in the middle of a layer.

    `topk` is the indexer's choice, `[T, k]`; `core` what the attention kernel gave,
    `[T, heads, head_dim]`, before RoPE is undone; `blocks` V4.1's candidate blocks,
    `[T, k]`, among which choices are made. The twin's own are kept beside them.
    """

    topk: torch.Tensor | None = None
    core: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    own_topk: torch.Tensor | None = field(default=None, init=False)
    own_core: torch.Tensor | None = field(default=None, init=False)
    own_blocks: torch.Tensor | None = field(default=None, init=False)
    """Which blocks the twin would make candidates, `[T, blocks]`; none where all."""

    def same_blocks(self, start: int = 0) -> float | None:
        """The part of the twin's own blocks that the given ones have, mean of the
        tokens from `start` on that had to choose; None if none had."""
        if self.blocks is None or self.own_blocks is None:
            return None
        chose = self.own_blocks.any(1)
        chose[:start] = False
        ours = self.own_blocks[chose]
        theirs = of_indices(self.blocks[chose], ours.shape[1])
        return float((ours & theirs).sum() / ours.sum()) if len(ours) else None

    def overlap(self, ratio: int, start: int = 0) -> float:
        """The part of the twin's own choice that the given one has, mean of the tokens
        from `start` on that had to choose among entries of `ratio` tokens."""
        assert self.topk is not None and self.own_topk is not None
        shares = []
        for position, (ours, theirs) in enumerate(
            zip(self.own_topk, self.topk, strict=True)
        ):
            if position >= start and (position + 1) // ratio > len(ours):
                wanted = set(ours.tolist())
                shares.append(len(wanted & set(theirs.tolist())) / len(wanted))
        return sum(shares) / len(shares) if shares else 1.0


def of_indices(indices: torch.Tensor, count: int) -> torch.Tensor:
    """Which of `count` things each row names, `[T, count]`; what is none of them names
    nothing, as -1."""
    known = indices.where((indices >= 0) & (indices < count), count)
    named = torch.zeros(len(indices), count + 1, dtype=torch.bool)
    return named.scatter_(1, known, True)[:, :-1]


class Reference:
    """A model in float32, and the same with an engine's roundings."""

    depth: int
    """Layers, without those of a draft."""
    window = WINDOW
    """Tokens that a layer sees besides the entries, its own included."""

    def look_at(self, result: Any) -> None:
        """Learn what an engine chose where the twin's own choice says nothing."""

    def beside(self, inputs: Mapping[int, torch.Tensor]) -> None:
        """Learn the inputs of all layers of a request, if layers read from others."""

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """`[T, vocabulary]` of one prompt."""
        raise NotImplementedError

    def attention(
        self,
        layer: int,
        x: torch.Tensor,
        given: Given | None = None,
        tokens: list[int] | None = None,
    ) -> torch.Tensor:
        """One layer's attention over the inputs `[T, hidden]` of a whole request."""
        raise NotImplementedError

    def feed_forward(
        self, layer: int, x: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        """One layer's experts over the inputs `[T, hidden]` of a whole request."""
        raise NotImplementedError

    def rounded(self, roundings: Roundings) -> AbstractContextManager[None]:
        """Within, the model rounds as vLLM's XPU path does."""
        raise NotImplementedError


class Twin(Reference):
    """Hugging Face's model of a checkpoint's float32 form."""

    def __init__(self, folder: Path) -> None:
        self.model, self.loading = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            output_loading_info=True,
            attn_implementation="eager",
        )
        self.model.eval()
        self.depth = len(self.model.model.layers)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """`[T, vocabulary]` of one prompt."""
        result: torch.Tensor = self.model(torch.tensor([tokens]), use_cache=False)
        return result.logits[0]

    def sees(self, length: int, tokens: list[int]) -> torch.Tensor:
        """Which tokens each of the first `length` sees uncompressed, `[T, T]`."""
        positions = torch.arange(length)[None]
        distance = positions.T - positions
        return (distance >= 0) & (distance < self.model.config.sliding_window)

    def mask(self, length: int, tokens: list[int]) -> torch.Tensor:
        """The same as Hugging Face adds it to scores, `[1, 1, T, T]`."""
        seen = self.sees(length, tokens)
        return torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))[None, None]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def attention(
        self,
        layer: int,
        x: torch.Tensor,
        given: Given | None = None,
        tokens: list[int] | None = None,
    ) -> torch.Tensor:
        """One layer's attention over the inputs `[T, hidden]` of a whole request."""
        attention = self.model.model.layers[layer].self_attn
        positions = torch.arange(len(x))[None]
        mask = self.mask(len(x), tokens or [])
        rotary = self.model.model.rotary_emb
        turns = {
            kind: rotary(x[None], position_ids=positions, layer_type=kind)
            for kind in ("main", "compress")
        }
        with taken(attention, given):
            output: torch.Tensor = attention(
                x[None], turns, positions, mask, past_key_values=None
            )[0]
        return output[0]

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def feed_forward(
        self, layer: int, x: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        """One layer's experts over the inputs `[T, hidden]` of a whole request."""
        ids = torch.tensor([tokens])
        output: torch.Tensor = self.model.model.layers[layer].mlp(
            x[None], input_ids=ids
        )
        return output[0]

    @contextmanager
    def rounded(self, roundings: Roundings) -> Iterator[None]:
        """Within, the model rounds as vLLM's XPU path does."""
        handles = []
        linear = rounding.activation if roundings.activations else rounding.bf16
        output = rounding.attention_output if roundings.output_fp8 else rounding.bf16
        for layer in self.model.model.layers:
            handles += _round_attention(layer.self_attn, linear, output)
            if not roundings.output_fp8:
                handles.append(_Unpacked(layer.self_attn.o_a_proj))
            shared = layer.mlp.shared_experts
            for part in (shared.gate_proj, shared.up_proj, shared.down_proj):
                handles += [_before(part, linear), _after(part, rounding.bf16)]
            if roundings.experts_fp8:
                handles += _round_experts(layer.mlp.experts)
            for part in (layer.input_layernorm, layer.post_attention_layernorm):
                handles += [_before(part, rounding.bf16), _after(part, rounding.bf16)]
            handles += [_after(layer.mlp, rounding.bf16), _after(layer, rounding.bf16)]
        handles.append(_after(self.model.model.norm, rounding.bf16))
        with turning(_rounded_turn(modeling.apply_rotary_pos_emb, self.model.config)):
            yield
        for handle in handles:
            handle.remove()


def _before(module: torch.nn.Module, change: Rounding) -> Any:
    return module.register_forward_pre_hook(
        lambda _, inputs: (change(inputs[0]), *inputs[1:])
    )


def _after(module: torch.nn.Module, change: Rounding) -> Any:
    return module.register_forward_hook(lambda _, inputs, output: change(output))


class _Gate:
    """A `_apply_gate` of routed experts, between two products that take FP8."""

    def __init__(self, experts: torch.nn.Module) -> None:
        self.experts = experts
        self.plain = experts._apply_gate
        experts._apply_gate = self

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        gated = self.plain(rounding.bf16(gate_up))
        return rounding.activation(rounding.bf16(gated))

    def remove(self) -> None:
        del self.experts._apply_gate


class _Unpacked:
    """A layer whose weights are those that bfloat16 holds."""

    def __init__(self, part: torch.nn.Module) -> None:
        self.part = part
        self.exact = part.weight.data
        part.weight.data = rounding.bf16(self.exact)

    def remove(self) -> None:
        self.part.weight.data = self.exact


def _round_experts(experts: torch.nn.Module) -> list[Any]:
    return [_before(experts, rounding.activation), _Gate(experts)]


def _round_attention(
    attention: torch.nn.Module, linear: Rounding, output: Rounding
) -> list[Any]:
    handles = []
    for part in (attention.q_a_proj, attention.kv_proj, attention.q_b_proj):
        handles += [_before(part, linear), _after(part, rounding.bf16)]
    for part in (attention.q_a_norm, attention.kv_norm):
        handles.append(_after(part, rounding.bf16))
    handles += [
        _before(attention.o_a_proj, output),
        _after(attention.o_a_proj, rounding.bf16),
        _before(attention.o_b_proj, linear),
        _after(attention.o_b_proj, rounding.bf16),
    ]
    indexer = getattr(attention.compressor, "indexer", None)
    if indexer is not None:
        handles += [
            _before(indexer.q_b_proj, linear),
            _after(indexer.q_b_proj, rounding.bf16),
            _after(indexer.scorer.weights_proj, rounding.bf16),
        ]
    return handles


def _rounded_turn(turn: Callable[..., torch.Tensor], config: Any) -> Any:
    """RoPE whose result is rounded as the place where it goes: page, query, indexer.

    Heads tell queries `[B, H, S, D]` from keys; a turn back, which vLLM makes on
    what the attention kernel stored in bfloat16, is one whose sine is negative at the
    first token that has an angle.
    """

    def rounded(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        if x.shape[-1] != config.head_dim:
            return rounding.index_vector(turn(x, cos, sin, *rest))
        if x.shape[1] == 1:
            return rounding.cache_entry(turn(x, cos, sin, *rest))
        if _is_back(sin):
            return turn(rounding.bf16(x), cos, sin, *rest)
        return rounding.bf16(turn(x, cos, sin, *rest))

    return rounded


def _is_back(sin: torch.Tensor) -> bool:
    # The slowest pair of dimensions turns by less than half a circle.
    return bool(sin[..., -1].sum() < 0)


@contextmanager
def turning(turn: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within, Hugging Face's model applies RoPE by `turn`."""
    original = modeling.apply_rotary_pos_emb
    modeling.apply_rotary_pos_emb = turn
    try:
        yield
    finally:
        modeling.apply_rotary_pos_emb = original


@contextmanager
def taken(attention: torch.nn.Module, given: Given | None) -> Iterator[None]:
    """Within, the layer goes on from what is given, and leaves its own beside it."""
    if given is None:
        yield
        return
    before = modeling.apply_rotary_pos_emb

    def turn(
        x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        if x.shape[1] == attention.num_heads and _is_back(sin):
            given.own_core = x[0].transpose(0, 1)
            if given.core is not None:
                x = given.core.transpose(0, 1)[None]
        return before(x, cos, sin, *rest)

    def choose(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        given.own_topk = output[0]
        if given.topk is None:
            return output
        # A wrong engine may name entries that the request does not have.
        known = given.topk < len(given.topk) // RATIO
        return given.topk.where(known, -1)[None]

    indexer = getattr(attention.compressor, "indexer", None)
    handle = indexer.register_forward_hook(choose) if indexer is not None else None
    with turning(turn):
        yield
    if handle is not None:
        handle.remove()
