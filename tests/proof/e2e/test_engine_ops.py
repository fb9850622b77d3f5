# SPDX-License-Identifier: Apache-2.0
"""The stand-ins of the engines: the device's generator, FP8 blocks, and log1p."""

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from proof.e2e.inside import engine_ops


def test_the_generator_is_a_seed_and_an_offset() -> None:
    generator = engine_ops.Generators()[None]
    state = generator.get_state()
    seed, _ = state.view(torch.int64).tolist()
    state.view(torch.int64)[1] = 8
    generator.set_state(state)
    assert generator.get_state().view(torch.int64).tolist() == [seed, 8]


def test_blocks_of_fp8_weights() -> None:
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 2], dtype=torch.int32)
    rows = torch.randn(5, 256, dtype=torch.bfloat16)
    weights = torch.randn(3, 256, 384).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3)
    product = torch.empty(5, 384, dtype=torch.bfloat16)
    engine_ops.grouped_gemm(
        rows, None, weights, scales, None, product, counts, 384, 256, 3
    )
    spread = scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
    dense = weights.double() * spread
    wanted = torch.cat((rows[:3].double() @ dense[0], rows[3:].double() @ dense[2]))
    assert (product.double() - wanted).norm() < 5e-3 * wanted.norm()


def test_log1p_of_a_block() -> None:
    values = np.array([-0.75, -1e-7, 0.0, 2.0], dtype=np.float32)
    block = tl.core.tensor(
        interpreter.TensorHandle(values, tl.float32), tl.block_type(tl.float32, [4])
    )
    found = engine_ops.log1p(block)
    assert found.type == block.type and found.handle.data.dtype == np.float32
    wanted = np.log1p(values.astype(np.float64))
    assert np.allclose(found.handle.data, wanted, rtol=1e-6, atol=0)
