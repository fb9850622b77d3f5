# SPDX-License-Identifier: Apache-2.0
"""Faults put into a running engine, one per layer: the comparison must find them.

Lives inside an installed vLLM, beside `recording.py`. Layer 0 forgets its sinks,
layer 1 answers one wrong index in each row of its top-k, layer 2 turns by a wrong RoPE
table; and one scale byte of a page of layer 1 is wrong after the first step.
"""

import copy
import dataclasses
import importlib
import os
from typing import Any

import torch
from vllm.forward_context import get_forward_context

FEWER_ROWS = "E2E_FEWER_ROWS"
"""The variable that chooses among the faults of V4.1."""
EXPONENT_STEP = 3
TOKEN_BYTES = 576


def owner_of(name: str, module: Any) -> Any:
    """The layer, or the part of it in older releases, that has an attribute."""
    return next(m for m in module.modules() if getattr(m, name, None) is not None)


def break_layers(model: torch.nn.Module) -> None:
    """Break the first three layers of a loaded model, for images alone if it sees."""
    if (text := getattr(model, "language_model", None)) is not None:
        layers = text.model.layers
        later = hasattr(layers[0].attn, "index_source_layers")
        if later and FEWER_ROWS in os.environ:
            compute_a_row_fewer()
        elif (
            later and layers[0].attn.swa_cache_layer.cache_config.enable_prefix_caching
        ):
            take_windows_that_lack_rows()
        elif not later:
            break_images(layers)
        elif model.multimodal_config.get_limit_per_prompt("image"):
            break_v41_images(layers)
        else:
            break_v41(layers)
        return
    layers = model.model.layers
    forget_sinks(layers[0].attn)
    miss_one_index(layers[1].attn)
    damage_page(layers[1].attn)
    turn_wrongly(layers[2].attn)


def forget_sinks(attention: Any) -> None:
    owner_of("attn_sink", attention).attn_sink.data.fill_(float("-inf"))


def break_images(layers: Any) -> None:
    """The experts of image tokens are chosen by nothing in the first two layers, of
    which one has a table; the third attends by the window alone."""
    for layer in layers[:2]:
        layer.ffn.gate.bias_vl.data.zero_()
    attention = layers[2].attn
    prefill = attention._forward_prefill

    def see_the_window_alone(*args: Any, swa_metadata: Any, **kwargs: Any) -> None:
        blind = {"prefill_left_visible": None, "prefill_right_visible": None}
        swa_metadata = dataclasses.replace(swa_metadata, **blind)
        prefill(*args, swa_metadata=swa_metadata, **kwargs)

    attention._forward_prefill = see_the_window_alone


def break_v41(layers: Any) -> None:
    """The experts of layer 0 see the streams by their own mixes, as V4's do; Engram of
    layer 2 finds rows of zeros; layer 4 chooses among all entries; and layer 5 reads
    what layer 3 chose."""
    model = importlib.import_module("vllm.models.deepseek_v41.nvidia.model")
    join, gates = model.mhc_shifted_post_pre, layers[0].hc_ffn_fn

    def join_by_own_mixes(*args: Any, pre_mix: Any, **kwargs: Any) -> Any:
        if any(arg is gates for arg in args):
            *_, pre_mix, _ = join(*args, pre_mix=pre_mix, **kwargs)
        return join(*args, pre_mix=pre_mix, **kwargs)

    model.mhc_shifted_post_pre = join_by_own_mixes  # type: ignore[attr-defined]
    for piece in layers[2].engram.embed_tokens._pinned.pieces:
        piece.zero_()
    layers[4].attn.indexer.indexer_op.candidate_blocks = None
    buffer = layers[3].attn.topk_indices_buffer
    earlier = buffer.clone()

    def keep(*_: Any) -> None:
        earlier.copy_(buffer)

    def answer(*_: Any) -> None:
        buffer.copy_(earlier)
        # Where a choice's entries lie is looked up once, by the layer that chose.
        found = get_forward_context().additional_kwargs
        for name in [name for name in found if name.startswith("entries of ")]:
            del found[name]

    layers[3].attn.register_forward_hook(keep)
    layers[5].attn.register_forward_pre_hook(answer)


