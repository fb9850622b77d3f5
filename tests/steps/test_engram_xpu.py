# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1's Engram on XPU: tables in host memory, read by the device or gathered
by the CPU, and settings that cannot be served."""

import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import layout, model_configs
from helpers.cgroups import CACHED, LIMITS, lay_out
from helpers.engram_hashes import hash_state, multipliers, reference_hash
from helpers.engram_tables import (
    COLUMNS,
    DEAD,
    DIM,
    ENGRAM,
    drawn_ids,
    engram_layout,
    expected_rows,
    filled,
    looked_up,
    small_config,
    table,
    tables,
    unfilled,
)

OWN = f"{ENGRAM}_xpu"
HOST_MEMORY = "vllm.utils.host_memory"
CPU_GATHER = "VLLM_XPU_ENGRAM_CPU_GATHER"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""Containers of one host read the same here, and those of another do not."""


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An engine's configuration with Engram, current, inside a worker."""
    config = model_configs.vllm_config()
    config.model_config.hf_text_config = SimpleNamespace(num_hidden_layers=3)
    monkeypatch.delenv(CPU_GATHER, raising=False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    platform = layout.module("vllm.platforms").current_platform
    if hasattr(platform, "provide_pinned_memory"):
        platform.provide_pinned_memory()
    monkeypatch.setattr(
        torch.accelerator, "get_memory_info", lambda *_: (8 << 30, 16 << 30)
    )
    tables(), layout.module(ENGRAM)  # before a worker changes torch.cuda
    with model_configs.current(config), layout.worker():
        config.engram_config = layout.module("vllm.config.engram").EngramConfig()
        yield config


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table lies in five pieces, the last of which is not full."""
    if importlib.util.find_spec(OWN):
        monkeypatch.setattr(layout.module(OWN), "PIECE_BYTES", 1 << 18)


def test_a_worker_can_import_it(config: Any) -> None:
    """In a worker, XPU's model runner has put functions in place of classes."""
    spec = tables().__spec__
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_a_table_made_by_hand_is_read_by_the_device() -> None:
    """As the tests of CUDA make one, without `__init__`."""
    table = tables().ParallelEngramEmbedding
    assert table.__new__(table).cpu_gather is False


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("gather", ["0", "1"], ids=["device", "CPU"])
@pytest.mark.parametrize("tokens", [0, 1, 7, 65])
def test_rows(
    tokens: int, gather: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_GATHER, gather)
    made = table()
    ids = drawn_ids(made, tokens)
    # One layer's columns of the hashes of two.
    both = torch.stack((ids.roll(1, 0), ids), dim=1)
    assert torch.equal(looked_up(made, both[:, 1]).cpu(), expected_rows(made, ids))


@pytest.mark.usefixtures("small_pieces")
def test_both_paths_give_the_same_bytes(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = table()
    ids = drawn_ids(made, 33)
    by_device = looked_up(made, ids)
    monkeypatch.setenv(CPU_GATHER, "1")
    asked = []
    other = table()

    def mapped(tensor: torch.Tensor) -> torch.Tensor:
        asked.append(tensor)
        return tensor

    for module in {tables().__name__, OWN}:
        if importlib.util.find_spec(module):
            place = f"{module}.get_accelerator_view_from_cpu_tensor"
            monkeypatch.setattr(place, mapped)
    assert torch.equal(looked_up(other, ids), by_device)
    assert not asked, "host memory was mapped into the device"


def test_what_the_device_cannot_read(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Host memory, where there is no unified one: the CPU can gather."""
    monkeypatch.setattr(tables(), "is_uva_available", lambda: False)
    with pytest.raises(RuntimeError, match="requires UVA"):
        unfilled()
    assert not unfilled(cpu_offload=False).cpu_gather
    monkeypatch.setenv(CPU_GATHER, "1")
    assert unfilled().cpu_gather and not unfilled(cpu_offload=False).cpu_gather


@pytest.mark.usefixtures("small_pieces")
def test_dummy_weights_are_ones(config: Any) -> None:
    """No NaN of memory that nobody has written."""
    config.load_config.load_format = "dummy"
    made = unfilled()
    ids = drawn_ids(made, 300)
    owned = (ids >= 0) & (ids < made.part_num_embeddings)
    expected = owned[..., None].expand(-1, -1, DIM).bfloat16()
    assert torch.equal(looked_up(made, ids), expected)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("gather", ["0", "1"], ids=["device", "CPU"])
def test_a_rank_reads_its_heads(
    gather: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of five ranks: five heads of its own; the last has four and one that
    pads."""
    monkeypatch.setenv(CPU_GATHER, gather)
    kind = tables().ParallelEngramEmbedding
    whole = table()
    ids = drawn_ids(whole, 9)
    expected = expected_rows(whole, ids)
    bounds = [0, *torch.tensor(engram_layout().primes[0]).flatten().cumsum(0).tolist()]
    for rank in (1, 4):
        monkeypatch.setattr(kind, "_get_shard_info", lambda _, rank=rank: (5, rank))
        made = filled(table(), *whole.drawn)
        first, last = bounds[5 * rank], bounds[min(5 * rank + 5, COLUMNS)]
        out = torch.full((9, 5, DIM), float("nan"), dtype=torch.bfloat16)
        out = out.to(layout.device())
        made.lookup(ids, out)
        mine = ids[:, 5 * rank : 5 * rank + 5].cpu()
        inside = ((mine >= first) & (mine < last))[..., None]
        wanted = expected[:, 5 * rank : 5 * rank + 5] * inside
        assert torch.equal(out[:, : mine.shape[1]].cpu(), wanted)
        assert not out[:, mine.shape[1] :].any(), "a head that pads is not zero"


def layer(index: int = 0, described: Any = None) -> Any:
    """An Engram layer without its projection."""
    made = object.__new__(tables().Engram)
    torch.nn.Module.__init__(made)
    kind = layout.module(ENGRAM).EngramLayout
    made.embed_tokens = made._create_embedding(kind(described or small_config()), index)
    made._init_staging(16, DIM)
    return made


@pytest.mark.usefixtures("small_pieces")
def test_staged_rows_are_the_tables(config: Any) -> None:
    """What a layer reads was looked up on the stream that reads it."""
    made, drawn = layer(), table()
    filled(made.embed_tokens, *drawn.drawn)
    ids = drawn_ids(drawn, 5)
    made.use_sequence_parallel = False
    made.prepare_embeddings(ids)
    assert made._prefetch_stream is None
    assert torch.equal(made.embed(ids).cpu(), expected_rows(drawn, ids))


def test_memory_is_printed_once(
    config: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.INFO):
        layer(0)
        layer(1)
    lines = [line for line in caplog.messages if "Engram tables" in line]
    assert len(lines) == 1, f"not printed: {lines}"
    for part in ("GiB of host memory for 1 ranks", "8.00 GiB of this device"):
        assert part in lines[0]


def proc(file: str, field: str) -> int:
    """Bytes that the kernel's own count says."""
    (line,) = (x for x in Path("/proc", file).read_text().splitlines() if field in x)
    return int(line.split()[1]) << 10


def as_torch_pins(empty: Any) -> Any:
    """Powers of two, which are there at once."""

    def made(*shape: Any, **options: Any) -> torch.Tensor:
        if not options.get("pin_memory"):
            return empty(*shape, **options)
        size = (
            1 << (empty(*shape, **options | {"device": "meta"}).nbytes - 1).bit_length()
        )
        pinned = empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).fill_(1)
        wanted = empty(*shape, **options | {"device": "meta", "pin_memory": False})
        return pinned[: wanted.nbytes].view(wanted.dtype).view(wanted.shape)

    return made


def test_what_is_printed_is_what_proc_shows(
    config: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of two tables that take a quarter of a GiB, and of the host's free memory."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(torch, "empty", as_torch_pins(torch.empty))
    if importlib.util.find_spec(HOST_MEMORY):
        monkeypatch.setattr(layout.module(HOST_MEMORY), "CGROUPS", tmp_path)
    wide = small_config()
    wide.engram_vocab_size, wide.engram_num_embeddings = 1 << 16, [1 << 21] * 2
    before, free = proc("self/status", "VmRSS"), [proc("meminfo", "MemAvailable")]
    with caplog.at_level(logging.INFO):
        held = [layer(index, wide) for index in (0, 1)]
    grown = proc("self/status", "VmRSS") - before
    free.append(proc("meminfo", "MemAvailable"))
    lines = [r for r in caplog.records if "Engram tables" in r.msg]
    assert len(lines) == len(held) - 1, f"not printed: {lines}"
    pinned, left = (lines[0].args[place] * 2**30 for place in (0, 2))
    assert pinned == pytest.approx(grown, rel=0.02) and grown > 1 << 27
    assert min(free) * 0.95 < left < max(free) * 1.05


@pytest.mark.parametrize("ranks", [8, 4, 2, 1])
def test_pieces_of_flash(ranks: int) -> None:
    """V4.1-Flash has tables of 24 columns of 16 million rows of 264 bytes."""
    if not importlib.util.find_spec(OWN):
        pytest.fail("XPU cannot pin them in pieces")
    rows = 24 // ranks * 16_000_000
    sizes = layout.module(OWN).piece_sizes(rows, 256)
    assert max(sizes) <= 1 << 30
    pinned = sum(1 << (size - 1).bit_length() for size in sizes)
    assert rows * 264 <= sum(sizes) and pinned <= 1.02 * rows * 264


class Full:
    """A host with a thousand bytes left."""

    available = 1000


@pytest.mark.parametrize(
    ("offload", "missing"), [(True, "50.00"), (False, "49.50")], ids=["host", "device"]
)
def test_tables_that_do_not_fit(
    offload: bool, missing: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config.engram_config.cpu_offload = offload
    monkeypatch.setattr("psutil.virtual_memory", Full)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (2000, 4000))
    big = small_config()
    big.engram_vocab_size, big.engram_num_embeddings = 1 << 24, [1 << 30] * 2
    made = object.__new__(tables().Engram)
    torch.nn.Module.__init__(made)
    with pytest.raises(ValueError) as error:
        made._create_embedding(layout.module(ENGRAM).EngramLayout(big), 0)
    # Two tables of 24 heads of 2**24 rows and a few, 66 bytes each: 24.75 GiB, for
    # which 25 pieces of a GiB are pinned.
    assert f"{missing} GiB are missing" in str(error.value), "not refused in GiB"
    assert ("spread the ranks" if offload else "cpu_offload") in str(error.value)


@pytest.mark.parametrize("case", LIMITS)
def test_a_container_s_limit_counts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In GiB, of a host with 100 of them."""
    if not importlib.util.find_spec(HOST_MEMORY):
        pytest.fail("tables over the limit were not refused")
    own, folders, left = LIMITS[case]
    lay_out(tmp_path, own, folders)
    module = layout.module(HOST_MEMORY)
    monkeypatch.setattr(module, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(module, "OWN_CGROUP", tmp_path / "own")
    host = SimpleNamespace(available=100 << 30)
    monkeypatch.setattr("psutil.virtual_memory", lambda: host)
    expected = 100 << 30 if left is None else left << 30
    if left:
        expected += CACHED
    assert module.free_host_memory() == expected


@pytest.mark.parametrize(
    ("hosts", "stage", "offload", "needed"),
    [
        ("aaaa", 0, True, "52.00"),
        ("abab", 0, True, "26.00"),
        ("aabb", 0, True, "26.00"),
        ("aaab", 0, True, "39.00"),
        ("aabb", 1, False, "12.38"),
    ],
    ids=["one", "a rank of each stage", "a stage", "three and one", "device"],
)
def test_ranks_count_the_memory_of_their_host(
    hosts: str,
    stage: int,
    offload: bool,
    needed: str,
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two stages of two ranks: one table each, of which a rank has half the heads:
    12.375 GiB, for which 13 are pinned. Whoever starts the ranks decides
    on which host each runs. A rank counts its own device's alone."""
    config.engram_config.cpu_offload = offload
    parallel = config.parallel_config
    parallel.pipeline_parallel_size, parallel.tensor_parallel_size = 2, 2
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,1")
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 4)
    all_are_there(hosts, monkeypatch)
    monkeypatch.setattr("psutil.virtual_memory", Full)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (2000, 4000))
    big = small_config()
    big.engram_vocab_size, big.engram_num_embeddings = 1 << 24, [1 << 30] * 2
    group = layout.module("vllm.distributed").get_pp_group()
    monkeypatch.setattr(group, "rank_in_group", stage)
    made = object.__new__(tables().Engram)
    torch.nn.Module.__init__(made)
    with pytest.raises(ValueError) as error:
        made._create_embedding(layout.module(ENGRAM).EngramLayout(big), stage)
    assert f"need {needed} GiB" in str(error.value), "not refused in GiB"


def all_are_there(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks on these hosts answer at once, the first of which is ours."""

    def gather(answers: list[str], own: str, group: Any) -> None:
        assert group == tuple(range(len(hosts)))
        assert own == BOOT_ID.read_text(), f"a rank names its host {own!r}"
        answers[:] = [own if host == hosts[0] else host for host in hosts]

    def group(ranks: list[int], **_: Any) -> tuple[int, ...]:
        return tuple(ranks)

    monkeypatch.setattr(torch.distributed, "new_group", group)
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda _: None)


@pytest.mark.parametrize("setting", ["dp_shared_memory", "use_thp"])
def test_what_registers_memory_with_cuda_is_refused(setting: str) -> None:
    kind = layout.module("vllm.config.engram").EngramConfig
    parallel = SimpleNamespace(
        data_parallel_size=2, tensor_parallel_size=1, enable_elastic_ep=False
    )
    default = kind()
    default.resolve_dp_shared_memory(parallel)
    assert not default.dp_shared_memory, "XPU would share tables by default"
    default.verify_parallel_config(parallel)
    with pytest.raises(ValueError, match="which XPU cannot") as error:
        kind(**{setting: True}).verify_parallel_config(parallel)
    assert "Leave both out" in str(error.value)


def test_the_first_model_runner_is_refused(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(ValueError, match="needs the V2 model runner"):
        layer()


def test_tables_that_are_read_from_peers_are_refused(config: Any) -> None:
    config.engram_config.cpu_offload = False
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(ValueError, match="which XPU cannot do: leave cpu_offload true"):
        layer()


def test_too_few_rows_are_named(config: Any) -> None:
    short = small_config()
    short.engram_num_embeddings = [20000, 300]
    made = object.__new__(tables().Engram)
    torch.nn.Module.__init__(made)
    with pytest.raises((ValueError, AssertionError)) as error:
        made._create_embedding(layout.module(ENGRAM).EngramLayout(short), 1)
    assert "engram_num_embeddings[1] is 300" in str(error.value), "not refused in words"


def test_a_gather_by_the_cpu_needs_eager_steps(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CPU_GATHER, "1")
    modes = layout.module("vllm.config").CUDAGraphMode
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", modes.PIECEWISE)
    with pytest.raises(ValueError, match="add --enforce-eager"):
        layer()
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", modes.NONE)
    layer()
    monkeypatch.setenv(CPU_GATHER, "0")
    monkeypatch.setattr(config.compilation_config, "cudagraph_mode", modes.PIECEWISE)
    layer()


@pytest.fixture
def hashes(config: Any, tmp_path: Path) -> Any:
    return hash_state(config, tmp_path)


@pytest.mark.unchanged
def test_hashes(hashes: Any) -> None:
    """Two requests: one from its begin, one behind earlier tokens, an image's among
    them; then an empty batch."""
    compressed = [0, 1, 2, 3, 4, 5, 6, 0]
    assert hashes.token_map.tolist() == compressed
    texts = [[7, 1, 2, 3, 3, 0, 6, 5, 4, 2, 1], [5, 4, 3, 2, 1, 0, 6]]
    dead = [[False] * 11, [False, False, True, False, False, False, False]]
    first = [0, 4]
    device = layout.device()

    def tensor(values: list[Any], kind: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=kind, device=device)

    chunks = [text[start:] for text, start in zip(texts, first, strict=True)]
    shut = [flags[start:] for flags, start in zip(dead, first, strict=True)]
    positions = [
        position
        for text, start in zip(texts, first, strict=True)
        for position in range(start, len(text))
    ]
    made = hashes(
        tensor(chunks[0] + chunks[1]),
        tensor(positions, torch.int64),
        tensor([0, len(chunks[0]), len(chunks[0]) + len(chunks[1])]),
        tensor(shut[0] + shut[1], torch.bool),
        # Newest first; -1 where a text has begun.
        tensor([[-1, -1, -1], texts[1][3:0:-1]]),
        tensor([[False] * 3, dead[1][3:0:-1]], torch.bool),
        None,
        None,
    )
    layers, primes = small_config().engram_layer_ids, engram_layout().primes
    factors = multipliers(layers, 7)
    row = 0
    for text, flags, start in zip(texts, dead, first, strict=True):
        ids = [
            DEAD if flag else compressed[token]
            for token, flag in zip(text, flags, strict=True)
        ]
        for position in range(start, len(ids)):
            for number in range(2):
                wanted = reference_hash(
                    ids[: position + 1], number, primes[number], 0, factors[number]
                )
                assert made[row, number].tolist() == wanted, (position, number)
            row += 1
    assert row == len(made)
    assert len(made[:, 0].unique()) < made[:, 0].numel(), "no n-grams collide"
    nothing = tensor([])
    empty = tensor([[-1] * 3])
    none = hashes(
        nothing,
        nothing.long(),
        tensor([0, 0]),
        nothing.bool(),
        empty,
        empty > 0,
        None,
        None,
    )
    assert none.shape == (0, 2, COLUMNS)


@pytest.mark.unchanged
def test_cuda_shares_tables_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    module = layout.module("vllm.config.engram")
    if hasattr(module, "current_platform"):
        monkeypatch.setattr(
            module,
            "current_platform",
            layout.another_platform(module.current_platform),
        )
    parallel = SimpleNamespace(data_parallel_size=2, enable_elastic_ep=False)
    shared = module.EngramConfig()
    shared.resolve_dp_shared_memory(parallel)
    assert shared.dp_shared_memory
    shared.verify_parallel_config(parallel)
