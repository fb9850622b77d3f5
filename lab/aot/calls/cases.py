# SPDX-License-Identifier: Apache-2.0
"""All calls: each public op at DeepSeek-V4's shapes, on `meta` tensors."""

from collections.abc import Callable, Iterator

from lab.aot.calls import cases_attention, cases_experts, cases_indexer, cases_layer
from lab.aot.calls.shapes import SHIPPED, Case, Sizes

GROUPS: tuple[Callable[[Sizes], Iterator[Case]], ...] = (
    cases_attention.decode_cases,
    cases_attention.prefill_cases,
    cases_attention.unaligned_cases,
    cases_attention.insert_cases,
    cases_attention.v41_insert_cases,
    cases_attention.gather_cases,
    cases_indexer.query_cases,
    cases_indexer.logits_cases,
    cases_indexer.topk_cases,
    cases_layer.mhc_cases,
    cases_layer.delayed_cases,
    cases_layer.compressor_cases,
    cases_layer.inv_rope_cases,
    cases_layer.nvfp4_cases,
    cases_layer.mxfp8_cases,
    cases_experts.experts_cases,
    cases_experts.fetch_cases,
)


def cases(sizes: Sizes = SHIPPED) -> list[Case]:
    """The calls of `sizes`."""
    return [case for group in GROUPS for case in group(sizes)]