def compute_a_row_fewer() -> None:
    """V4.1's later layers compute all rows that a prompt's end needs but one."""
    end: Any = importlib.import_module("vllm.v1.core.prompt_end").PromptEnd
    end.rows = property(lambda self: self.reach + self.window - 1)


def take_windows_that_lack_rows() -> None:
    """A prefix of the cache is taken though V4.1's later layers lack rows of it."""
    managers: Any = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
    managers.SlidingWindowManager.whole_rows_start = lambda self, request: 0


def break_v41_images(layers: Any) -> None:
    """The experts of image tokens are chosen by nothing in layer 0, and Engram of layer
    2 changes what it should leave alone."""
    layers[0].ffn.gate.bias_vl.data.zero_()
    engram = layers[2].engram
    look_up = engram.forward

    def change_all(streams: Any, hashes: Any, keep: torch.Tensor) -> Any:
        return look_up(streams, hashes, torch.ones_like(keep))

    engram.forward = change_all


def turn_wrongly(attention: Any) -> None:
    """Positions count twice; a shift alone would cancel out."""
    owners = [part for part in attention.modules() if hasattr(part, "rotary_emb")]
    own = copy.deepcopy(owners[0].rotary_emb)
    rows = torch.arange(len(own.cos_sin_cache)) * 2 % len(own.cos_sin_cache)
    own.cos_sin_cache.copy_(own.cos_sin_cache[rows])
    for owner in owners:
        owner.rotary_emb = own


def miss_one_index(attention: Any) -> None:
    """Each row that had to choose gets an entry it left out for its best one."""
    indexer = owner_of("indexer_op", attention).indexer_op
    buffer = owner_of("topk_indices_buffer", attention).topk_indices_buffer

    def exchange(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if get_forward_context().attn_metadata is None:
            return
        for row in buffer[: len(args[0])]:
            chosen = set(row.tolist())
            if -1 not in chosen and (left_out := set(range(max(chosen))) - chosen):
                row[0] = min(left_out)

    indexer.register_forward_hook(exchange, with_kwargs=True)


def overwrite_row(attention: Any) -> None:
    """A prompt that goes on behind cached pages finds in the last row of its window
    what another token left there, in one layer and once."""
    done: list[bool] = []

    def overwrite(module: Any, args: Any, kwargs: Any) -> None:
        metadata = get_forward_context().attn_metadata
        positions = kwargs["positions"] if "positions" in kwargs else args[0]
        first = int(positions[0])
        # The step of a prompt has several tokens, that of an answer one.
        if metadata is None or done or first == 0 or int(positions[-1]) == first:
            return
        layer = owner_of("swa_cache_layer", attention).swa_cache_layer
        pages, table = layer.kv_cache, metadata[layer.prefix].block_table
        rows = pages.shape[1]
        page = pages[int(table[0, (first - 1) // rows])].flatten()
        row = (first - 1) % rows
        other = page[:TOKEN_BYTES].clone()
        page[row * TOKEN_BYTES : (row + 1) * TOKEN_BYTES] = other
        done.append(True)

    attention.register_forward_pre_hook(overwrite, with_kwargs=True)


def damage_page(attention: Any) -> None:
    """One of the first token's seven exponents grows, between two steps."""
    done: list[bool] = []

    def damage(module: Any, args: Any, kwargs: Any) -> None:
        metadata = get_forward_context().attn_metadata
        positions = kwargs["positions"] if "positions" in kwargs else args[0]
        if metadata is None or done or int(positions[0]) == 0:
            return
        layer = owner_of("swa_cache_layer", attention).swa_cache_layer
        block = int(metadata[layer.prefix].block_table[0, 0])
        page = layer.kv_cache[block].flatten()
        page[layer.kv_cache.shape[1] * TOKEN_BYTES] += EXPONENT_STEP
        done.append(True)

    attention.register_forward_pre_hook(damage, with_kwargs=True)
