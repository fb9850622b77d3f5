# SPDX-License-Identifier: Apache-2.0
"""Sparse decode over FP8 pages against float64, on both devices' configurations."""

import math

import pytest
import torch
from compare import assert_within
from decode_calls import (
    ERROR,
    SCALE,
    batch,
    check,
    expected_of,
    use,
)
from fp8_pages import empty_pages, filled_pages, sparse_memory, write_token
from loads import recording_loads

from kernels.xpu_dsv4.mla import _merge as merge
from kernels.xpu_dsv4.mla import sparse_decode as decode


@pytest.mark.parametrize(
    ("tokens", "heads", "topk", "window", "blocks"),
    [
        pytest.param(*case, id="T{}-H{}-K{}-W{}-B{}".format(*case))
        for case in [
            (2, 16, 70, 33, (3, 64, 2, 64)),
            (1, 64, 512, 128, (9, 64, 3, 64)),
            (1, 128, 1024, 128, (20, 64, 3, 64)),
            (2, 128, 37, 11, (40, 2, 2, 64)),
            (3, 5, 0, 128, (1, 1, 4, 64)),
            (2, 1, 63, 1, (12, 7, 3, 7)),
            (1, 33, 111, 63, (1, 256, 3, 64)),
            (1, 100, 17, 128, (1, 64, 1, 256)),
            (1, 8, 1, 0, (1, 1, 1, 1)),
            (4, 64, 70, 33, (3, 53, 2, 61)),
            (74, 5, 20, 9, (5, 61, 3, 69)),
            (321, 2, 11, 6, (5, 69, 3, 53)),
        ]
    ],
)
def test_shapes(tokens, heads, topk, window, blocks, device):
    check(batch(tokens, heads, topk, window, device, blocks=blocks))


@pytest.mark.parametrize("splits", [1, 2, 3, 8, 20])
def test_splits_with_empty_parts(splits, monkeypatch, device):
    use(monkeypatch, splits=splits)
    arguments = batch(4, 16, 40, 20, device, seed=splits)
    arguments["topk_lens"].copy_(torch.tensor([40, 3, 0, 0]))
    arguments["swa_lens"].copy_(torch.tensor([20, 0, 1, 0]))
    workspace = torch.empty(4 * 16 * splits * 514, device=device)
    actual = check(arguments, workspace)
    assert not actual[3].any()


@pytest.mark.parametrize("splits", [2, 3])
def test_partials_give_the_log_of_the_sum(splits, monkeypatch, device):
    """What a merge with other partials would need: maxima and sums, in base 2."""
    use(monkeypatch, splits=splits)
    arguments = batch(3, 16, 70, 40, device)
    arguments["topk_lens"].copy_(torch.tensor([70, 1, 0]))
    rows = 3 * 16 * splits
    workspace = torch.empty(rows * 514, device=device)
    check(arguments, workspace)
    states = workspace[rows * 512 :].view(3, 16, splits, 2).double().cpu()
    largest, total = states.unbind(-1)
    lse = (largest + total.log2()).mul(math.log(2)).logsumexp(-1)
    torch.testing.assert_close(lse, expected_of(arguments)[2], rtol=1e-5, atol=1e-5)


