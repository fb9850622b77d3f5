# SPDX-License-Identifier: Apache-2.0
"""Sparse decode says which argument is wrong."""

import pytest
import torch
from decode_calls import batch, use

from kernels.xpu_dsv4.mla import sparse_decode as decode


def _change(name, change):
    return lambda arguments: arguments.update({name: change(arguments[name])})


@pytest.mark.parametrize(
    ("names", "change"),
    [
        ("q.dtype", _change("q", lambda x: x.float())),
        ("q.shape", _change("q", lambda x: x[..., :448])),
        ("q.shape", _change("q", lambda x: x.repeat(1, 43, 1))),
        ("q.stride", _change("q", lambda x: x.mT.contiguous().mT)),
        ("out.dtype", _change("out", lambda x: x.half())),
        ("out.shape", _change("out", lambda x: x[:1])),
        ("kv_cache.dtype", _change("kv_cache", lambda x: x.view(torch.int8))),
        ("kv_cache.shape", _change("kv_cache", lambda x: x[..., :576])),
        ("swa_kv_cache.shape", _change("swa_kv_cache", lambda x: x[0])),
        ("swa_kv_cache.stride", _change("swa_kv_cache", lambda x: x[:, ::2])),
        ("topk_indices.dtype", _change("topk_indices", lambda x: x.float())),
        ("topk_indices.dtype", _change("topk_indices", lambda x: x.long())),
        ("topk_indices.shape", _change("topk_indices", lambda x: x[:1])),
        ("topk_lens", _change("topk_lens", lambda x: None)),
        ("topk_indices", _change("topk_indices", lambda x: None)),
        ("kv_cache", _change("kv_cache", lambda x: None)),
        ("topk_lens.shape", _change("topk_lens", lambda x: x[:1])),
        ("swa_lens.dtype", _change("swa_lens", lambda x: x.float())),
        ("attn_sink.shape", _change("attn_sink", lambda x: x[:2])),
        ("attn_sink.dtype", _change("attn_sink", lambda x: x.double())),
        ("swa_lens.device", _change("swa_lens", lambda x: x.to("meta"))),
        ("head_dim", _change("head_dim", lambda x: 576)),
        ("nope_head_dim", _change("nope_head_dim", lambda x: 512)),
        ("rope_head_dim", _change("rope_head_dim", lambda x: 0)),
    ],
)
def test_bad_arguments(names, change, device):
    arguments = batch(2, 3, 4, 4, device)
    change(arguments)
    with pytest.raises(ValueError, match=names.replace(".", r"\.")):
        decode.xpu_sparse_decode_fp8(**arguments)


def test_bad_workspace(monkeypatch, device):
    use(monkeypatch, splits=2)
    arguments = batch(2, 3, 4, 4, device)
    for workspace in (
        torch.empty(2 * 3 * 2 * 514 - 1, device=device),
        torch.empty(20_000, dtype=torch.bfloat16, device=device),
        torch.empty(20_000, device=device)[::2],
    ):
        with pytest.raises(ValueError, match="workspace"):
            decode.xpu_sparse_decode_fp8(**arguments, workspace=workspace)
