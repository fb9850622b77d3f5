# SPDX-License-Identifier: Apache-2.0
"""The indexer scores as many decode rows at once as its bound of memory holds."""

import weakref
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout
from helpers.indexer_batch import RATIO, TOPK, Batch

BOUND = "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB"
MILLION = 1 << 20
"""Entries of such a context at ratio 1: a row has 4 MiB of scores."""
LENS = (300, 70, 9, 131, 600)
OPS = {False: "xpu_fp8_paged_mqa_logits", True: "mxfp4_paged_mqa_logits"}
INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"


def watched(fp4: bool, found: list[int], patch: pytest.MonkeyPatch) -> None:
    """Note the bytes of all scores that are made, one after another."""
    made: list[weakref.ref[torch.Tensor]] = []
    place: Any = layout.module(INDEXER) if fp4 else torch.ops.vllm
    op = getattr(place, OPS[fp4])

    def score(*args: Any) -> torch.Tensor:
        assert all(earlier() is None for earlier in made), "earlier scores live on"
        logits: torch.Tensor = op(*args)
        made.append(weakref.ref(logits))
        found.append(logits.nbytes)
        return logits

    patch.setattr(place, OPS[fp4], score)


def with_drafts(fp4: bool) -> Batch:
    """Requests of two rows each, of which the first sees one entry fewer. On XPU the
    builder makes an entry of the batch of each row."""
    entries = (60, 9, 33, 50, 17)
    tokens = [RATIO * count for count in entries]
    batch = Batch(tokens, (2,) * len(tokens), fp4=fp4, speculative_tokens=1)
    batch.seq_lens = entries
    batch.builder.compress_ratio = batch.indexer.compress_ratio = 1
    return batch


def decoded(
    megabytes: int,
    entries: int,
    patch: pytest.MonkeyPatch,
    fp4: bool = False,
    drafts: bool = False,
    **candidates: Any,
) -> tuple[Batch, list[int]]:
    """A decode step of five requests, and the bytes of its scores."""
    patch.setattr(layout.module("vllm.envs"), BOUND, megabytes)
    batch = with_drafts(fp4) if drafts else Batch(LENS, (1,) * len(LENS), fp4=fp4)
    op = batch.indexer.indexer_op
    op.max_model_len = entries
    for name, value in candidates.items():
        setattr(op, name, value)
    found: list[int] = []
    with patch.context() as inner:
        watched(fp4, found, inner)
        batch.check() if not candidates else batch.run()
    return batch, found