def test_replay_of_a_graph_with_other_inputs(device):
    if device.type != "cuda":
        pytest.skip("graphs are captured on a GPU only")
    arguments = batch(4, 16, 70, 33, device)
    size = decode.sparse_decode_workspace_size(4, 16, 103)
    workspace = torch.empty(size, device=device)
    check(arguments, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode.xpu_sparse_decode_fp8(**arguments, workspace=workspace)
    other = batch(4, 16, 70, 33, device, seed=1)
    other["topk_lens"].copy_(torch.tensor([70, 0, 3, 64]))
    for name, value in other.items():
        if isinstance(value, torch.Tensor) and "cache" not in name:
            arguments[name].copy_(value)
    arguments["out"].fill_(float("nan"))
    graph.replay()
    expected, magnitude, _ = expected_of(arguments)
    bound = ERROR * (expected.abs() + magnitude)
    assert_within(arguments["out"].cpu(), expected, bound)


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_by_pointers(splits, monkeypatch, device):
    use(monkeypatch, splits=splits, q_blocks=False)
    check(batch(2, 20, 40, 20, device))


@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("tokens", [1, 2])
def test_fewest_rows_with_splits(tokens, heads, monkeypatch, device):
    use(monkeypatch, splits=2)
    check(batch(tokens, heads, 40, 20, device))


@pytest.mark.parametrize("splits", [1, 2])
def test_a_score_of_nan_gives_nan(splits, monkeypatch, device):
    """A row that cannot be computed must not look like a row without keys."""
    use(monkeypatch, splits=splits)
    arguments = batch(2, 16, 40, 20, device)
    expected = check(arguments)
    arguments["q"][1, 3, 5] = float("nan")
    decode.xpu_sparse_decode_fp8(**arguments)
    actual = arguments["out"].cpu()
    assert bool(actual[1, 3].isnan().all())
    actual[1, 3] = expected[1, 3]
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("heads", [16, 64])
def test_scores_that_rise_from_tile_to_tile(heads, splits, monkeypatch, device):
    """By less and by more than the maximum may lag behind; other heads, other rises."""
    use(monkeypatch, splits=splits)
    arguments = batch(1, heads, 64, 128, device)
    last_dim = 448 + 2 * 63  # bytes before it
    for name, indices in (
        ("kv_cache", "topk_indices"),
        ("swa_kv_cache", "swa_indices"),
    ):
        width = arguments[indices].shape[1]
        arguments[indices].copy_(torch.arange(width))
        levels = torch.tensor([0, 1, 2, 1.75, 4, 12, 3, 40]).repeat_interleave(16)
        for slot, level in enumerate(levels[:width, None].bfloat16()):
            page = arguments[name][slot // 64].reshape(-1)
            at = slot % 64 * 576 + last_dim
            page[at : at + 2] = level.view(torch.uint8).to(device)
    # A step of one level raises the scores of a head by up to 12.6, in base 2.
    steps = torch.linspace(-2.4, 12.6, heads) * math.log(2) / SCALE
    arguments["q"] /= 64
    arguments["q"][..., 511] = steps
    check(arguments)


def test_hard_indices(device):
    arguments = batch(6, 16, 48, 20, device)
    slots = 3 * 64
    hard = [-1, -2, -(2**31), 2**31 - 1, slots, slots + 1, -slots, 0, slots - 1]
    arguments["topk_indices"][0, : len(hard)] = torch.tensor(hard, dtype=torch.int32)
    arguments["topk_indices"][1, :] = -1
    arguments["topk_indices"][2, :33] = -1
    arguments["swa_indices"][2, :] = 2 * 64
    arguments["topk_indices"][3, :] = -1
    arguments["swa_indices"][3, :] = -1
    arguments["topk_indices"][4, ::2] = 2**31 - 1
    arguments["swa_indices"][5, :17] = -(2**31)
    actual = check(arguments)
    assert not actual[3].any()


def test_wide_int64_indices(device):
    arguments = batch(2, 16, 20, 20, device)
    for name in ("topk_indices", "swa_indices", "topk_lens", "swa_lens"):
        arguments[name] = arguments[name].long()
    arguments["topk_indices"][0, :3] = torch.tensor([2**32, -(2**40), 2**32 + 5])
    arguments["topk_indices"] = arguments["topk_indices"].unsqueeze(1)
    check(arguments)


def test_lengths_are_clamped(device):
    arguments = batch(4, 16, 20, 20, device)
    arguments["topk_lens"].copy_(torch.tensor([-5, 0, 20, 7]))
    arguments["swa_lens"].copy_(torch.tensor([3, 0, -1, 20]))
    expected = check(arguments)
    arguments["topk_lens"].copy_(torch.tensor([-5, 0, 2000, 7]))
    arguments["swa_lens"].copy_(torch.tensor([3, 0, -1, 2**31 - 1]))
    decode.xpu_sparse_decode_fp8(**arguments)
    assert torch.equal(arguments["out"].cpu(), expected)
    for name, wide in (
        ("topk_lens", [-(2**32) + 5, 0, 2**32, 7]),
        ("swa_lens", [3, -(2**40), -1, 2**32 + 1]),
    ):
        arguments[name] = torch.tensor(wide, device=device)
    decode.xpu_sparse_decode_fp8(**arguments)
    assert torch.equal(arguments["out"].cpu(), expected)


@pytest.mark.parametrize("splits", [1, 2])
def test_sinks(splits, monkeypatch, device):
    use(monkeypatch, splits=splits)
    arguments = batch(3, 6, 20, 9, device)
    arguments["swa_lens"][1] = 0
    arguments["topk_lens"][1] = 0
    sinks = [float("inf"), float("-inf"), 0.0, 80.0, -80.0, 3.0]
    arguments["attn_sink"] = torch.tensor(sinks, device=device)
    actual = check(arguments)
    assert not actual[:, 0].any() and not actual[1].any()
    arguments["attn_sink"] = None
    without = check(arguments)
    assert torch.equal(without[:, 1], actual[:, 1])
    assert not torch.equal(without[0, 3], actual[0, 3])


def test_scores_far_apart(device):
    arguments = batch(2, 16, 40, 20, device)
    arguments["softmax_scale"] = 20.0
    check(arguments)


def test_strided_tensors(device):
    arguments = batch(3, 6, 20, 9, device)
    expected = check(arguments)
    wide = torch.full((3, 8, 640), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, 1:7, 64:576] = arguments["q"]
    arguments["q"] = wide[:, 1:7, 64:576]
    target = torch.full((3, 9, 600), 7.0, dtype=torch.bfloat16, device=device)
    arguments["out"] = target[:, 2:8, 8:520]
    for name in ("topk_indices", "swa_indices"):
        rows = arguments[name]
        padded = torch.full((3, 1, rows.shape[1] + 5), -9, dtype=torch.int32)
        padded = padded.to(device)
        padded[:, 0, 2 : 2 + rows.shape[1]] = rows
        arguments[name] = padded[:, :, 2 : 2 + rows.shape[1]]
    for name, blocks in (("kv_cache", 3), ("swa_kv_cache", 2)):
        cache = empty_pages(blocks, 64, device, extra=8 * 73)
        cache.copy_(arguments[name])
        arguments[name] = cache
    decode.xpu_sparse_decode_fp8(**arguments)
    assert torch.equal(arguments["out"].cpu(), expected)
    target[:, 2:8, 8:520] = 7.0
    assert bool((target == 7.0).all())


@pytest.mark.parametrize("offset", [0, 32, 3], ids="column {}".format)
def test_columns_of_a_wider_tensor(offset, monkeypatch, device):
    """q is loaded by blocks where its rows are aligned, and by pointers elsewhere."""
    blocks = []
    kernel = decode._decode_kernel

    class Spied:
        def __getitem__(self, grid):
            def launch(*args, **options):
                blocks.append(options["Q_BLOCKS"])
                return kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(decode, "_decode_kernel", Spied())
    arguments = batch(3, 6, 20, 9, device)
    wide = torch.full((3, 6, 544), float("nan"), dtype=torch.bfloat16, device=device)
    wide[:, :, offset : offset + 512] = arguments["q"]
    arguments["q"] = wide[:, :, offset : offset + 512]
    check(arguments)
    assert blocks == [offset != 3]


def test_caches_beyond_two_gibibytes(device):
    blocks, stride = 57_500, 37_440
    raw = sparse_memory(blocks * stride, device)
    cache = raw.as_strided((blocks, 64, 584), (stride, 584, 1))
    arguments = batch(1, 3, 4, 4, device)
    last = blocks * 64 - 1
    chosen = [last, last - 1, 57_400 * 64 + 3, 5]
    generator = torch.Generator().manual_seed(3)
    for slot in chosen:
        write_token(cache, slot, generator)
    arguments["kv_cache"] = arguments["swa_kv_cache"] = cache
    for name in ("topk_indices", "swa_indices"):
        arguments[name] = torch.tensor([chosen], dtype=torch.int32, device=device)
    check(arguments)


def test_at_most_two_launches_and_no_allocation(monkeypatch, device):
    launches = []

    class Counted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            launches.append(grid)
            return self.kernel[grid]

    monkeypatch.setattr(decode, "_decode_kernel", Counted(decode._decode_kernel))
    monkeypatch.setattr(merge, "_merge_kernel", Counted(merge._merge_kernel))
    arguments = batch(1, 16, 70, 9, device)
    size = decode.sparse_decode_workspace_size(4, 16, 79)
    workspace = torch.empty(size, device=device)
    monkeypatch.setattr(torch, "empty", None)
    decode.xpu_sparse_decode_fp8(**arguments, workspace=workspace)
    assert 1 <= len(launches) <= 2


def test_pages_may_have_an_axis_of_one_head(device):
    arguments = batch(2, 6, 20, 9, device)
    expected = check(arguments)
    for name in ("kv_cache", "swa_kv_cache"):
        arguments[name] = arguments[name].unsqueeze(2)
    decode.xpu_sparse_decode_fp8(**arguments)
    assert torch.equal(arguments["out"].cpu(), expected)


def test_no_tokens(device):
    arguments = batch(1, 4, 3, 3, device)
    for name in ("q", "out", "topk_indices", "swa_indices", "topk_lens", "swa_lens"):
        arguments[name] = arguments[name][:0]
    decode.xpu_sparse_decode_fp8(**arguments)


@pytest.mark.parametrize("heads", [16, 128])
def test_bytes_requested(heads, device):
    """584 bytes a valid key and head tile, each of them inside a valid token."""
    if device.type != "cpu":
        pytest.skip("loads are counted by the interpreter, which runs on a CPU only")
    arguments = batch(2, heads, 70, 40, device)
    arguments["topk_indices"][0, 5:9] = -1
    arguments["topk_indices"][1, 0] = 2**31 - 1
    arguments["topk_lens"][1] = 50
    arguments["swa_lens"][0] = 3
    valid, keys = {"kv_cache": set(), "swa_kv_cache": set()}, 0
    for cache, indices, lens, count in (
        ("kv_cache", "topk_indices", "topk_lens", 192),
        ("swa_kv_cache", "swa_indices", "swa_lens", 128),
    ):
        for row, length in zip(arguments[indices], arguments[lens], strict=True):
            good = [s for s in row[:length].tolist() if 0 <= s < count]
            valid[cache].update(good)
            keys += len(good)
    with recording_loads() as loads:
        decode.xpu_sparse_decode_fp8(**arguments)
    config = decode.decode_config(2, heads, 110)
    tiles = -(-heads // config.block_h)
    requested = 0
    for cache, slots in valid.items():
        allowed = set()
        for slot in slots:
            page, position = divmod(slot, 64)
            data = page * 37_440 + position * 576
            scale = page * 37_440 + 64 * 576 + position * 8
            allowed.update(range(data, data + 576), range(scale, scale + 8))
        touched = loads.within(arguments[cache])
        assert not set(touched) - allowed, f"{cache}: bytes outside valid tokens"
        requested += sum(touched.values())
    print(f"head tile {config.block_h}: {requested / keys / tiles:.1f} bytes per key")
    assert requested <= 1.05 * keys * 584 * tiles


def test_random_lengths_slots_and_sizes(device):
    hypothesis = pytest.importorskip("hypothesis", reason="hypothesis is not installed")
    from hypothesis import strategies as st

    caches = {
        size: filled_pages(blocks, size, size, device)
        for size, blocks in ((2, 9), (7, 5), (64, 2))
    }
    slot = st.one_of(st.integers(-3, 140), st.integers(-(2**31), 2**31 - 1))

    @hypothesis.settings(max_examples=12, deadline=None, derandomize=True)
    @hypothesis.given(st.data())
    def run(data):
        tokens = data.draw(st.integers(1, 3), label="tokens")
        heads = data.draw(st.integers(1, 9), label="heads")
        arguments = batch(tokens, heads, 1, 1, device)
        for cache, indices, lens in (
            ("kv_cache", "topk_indices", "topk_lens"),
            ("swa_kv_cache", "swa_indices", "swa_lens"),
        ):
            width = data.draw(st.integers(1, 40), label="width")
            row = st.lists(slot, min_size=width, max_size=width)
            rows = data.draw(st.lists(row, min_size=tokens, max_size=tokens))
            counts = st.lists(st.integers(0, width), min_size=tokens, max_size=tokens)
            arguments[cache] = caches[data.draw(st.sampled_from([2, 7, 64]))]
            arguments[indices] = torch.tensor(rows, dtype=torch.int32, device=device)
            arguments[lens] = torch.tensor(
                data.draw(counts), dtype=torch.int32, device=device
            )
        check(arguments)

    run()
