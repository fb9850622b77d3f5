# SPDX-License-Identifier: Apache-2.0
"""Which kernels CUDA's forms launch: those in Gluon on Hopper, where they apply.

The kernels in Gluon run on a GPU alone: there the tests of decode and prefill run them.
"""

from importlib import import_module

import pytest
import torch

from kernels.xpu_dsv4.sparse_prefill import xpu_sparse_prefill

forms = import_module("kernels.on_cuda.forms")
PREFILL = forms.hopper_prefill_kernel, forms.few_heads_kernel


class Kernel:
    """Remembers its launches."""

    def __init__(self, name, launches):
        self.name, self.launches = name, launches

    def __getitem__(self, grid):
        def launch(*arguments, **options):
            self.launches.append((self.name, grid, arguments, options))

        return launch


@pytest.fixture
def launches(monkeypatch):
    """Launches on what passes for a Hopper GPU of four multiprocessors."""
    made = []
    for module, name, form in forms.forms():
        monkeypatch.setattr(module, name, form)
    names = ("hopper_prefill_kernel", "few_heads_kernel", "_prefill_kernel")
    for name in (*names, "hopper_decode_kernel", "_decode_kernel"):
        monkeypatch.setattr(forms, name, Kernel(name, made))
    monkeypatch.setattr(forms, "_hopper_programs", lambda device: 4)
    return made


def prefill(heads, kv):
    q = torch.zeros(3, heads, 512, dtype=torch.bfloat16)
    indices = torch.zeros(3, 64, dtype=torch.int32)
    xpu_sparse_prefill(q, kv, indices, 1.0)


@pytest.mark.parametrize(
    ("heads", "kernel", "grid"),
    [
        (128, "hopper_prefill_kernel", (6,)),
        (17, "hopper_prefill_kernel", (3,)),
        (16, "few_heads_kernel", (3,)),
    ],
)
def test_prefill_of_packed_rows_runs_in_gluon(launches, heads, kernel, grid):
    prefill(heads, torch.zeros(70, 1, 512, dtype=torch.bfloat16))
    ((name, shape, arguments, options),) = launches
    assert (name, shape, arguments[0]) == (kernel, grid, grid[0])
    assert options["BLOCK_H"] == (64 if heads > 16 else 16)


def test_few_heads_take_no_more_programs_than_multiprocessors(launches, monkeypatch):
    monkeypatch.setattr(forms, "_hopper_programs", lambda device: 2)
    prefill(8, torch.zeros(70, 1, 512, dtype=torch.bfloat16))
    ((_, grid, arguments, _),) = launches
    assert grid == (2,) and arguments[0] == 3


def test_rows_with_gaps_and_other_gpus_run_the_form_in_triton(launches, monkeypatch):
    gaps = torch.zeros(70, 1, 520, dtype=torch.bfloat16)[..., :512]
    prefill(64, gaps)
    monkeypatch.setattr(forms, "_hopper_programs", lambda device: 0)
    prefill(64, gaps.contiguous())
    assert [launch[0] for launch in launches] == 2 * ["_prefill_kernel"]


@pytest.mark.parametrize(
    ("block_h", "scales", "kernel"),
    [
        (64, None, "hopper_decode_kernel"),
        (16, None, "_decode_kernel"),
        (64, object(), "_decode_kernel"),
    ],
)
def test_decode_of_64_heads_to_bf16_runs_in_gluon(launches, block_h, scales, kernel):
    arguments = [torch.zeros(1)] * 25 + [scales] + [None] * 5
    names = ("KV_BLOCK_SIZE", "SWA_BLOCK_SIZE", "HAS_TOPK", "HAS_SINK", "SPLIT")
    options = dict.fromkeys((*names, "BLOCK_N", "num_warps"), 1)
    forms._Decode()[7,](*arguments, **options, BLOCK_H=block_h)
    assert [launch[:2] for launch in launches] == [(kernel, (7,))]


def test_kernels_in_gluon_take_the_arguments_of_those_in_triton():
    triton = import_module("kernels.on_cuda._prefill_kernel")._prefill_kernel
    for kernel in PREFILL:
        assert kernel.arg_names[1:17] == triton.arg_names[:16]
    triton = import_module("kernels.on_cuda._decode_kernel")._decode_kernel
    assert forms.hopper_decode_kernel.arg_names[:25] == triton.arg_names[:25]
