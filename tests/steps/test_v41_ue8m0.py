# SPDX-License-Identifier: Apache-2.0
"""A UE8M0 scale of V4.1's keys is the least power of two that keeps its block within
e4m3 or e2m1, on a device whose log2 may be a little too large, too."""

import pytest
import torch
from helpers import e2m1_assembly, layout
from helpers.coarse_log2 import (
    E2M1,
    at_powers,
    blocks,
    check,
    choose_on_another_platform,
    coarse_log2,  # noqa: F401
    from_bytes,
    plain_rope,
)

OPS = "vllm.models.deepseek_v41.common.ops"
EXPONENTS = torch.tensor([-13, -9, -1, 0, 1, 2, 3])
PAGE = 64


def compressed_scales(amax: torch.Tensor) -> torch.Tensor:
    """The scales of an entry whose seven blocks have these amax."""
    device = layout.device()
    latent = torch.zeros(1, 512, dtype=torch.bfloat16, device=device)
    latent[0, :448] = blocks(amax, 64).flatten()
    cache = torch.zeros(1, PAGE, 584, dtype=torch.uint8, device=device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    insert = layout.module(f"{OPS}.fused_compress_quant_cache").rope_quant_insert
    insert(latent, token, plain_rope(1), cache, token, 1)
    return from_bytes(cache.flatten()[PAGE * 576 :][:7])


def index_scales(amax: torch.Tensor, fp4: bool) -> torch.Tensor:
    """The scales of index keys: one of each, or four in MXFP4. The norm's weight is the
    key, since all that it norms is 1."""
    device = layout.device()
    data, scale = (64, 4) if fp4 else (128, 4)
    store = layout.module(f"{OPS}.indexer_k_store").indexer_k_norm_rope_store
    token = torch.zeros(1, dtype=torch.int64, device=device)
    ones = torch.ones(1, 128, dtype=torch.bfloat16, device=device)
    found = []
    for some in amax.split(4 if fp4 else 1):
        weight = blocks(some, 128 // len(some)).flatten().to(device)
        cache = torch.zeros(1, PAGE, data + scale, dtype=torch.uint8, device=device)
        with e2m1_assembly.interpreted():
            store(ones, token, plain_rope(1), weight, 0.0, cache, token, 1, fp4)
        row = cache.flatten()[PAGE * data :][:scale]
        found.append(from_bytes(row) if fp4 else row.view(torch.float32).cpu())
    return torch.cat(found)


@pytest.fixture
def another_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels are those of a platform that is not XPU."""
    names = ("fused_compress_quant_cache", "indexer_k_store")
    choose_on_another_platform(monkeypatch, *(f"{OPS}.{name}" for name in names))


@pytest.mark.usefixtures("coarse_log2")
def test_compressed_keys_at_a_power_of_two() -> None:
    check(compressed_scales(at_powers(EXPONENTS)), EXPONENTS)


@pytest.mark.usefixtures("coarse_log2")
@pytest.mark.parametrize("fp4", [False, True], ids=["fp8", "mxfp4"])
def test_index_keys_at_a_power_of_two(fp4: bool) -> None:
    exponents = torch.tensor([-9, -1, 0, 1, 2, 3, 5, 8])
    largest = (E2M1,) if fp4 else ()
    check(index_scales(at_powers(exponents, *largest), fp4), exponents)


@pytest.mark.unchanged
@pytest.mark.any_platform
@pytest.mark.usefixtures("coarse_log2", "another_platform")
def test_other_platforms_keep_their_log2() -> None:
    check(compressed_scales(at_powers(EXPONENTS)), EXPONENTS + 1)


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_an_exact_log2_and_the_bits_agree() -> None:
    """For every mantissa of a BF16 amax."""
    amax = torch.arange(128, 256).float() / 128
    least = torch.where(amax > 1.75, -7, -8)
    for some, wanted in zip(amax.split(7), least.split(7), strict=True):
        filled = torch.nn.functional.pad(some, (0, 7 - len(some)), value=1.0)
        check(compressed_scales(filled)[: len(some)], wanted)
