# SPDX-License-Identifier: Apache-2.0
"""One launch undoes the RoPE of the attention output."""

import pytest
from helpers import layout, pin_ops
from helpers import output_projection as projection

OP = "deepseek_inv_rope_bf16"


@pytest.mark.parametrize(
    "backend",
    [*layout.BLOCK_FP8_BACKENDS, *layout.TORCH_BLOCK_FP8, None],
    ids=lambda backend: f"FP8-{backend}" if backend else "BF16",
)
def test_one_launch_and_one_product(
    backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = projection.projected(backend, monkeypatch)
    projection.check(made)
    assert (made.launches == [OP]) == pin_ops.has(OP), made.launches