@pytest.mark.parametrize(
    ("fp4", "entries", "rows"),
    [(False, 1 << 16, 4), (False, 100_000, 2), (True, 1 << 16, 4)],
    ids=["fp8", "fp8-odd", "mxfp4"],
)
def test_scores_stay_within_the_bound(
    fp4: bool, entries: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = decoded(1, entries, monkeypatch, fp4)
    assert max(found) == 4 * entries * rows, f"{max(found)} bytes of 1 MiB"
    assert sum(found) == 4 * entries * len(LENS)


@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "mxfp4"])
def test_rows_of_drafts_stay_with_their_request(
    fp4: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part holds two requests, each with the rows of its drafts."""
    entries = 1 << 16
    _, found = decoded(1, entries, monkeypatch, fp4, drafts=True)
    rows = [size // (4 * entries) for size in found]
    assert rows == [4, 4, 2], f"{max(found)} bytes of 1 MiB, by rows: {rows}"


def test_a_million_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone may be larger than the bound."""
    _, found = decoded(1, MILLION, monkeypatch)
    assert max(found) == 4 * MILLION, f"{max(found)} bytes of 1 MiB"


@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize("writes", [True, False], ids=["chooses", "keeps to"])
def test_candidates_are_those_of_each_row(
    writes: bool, drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a row, and what is chosen in them, do not depend on the bound."""
    if not hasattr(layout.module(INDEXER), "_select_candidate_blocks"):
        pytest.skip("the release's indexer has no candidate blocks")
    results = []
    for megabytes in (20, 1):
        torch.manual_seed(1)
        rows = len(LENS) * (1 + drafts)
        blocks = torch.randint(0, 5, (rows, 4), dtype=torch.int32)
        batch, found = decoded(
            megabytes,
            1 << 16,
            monkeypatch,
            drafts=drafts,
            candidate_blocks=blocks.to(layout.device()),
            candidate_block_size=8,
            candidate_write=writes,
        )
        results.append((batch.chosen.cpu(), batch.indexer.indexer_op.candidate_blocks))
    assert len(found) == (3 if drafts else 2), f"{found} bytes of 1 MiB"
    for once, in_parts in zip(*results, strict=True):
        assert torch.equal(once.sort().values, in_parts.cpu().sort().values)
    written = results[-1][1].cpu()
    for row, scores in enumerate(batch.scores()):
        kept = set(written[row].tolist())
        if writes:
            assert int(scores.argmax()) // 8 in kept, f"row {row} lacks its best block"
        elif sum(entry // 8 in kept for entry in range(len(scores))) >= TOPK:
            outside = [e for e in batch.chosen[row].tolist() if e // 8 not in kept]
            assert not outside, f"row {row} chose {outside} outside of its blocks"


@pytest.mark.unchanged
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
def test_candidates_of_all_blocks_leave_the_choice(
    drafts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not hasattr(layout.module(INDEXER), "_select_candidate_blocks"):
        pytest.skip("the release's indexer has no candidate blocks")
    rows, size = len(LENS) * (1 + drafts), 8
    blocks = torch.arange(max(LENS) // RATIO // size + 1, dtype=torch.int32)
    batch, _ = decoded(
        1,
        1 << 16,
        monkeypatch,
        drafts=drafts,
        candidate_blocks=blocks.repeat(rows, 1).to(layout.device()),
        candidate_block_size=size,
        candidate_write=False,
    )
    batch.check()


@pytest.mark.unchanged
def test_other_platforms_score_all_rows_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One call of the kernel and one of the top-k, whatever the bound is."""
    module = layout.module(INDEXER)
    rows, heads, entries = len(LENS), 4, 1 << 16
    lens = torch.tensor(LENS, dtype=torch.int32)
    decode = SimpleNamespace(
        decode_lens=torch.ones(rows, dtype=torch.int32),
        seq_lens=lens[:, None],
        requires_padding=False,
        block_table=torch.zeros(rows, 1, dtype=torch.int32),
        schedule_metadata=None,
        indices=None,
        global_seq_lens=None,
    )
    metadata = object.__new__(module.DeepseekV32IndexerMetadata)
    told: dict[str, Any] = {
        "num_decodes": rows,
        "num_prefills": 0,
        "num_decode_tokens": rows,
    }
    slots = torch.zeros(rows, dtype=torch.int64)
    told |= {"slot_mapping": slots, "max_seq_len": max(LENS), "decode": decode}
    vars(metadata).update(told)
    context = SimpleNamespace(
        attn_metadata={"indexer": metadata}, cudagraph_runtime_mode=None
    )
    found: list[int] = []

    def score(q: Any, *_: Any, **__: Any) -> torch.Tensor:
        found.append(len(q[0]))
        return torch.zeros(rows, entries)

    replaced: dict[str, Any] = {
        "current_platform": layout.another_platform(module.current_platform),
        "get_forward_context": lambda: context,
        "fp8_fp4_paged_mqa_logits": score,
        "kv_cache_as_quant_view": lambda cache, *_: cache,
        "get_indexer_topk": lambda _: lambda logits, *_: found.append(len(logits)),
    }
    if hasattr(module, "as_fp32_logits"):
        replaced["as_fp32_logits"] = lambda logits, *_: logits
        replaced["mqa_logits_mx_inputs"] = lambda q, scale, weights: (scale, weights)
    for name, value in replaced.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(layout.module("vllm.envs"), BOUND, 1)
    q = torch.zeros(rows, heads, 128).to(torch.float8_e4m3fn)
    given: dict[str, Any] = {
        "hidden_states": torch.zeros(rows, 1),
        "k_cache_prefix": "indexer",
        "kv_cache": torch.zeros(1, 64, 132, dtype=torch.uint8),
        "q_quant": q,
        "q_scale": None,
        "k": None,
        "weights": torch.zeros(rows, heads),
        "quant_block_size": 128,
        "scale_fmt": None,
        "topk_tokens": 16,
        "head_dim": 128,
        "max_model_len": entries,
        "total_seq_lens": 0,
        "topk_indices_buffer": torch.zeros(rows, 16, dtype=torch.int32),
        "skip_k_cache_insert": True,
        "use_pcp": False,
        "dense_mha_metadata_layer_name": "",
    }
    known = signature(module.sparse_attn_indexer).parameters
    of_newer = {"pcp_shard_decode_requests": False}
    given |= {name: value for name, value in of_newer.items() if name in known}
    module.sparse_attn_indexer(**given)
    assert found == [rows, rows]
