# SPDX-License-Identifier: Apache-2.0
"""CUDA's decode of a batch whose last wave of programs would be small."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from decode_calls import batch, check, decode
from fp8_operands import check_operands, of_call, poisoned

from kernels.on_cuda import configs, forms, use
from kernels.xpu_dsv4._decode_config import sparse_decode_workspace_size


@pytest.mark.parametrize(
    ("tokens", "heads", "keys", "whole"),
    [
        (200, 128, 1152, 198),
        (128, 128, 1152, 128),
        (135, 64, 640, 132),
        (132, 64, 640, 132),
        (64, 64, 640, 64),
        (300, 16, 640, 264),
        (321, 2, 17, 321),
    ],
)
def test_the_first_tokens_fill_whole_waves(tokens, heads, keys, whole):
    assert configs.tokens_of_whole_waves(tokens, heads, keys) == whole


def test_callers_that_were_imported_before_run_the_form(monkeypatch):
    kernels: Any = ModuleType("kernels.one")
    caller: Any = ModuleType("vllm.caller")
    kernels.decode = caller.decode = object()
    form = object()
    monkeypatch.setitem(sys.modules, "vllm.caller", caller)
    chosen = [(kernels, "decode", form)]
    monkeypatch.setattr(sys.modules[use.__module__], "forms", lambda package: chosen)
    use()
    assert kernels.decode is form and caller.decode is form


@pytest.mark.parametrize("topk", [0, 40])
def test_tokens_behind_whole_waves_share_their_keys(topk, monkeypatch, device):
    for module, name, form in forms():
        monkeypatch.setattr(module, name, form)
    monkeypatch.setattr(configs, "tokens_of_whole_waves", lambda *sizes: 3)
    arguments = batch(5, 16, topk, 160, device)
    arguments["swa_lens"].copy_(torch.tensor([160, 0, 7, 130, 0]))
    arguments["attn_sink"][:2] = torch.tensor([float("inf"), float("-inf")])
    size = sparse_decode_workspace_size(5, 16, topk + 160)
    attention = check(arguments, torch.empty(size, device=device))
    operands = poisoned(5, 16, 8, device)
    decode.xpu_sparse_decode_fp8(**arguments | {"out": of_call(operands)})
    check_operands(operands, attention)
