# SPDX-License-Identifier: Apache-2.0
"""The insert rotates a query without its norm, as V4.1 has it, and with it, as V4."""

import pytest
import torch
from helpers import layout, pin_ops
from helpers import reference_attention as reference

TOLERANCE = 4e-3
OP = "deepseek_qnorm_rope_kv_insert"
EPSILON = 1e-6
BLOCK_SIZE = 32
SLOTS = (5, -1, 64, 33)


class Insert:
    """Random tokens for the slots, with queries of another size in each head."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        tokens, dim, device = len(SLOTS), reference.HEAD_DIM, layout.device()
        sizes = torch.tensor([0.01, 1.0, 30.0])[:, None]
        q = (torch.randn(tokens, 3, dim) * sizes).to(torch.bfloat16)
        kv = torch.randn(tokens, dim).to(torch.bfloat16)
        angles = torch.rand(300, 32)
        table = torch.cat((angles.cos(), angles.sin()), -1)
        positions = torch.arange(100, 100 + tokens)
        pages = torch.zeros(3, BLOCK_SIZE * 584, dtype=torch.uint8, device=device)
        self.cache = reference.as_cache(pages, BLOCK_SIZE)
        self.q, self.given = q.clone().to(device), q
        self.args = (kv.to(device), self.cache, torch.tensor(SLOTS).to(device))
        self.args += (positions.to(device), table.to(device), EPSILON, BLOCK_SIZE)
        self.table = table[positions]
        self.expected_kv = reference.quantize(reference.rotate(kv, self.table))

    def run(self, *norm: bool) -> None:
        layout.module("vllm._xpu_ops")
        insert = torch.ops.vllm.xpu_deepseek_qnorm_rope_kv_insert
        try:
            insert(self.q, *self.args, *norm)
        except RuntimeError as error:
            pytest.fail(str(error))

    def check(self, expected: torch.Tensor) -> None:
        rotated = reference.rotate(expected, self.table[:, None])
        for head in range(3):
            error = reference.relative(self.q[:, head], rotated[:, head])
            assert error < TOLERANCE, f"head {head} of the query is off by {error:.0%}"
        for row, slot in enumerate(SLOTS):
            if slot >= 0:
                stored = reference.read(self.cache.cpu(), *divmod(slot, BLOCK_SIZE))
                error = reference.relative(stored, self.expected_kv[row])
                assert error < TOLERANCE, (
                    f"the key of slot {slot} is off by {error:.0%}"
                )


def test_without_a_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = Insert()
    with pin_ops.recorded(monkeypatch, OP) as calls:
        insert.run(False)
    assert not calls, "the op norms"
    insert.check(insert.given.double())


def test_rows_that_pad_a_batch_have_no_slot() -> None:
    insert = Insert()
    kv, cache, slots = insert.args[:3]
    insert.args = (kv, cache, slots[:1], *insert.args[3:])
    insert.run(False)
    written = [
        s for s in range(96) if reference.read(cache.cpu(), *divmod(s, 32)).any()
    ]
    assert written == [5]


@pytest.mark.unchanged
def test_the_norm_stays_with_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = Insert()
    with pin_ops.recorded(monkeypatch, OP) as calls:
        insert.run()
    assert calls == [OP]
    insert.check(reference.normalize(insert.given, EPSILON))
