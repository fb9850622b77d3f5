# SPDX-License-Identifier: Apache-2.0
"""Each row that a draft token adds to a decode gets its own causal length."""

from typing import Any

import pytest
import torch
from helpers import batch_metadata, layout, model_configs

RATIO = 4
# Token t sees t + 1 tokens, so (t + 1) // 4 compressed entries: the two last tokens
# of 8 see 1 and 2, those of 13 both see 3, those of 6 both see 1.
SEQ_LENS = (8, 13, 6)


def build(query_lens: tuple[int, ...], speculative_tokens: int = 1) -> Any:
    config = model_configs.vllm_config(speculative_tokens=speculative_tokens)
    builder = batch_metadata.indexer_builder(config)
    with model_configs.current(config):
        return builder.build(
            0, batch_metadata.common_metadata(SEQ_LENS, query_lens)
        ).decode


def expected(query_lens: tuple[int, ...]) -> list[int]:
    """The entries that each new token may see, in the order of the tokens."""
    return [
        (position + 1) // RATIO
        for total, new in zip(SEQ_LENS, query_lens, strict=True)
        for position in range(total - new, total)
    ]


def visible(decode: Any, tokens: int) -> list[int]:
    """What the logits kernel lets each row see.

    It takes one length a batch entry, its last, and counts back from it by one entry
    for each row that follows in the same batch entry.
    """
    last = decode.seq_lens[:, -1].tolist()
    rows = tokens // len(last)
    return [length - rows + row + 1 for length in last for row in range(rows)]


def test_every_row_sees_its_own_prefix() -> None:
    seen = visible(build((2, 2, 2)), 6)
    assert seen == expected((2, 2, 2)), f"rows see {seen}"


def test_top_k_reads_one_length_a_row() -> None:
    decode = build((2, 2, 2))
    shape = tuple(decode.seq_lens.shape)
    assert shape == (6, 1), f"the lengths are {shape}"
    assert decode.decode_lens.tolist() == [1] * 6
    assert not decode.requires_padding


def test_every_row_reads_its_own_request() -> None:
    table = batch_metadata.common_metadata(SEQ_LENS, (2, 2, 2)).block_table_tensor
    width = table.shape[1]
    rows = build((2, 2, 2)).block_table[:, :width]
    assert rows.shape == (6, width), f"the block table has {len(rows)} rows"
    assert torch.equal(rows, table.repeat_interleave(2, dim=0))


def test_requests_may_bring_different_numbers_of_rows() -> None:
    decode = build((2, 1, 2))
    lengths = decode.seq_lens.flatten().tolist()
    assert lengths == expected((2, 1, 2)), f"rows see {lengths}"


@pytest.mark.unchanged
def test_rows_of_a_cache_that_is_not_compressed_see_what_they_saw() -> None:
    """As DeepSeek-V3.2 has it, which shares the builder."""
    config = model_configs.vllm_config(speculative_tokens=1)
    builder = batch_metadata.indexer_builder(config)
    builder.compress_ratio = 1
    with model_configs.current(config):
        decode = builder.build(
            0, batch_metadata.common_metadata(SEQ_LENS, (2, 2, 2))
        ).decode
    assert visible(decode, 6) == [7, 8, 12, 13, 5, 6]


if layout.RELEASE >= (0, 31):

    def test_the_indexer_s_graphs_hold_any_lengths() -> None:
        """Attention's own builder still wants a uniform batch."""
        config = model_configs.vllm_config(speculative_tokens=1)
        builder = batch_metadata.indexer_builder(config)
        support = type(builder).get_cudagraph_support(config, builder.kv_cache_spec)
        assert support.name == "ALWAYS", f"graphs: {support.name}"


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_without_speculation_there_is_one_row_a_request() -> None:
    decode = build((1, 1, 1), speculative_tokens=0)
    assert decode.seq_lens.shape == (3, 1)
    assert visible(decode, 3) == expected((1, 1, 1))


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_two_rows_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = layout.module(layout.INDEXER_BACKEND)
    platform = layout.another_platform(backend.current_platform)
    monkeypatch.setattr(backend, "current_platform", platform)
    decode = build((2, 2, 2))
    assert decode.seq_lens.shape == (3, 2)
    assert decode.seq_lens.flatten().tolist() == expected((2, 2, 2))
