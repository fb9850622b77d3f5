# SPDX-License-Identifier: Apache-2.0
"""Layers behind V4.1's last KV source compute the rows that a prompt's end needs, and a
prefix of the cache has them or they are computed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import compilations, layout, model_configs, replay_state, v41
from helpers.replay_state import batch_of, state_of

PAGE, HALF, WINDOW = 128, 32, 128
LONG = 131_072
FLASH = {
    "num_hidden_layers": 40,
    "compress_ratios": [0, 0] + [2] * 12 + [1] * 26,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "candidate_source_layer_id": 20,
    "max_position_embeddings": 2 * LONG,
    "engram_layer_ids": [1, 14],
}
"""The layers of V4.1-Flash."""
SMALL = FLASH | {"num_hidden_layers": 23}
NEEDED = {"flash": WINDOW + 18 * (WINDOW - 1), "small": WINDOW + WINDOW - 1}


def scheduler_of(
    folder: Path,
    text: dict[str, Any] = FLASH,
    caching: bool = False,
    retention: int | None = None,
    **options: Any,
) -> Any:
    """A scheduler of full pages beside a window."""
    served = {"max_model_len": LONG + PAGE, "max_num_batched_tokens": 8192}
    served |= {"enable_prefix_caching": caching, "block_size": PAGE}
    config = v41.configured(folder, text, **served | options)
    interface = layout.module("vllm.v1.kv_cache_interface")
    heads = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    specs = {
        "pages": interface.MLAAttentionSpec(block_size=PAGE, **heads),
        "window": interface.SlidingWindowMLASpec(
            block_size=HALF, sliding_window=WINDOW, **heads
        ),
    }
    config.cache_config.num_gpu_blocks = 8192
    config.cache_config.enable_prefix_caching = caching  # CPUs without AMX: off for MLA
    return layout.module("vllm.v1.core.sched.scheduler").Scheduler(
        config,
        interface.KVCacheConfig(
            num_blocks=8192,
            kv_cache_tensors=[],
            prefix_cache_retention_interval=retention,
            kv_cache_groups=[
                interface.KVCacheGroupSpec([name], spec) for name, spec in specs.items()
            ],
        ),
        layout.module("vllm.v1.structured_output").StructuredOutputManager(config),
        block_size=PAGE,
        hash_block_size=HALF,
    )


def request(tokens: list[int], image: int | None = None, **sampling: Any) -> Any:
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    request.count += 1  # type: ignore[attr-defined]
    images = [] if image is None else [PlaceholderRange(offset=image, length=9)]
    return Request(
        request_id=f"request {request.count}",  # type: ignore[attr-defined]
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=8, **sampling),
        pooling_params=None,
        mm_features=[
            MultiModalFeatureSpec(
                data=None, modality="image", identifier="image", mm_position=place
            )
            for place in images
        ],
        block_hasher=get_request_block_hasher(HALF, sha256),
    )


request.count = 0  # type: ignore[attr-defined]


def admitted(scheduler: Any, asked: Any, chunk: int = 200) -> tuple[int, int]:
    """How many tokens a prompt takes from the cache, and from where on its later layers
    compute. It is then computed, and all its pages go into the cache."""
    cache = scheduler.kv_cache_manager
    blocks, hit, asked.shared_prefix_boundary = cache.get_computed_blocks(asked)
    sent = layout.module("vllm.v1.core.sched.output").NewRequestData.from_request(
        asked, ((), ())
    )
    given = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
    at = hit
    while at < asked.num_tokens:
        new = min(chunk, asked.num_tokens - at)
        assert cache.allocate_slots(asked, new, **given) is not None
        asked.num_computed_tokens = at = at + new
        given = {}
    cache.free(asked)
    return hit, max(hit, sent.replay_start)


def computed(scheduler: Any, asked: Any) -> int:
    """Rows that its later layers compute."""
    return int(asked.num_tokens - admitted(scheduler, asked, chunk=8192)[1])


def test_a_long_prompt(tmp_path: Path) -> None:
    rows = computed(scheduler_of(tmp_path), request(list(range(LONG))))
    assert rows == NEEDED["flash"], f"later layers compute {rows} rows"


def test_pages_of_a_prompt_end_whole(tmp_path: Path) -> None:
    """So that a later prompt can go on from the last ones."""
    scheduler = scheduler_of(tmp_path, caching=True)
    rows = computed(scheduler, request(list(range(LONG))))
    assert rows == NEEDED["flash"] + PAGE <= 2560, f"later layers compute {rows} rows"
    assert admitted(scheduler, request(list(range(LONG))))[0] == LONG - PAGE


def test_a_draft_reads_a_window_of_the_last_layer(tmp_path: Path) -> None:
    drafts = {"method": "dspark", "num_speculative_tokens": 3}
    scheduler = scheduler_of(tmp_path, speculative_config=drafts)
    rows = computed(scheduler, request(list(range(5000))))
    assert rows == NEEDED["flash"] + WINDOW - 1, f"later layers compute {rows} rows"


def test_prefixes(tmp_path: Path) -> None:
    """A window that lacks rows is none to go on from, unless what follows it needs
    none of them."""
    scheduler, needed = scheduler_of(tmp_path, SMALL, caching=True), NEEDED["small"]
    first, other = list(range(1300)), list(range(5000, 9000))
    start = 1280 - needed
    found = admitted(scheduler, request(first))
    assert found == (0, start), f"later layers compute {1300 - found[1]} rows"
    # Of the same prompt all is there.
    assert admitted(scheduler, request(first)) == (1280, 1280)
    # What begins alike and is short lacks rows, and gets them where it branches off.
    asked = request(first[:1000] + other[:60])
    assert admitted(scheduler, asked) == (640, 896 - needed)
    assert asked.shared_prefix_boundary == 896
    # The next one finds them there.
    branch = first[:1000] + other[60:130]
    assert admitted(scheduler, request(branch)) == (896, 896)
    # What goes on for longer than a prompt's end needs nothing of the prefix.
    branch = first[:600] + other[200:700]
    assert admitted(scheduler, request(branch)) == (512, 1024 - needed)


def test_a_branch_where_windows_are_not_kept(tmp_path: Path) -> None:
    """By default windows are kept at the end of a prompt and where a second one
    branches off, which has the rows that the next one needs there."""
    scheduler = scheduler_of(tmp_path, SMALL, caching=True, retention=0)
    first, other = list(range(1300)), list(range(5000, 9000))
    admitted(scheduler, request(first))
    branch = request(first[:1000] + other[:900])
    found = admitted(scheduler, branch)
    assert found == (0, 896 - NEEDED["small"]), f"later layers compute from {found} on"
    assert branch.shared_prefix_boundary == 896
    branch = first[:1000] + other[900:960]
    assert admitted(scheduler, request(branch)) == (896, 896)


@pytest.mark.parametrize("chunk", [1, 96, 128, 1000])
@pytest.mark.parametrize("length", [300, 450, 600, 639])
def test_a_prefix_without_its_halo_is_not_taken(
    tmp_path: Path, chunk: int, length: int
) -> None:
    """However the prompt before it was cut. It has the last window before 640."""
    scheduler = scheduler_of(tmp_path, SMALL, caching=True)
    admitted(scheduler, request(list(range(700))), chunk)
    hit, start = admitted(scheduler, request([*range(length), *range(9000, 9020)]))
    whole = start == hit
    assert not whole or not hit, f"later layers compute from {hit} on"
    assert whole or start <= length - NEEDED["small"]


def test_images_and_log_probabilities_keep_all_rows(tmp_path: Path) -> None:
    scheduler = scheduler_of(tmp_path, SMALL)
    assert computed(scheduler, request(list(range(900)))) == NEEDED["small"], (
        "later layers compute all rows"
    )
    assert computed(scheduler, request(list(range(900)), image=5)) == 900
    assert computed(scheduler, request(list(range(900)), prompt_logprobs=1)) == 900
    asked = request(list(range(900)), prompt_logprob_token_ids=[[1]] * 899)
    assert computed(scheduler, asked) == 900
    short = request(list(range(NEEDED["small"])))
    assert computed(scheduler, short) == NEEDED["small"]
    assert short.whole_rows_start == 0


def test_a_request_that_is_looked_up_again(tmp_path: Path) -> None:
    """As after a pre-emption: behind what the cache has by then no row is left out."""
    scheduler = scheduler_of(tmp_path, SMALL, caching=True)
    asked = request(list(range(1300)))
    admitted(scheduler, asked)
    assert asked.replay_start == 1280 - NEEDED["small"], "later layers compute all rows"
    assert scheduler.kv_cache_manager.get_computed_blocks(asked)[1] == 1280
    assert asked.replay_start == asked.whole_rows_start == 0


@pytest.mark.parametrize(("start", "partial"), [(0, 0), (96, 3), (97, 4)])
def test_pages_of_which_later_layers_lack_rows(start: int, partial: int) -> None:
    """Only who asks for them finds them; events name their group."""
    utilities = layout.module("vllm.v1.core.kv_cache_utils")
    assert hasattr(utilities, "PARTIAL_ROWS"), "a page has all rows"
    pool = layout.module("vllm.v1.core.block_pool").BlockPool(9, True, HALF)
    asked, pages = request(list(range(6 * HALF))), pool.get_new_blocks(6)
    pool.cache_full_blocks(asked, pages, 0, 6, HALF, 1, whole_rows_start=start)

    def found(group: int) -> list[bool]:
        hashes = asked.block_hashes
        return [pool.get_cached_block(each, [group]) is not None for each in hashes]

    assert found(1) == [page >= partial for page in range(6)]
    assert all(found(1 | utilities.PARTIAL_ROWS))
    assert {utilities.get_group_id(page.block_hash) for page in pages} == {1}


@pytest.mark.parametrize(
    ("stages", "rows"),
    [("40", NEEDED["flash"]), ("19,21", NEEDED["flash"]), ("20,20", 0), ("21,19", 0)],
)
def test_rows_of_the_last_stage(
    stages: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the last KV source behind its first layer, or it computes all rows."""
    config = v41.configured(tmp_path, FLASH)
    config.parallel_config.pipeline_parallel_size = len(stages.split(","))
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", stages)
    end = layout.module("vllm.v1.core.prompt_end").PromptEnd.of(config)
    assert (0 if end is None else end.rows) == rows


def test_other_models_on_xpu_keep_all_rows() -> None:
    config = model_configs.vllm_config()
    config.cache_config.swa_bounded_replay = True
    end = layout.module("vllm.v1.core.prompt_end").PromptEnd
    assert end.of(config) is None
    config.model_config = None
    assert end.of(config) is None


def test_the_source_stores_what_later_layers_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows that it does not compute: keys of its window, entries, and keys of the
    indexer, where it has its own."""
    done: list[tuple[str, Any]] = []

    class Part(torch.nn.Module):
        owns_k = True
        insert_cache = staticmethod(lambda *given: done.append(("insert", given)))
        _produce_k = staticmethod(lambda *given: done.append(("indexer", given)))

        def forward(self, *given: Any) -> str:
            done.append(("entries", given))
            return "entries"

    attn = v41.built(v41.configured(tmp_path)).language_model.model.layers[2].attn
    module = layout.module("vllm.models.deepseek_v41.xpu.xpu_sparse")
    context = SimpleNamespace(attn_metadata="metadata")
    monkeypatch.setattr(module, "get_forward_context", lambda: context, raising=False)
    kv = torch.zeros(5, 512)
    attn.compressor = attn.indexer = Part()
    attn._run_parallel_input_projections = lambda _: ("rows", "scores", None)
    attn._split_qkv_and_norm = lambda _: (None, None, kv)
    attn._fused_qnorm_rope_kv_insert = lambda *given: done.append(("window", given))
    attn.forward_kv("positions", "states")
    (_, (queries, *window)), *rest = done
    assert queries.shape == (5, 0, 512)
    assert window[0] is kv and window[1:] == ["positions", "metadata"]
    assert rest == [
        ("entries", ("scores", "positions")),
        ("insert", ("entries", "positions", attn.rotary_emb)),
        ("indexer", ("entries", "positions", attn.indexer_rotary_emb)),
    ]
    attn.indexer.owns_k = False
    attn.forward_kv("positions", "states")
    attn.indexer = None
    attn.forward_kv("positions", "states")
    assert [name for name, _ in done].count("indexer") == 1


@pytest.mark.parametrize(
    ("start", "row", "kept", "begin"),
    [
        (45, (300, 300, True), 255, 45),
        (45, (40, 40, True), 1, 39),
        (45, (45, 45, True), 1, 44),
        (45, (46, 46, True), 1, 45),
        (45, (100, 140, True), 95, 45),
        (45, (100, 200, True), 100, 45),
        (45, (1, 301, False), 1, 0),
        (0, (300, 300, True), 300, 0),
    ],
)
def test_rows_of_a_step(
    start: int,
    row: tuple[int, int, bool],
    kept: int,
    begin: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a request that is cut, so that later layers have a batch of their own."""
    state, chosen = state_of([start, 10])
    module = layout.module("vllm.models.deepseek_v41.xpu.model_state")
    for name in ("create_forward_context", "build_slot_mappings_by_layer"):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: None)
    none = layout.module("vllm.config").CUDAGraphMode.NONE
    batch = batch_of([row, (50, 50, True)])
    state._prepare_replay_batch(batch, none, (), None, [], None, None)
    assert chosen == {"rows": [kept, 40], "starts": [begin, 10]}
    assert len(state.decoder_replay_layers.replay_batch.rows) == kept + 40


@pytest.mark.parametrize(
    ("rows", "mode"),
    [([(300, 300, True)], "PIECEWISE"), ([(1, 301, False), (5, 5, True)], "NONE")],
)
def test_steps_of_all_rows(rows: list[tuple[int, int, bool]], mode: str) -> None:
    """Graphs have the whole batch, and so has a step in which nothing is cut."""
    state, chosen = state_of([45, 0])
    graph = getattr(layout.module("vllm.config").CUDAGraphMode, mode)
    state._prepare_replay_batch(batch_of(rows), graph, (), None, [], None, None)
    assert state.decoder_replay_layers.replay_batch is None and not chosen


def test_graphs_have_keys_of_the_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The windows of later layers begin where these have keys; nothing else changes."""
    state, _ = state_of([45])
    swa = layout.module("vllm.v1.attention.backends.mla.sparse_swa")
    names = ["early", "source", "later", "entries"]
    state.decoder_replay_layers = SimpleNamespace(
        metadata_prefixes={"source", "later", "entries"}, first_swa_prefix="source"
    )
    window = object.__new__(swa.DeepseekSparseSWAMetadata)
    state._metadata_of = lambda *_: dict.fromkeys(names, window) | {"entries": None}
    nvidia = layout.module("vllm.models.deepseek_v41.nvidia.model_state")
    whole = dict.fromkeys(names, "whole")
    monkeypatch.setattr(
        nvidia.DeepseekV41ModelState, "prepare_attn", lambda *args, **kwargs: whole
    )
    modes = layout.module("vllm.config").CUDAGraphMode

    def prepared(mode: Any, row: tuple[int, int, bool], *captures: bool) -> Any:
        return state.prepare_attn(batch_of([row]), mode, (), None, [], None, *captures)

    reading, written = (100, 140, True), (1, 301, False)
    assert prepared(modes.PIECEWISE, reading) == whole | {"later": window}
    assert prepared(modes.PIECEWISE, written) == whole
    assert prepared(modes.FULL, reading) == whole
    assert prepared(modes.PIECEWISE, reading, True) == whole
    state.decoder_replay_layers = None
    assert prepared(modes.PIECEWISE, reading) == whole


def test_windows_of_later_layers_begin_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And that of the source at the prompt's begin. Groups are copied once."""
    nvidia = layout.module("vllm.models.deepseek_v41.nvidia.model_state")
    default = layout.module("vllm.v1.worker.gpu.model_states.default")
    none = layout.module("vllm.config").CUDAGraphMode.NONE

    def init(self: Any, requests: int) -> None:
        self.max_num_reqs, self.device = requests, torch.device(layout.device())
        self._replay_attn_groups, self._replay_start = None, "the prompt's begin"

    def prepare(self: Any, *given: Any, model_specific_attn_metadata: Any) -> Any:
        assert given[1:4] == (none, "tables", "slots") and given[5] == "pages"
        begin = model_specific_attn_metadata.replay_start
        return {name: (given[0], begin) for name in given[4]}

    monkeypatch.setattr(nvidia.DeepseekV41ModelState, "__init__", init)
    monkeypatch.setattr(default.DefaultModelState, "prepare_attn", prepare)
    state = replay_state.kind()(4)
    copied: dict[int, set[str]] = {}
    assert state._later_start_np.tolist() == [0, 0, 0, 0]
    state.decoder_replay_layers = SimpleNamespace(
        metadata_prefixes={"source", "later"}, first_swa_prefix="source"
    )
    state._copy_attn_groups = lambda _, names: copied.setdefault(len(copied), names)
    for begin in ([45, 10], [46, 0, 7]):
        batch, starts = SimpleNamespace(num_reqs=len(begin)), np.array(begin, np.int32)
        given = (batch, starts, "tables", "slots", ["groups"], "pages")
        found = state._metadata_of(*given)
        assert found["source"] == (batch, "the prompt's begin")
        assert found["later"][0] is batch and found["later"][1].tolist() == begin
    assert [*copied.values()] == [{"source", "later"}, {"source"}]


def test_a_new_request_says_where_its_rows_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the place of an earlier one."""
    state, _ = state_of([7, 8])
    nvidia = layout.module("vllm.models.deepseek_v41.nvidia.model_state")
    added: list[int] = []
    kind = nvidia.DeepseekV41ModelState
    monkeypatch.setattr(kind, "add_request", lambda _, at, __: added.append(at))
    state._replay_start_np = np.array([5, 6], dtype=np.int32)
    state.add_request(1, SimpleNamespace(replay_start=45))
    assert added == [1]
    assert state._later_start_np.tolist() == [7, 45]
    assert state._replay_start_np.tolist() == [5, 0]


def test_the_insert_of_keys_is_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last KV source, for the rows that it does not compute."""
    length = 4096
    config = v41.configured(tmp_path, max_model_len=length, enforce_eager=False)
    config.compilation_config.cudagraph_decoder_replay = True
    warmup = layout.module("vllm.model_executor.warmup.jit_warmup")
    registry = warmup.JitWarmupRegistry(config)
    with registry.activate():
        model = v41.built(config).language_model.model
    layers, later = model.layers, model.decoder_replay_layers
    # Graphs have all rows, and a request says where its rows begin.
    assert not config.compilation_config.cudagraph_decoder_replay
    assert later is not None and later.window == length, "its rows are a window's"
    for layer in layers:
        layer.attn.swa_cache_layer.kv_cache = torch.zeros(
            (3, HALF, 584), dtype=torch.uint8, device=layout.device()
        )
        if layer.attn.compressor is not None:
            layer.attn.kv_cache = layer.attn.swa_cache_layer.kv_cache
        if layer.attn.indexer is not None:
            layer.attn.indexer.k_cache.kv_cache = torch.zeros(
                (3, PAGE // layer.attn.compress_ratio, 132),
                dtype=torch.uint8,
                device=layout.device(),
            )
    before = compilations.warmed_up(registry, monkeypatch)
    attn, rows = layers[2].attn, torch.arange(5, device=layout.device())
    window = SimpleNamespace(slot_mapping=rows, block_size=HALF)
    kv = torch.zeros(5, 512, dtype=torch.bfloat16, device=layout.device())
    with compilations.compiled(monkeypatch, launch=False) as needed:
        attn._fused_qnorm_rope_kv_insert(
            kv.new_empty(5, 0, 512), kv, rows, {attn.swa_cache_layer.prefix: window}
        )
    assert needed and needed <= before, "later layers compute keys by a new kernel"


@pytest.mark.unchanged
@pytest.mark.parametrize(
    "options",
    [
        {"swa_bounded_replay": False},
        {"enable_return_routed_experts": True, "caching": True},
        {"text": FLASH | {"engram_layer_ids": [1, 20]}},
        {"text": FLASH | {"num_hidden_layers": 21}},
    ],
    ids=str,
)
def test_servers_that_keep_all_rows(tmp_path: Path, options: dict[str, Any]) -> None:
    assert (
        computed(scheduler_of(tmp_path, **options), request(list(range(5000)))) == 5000
    )


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_platforms_keep_their_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their scheduler leaves no rows out."""
    try:
        module = layout.module("vllm.v1.core.prompt_end")
    except ModuleNotFoundError:  # before the step
        pass
    else:
        another = layout.another_platform(module.current_platform)
        monkeypatch.setattr(module, "current_platform", another)
    scheduler = scheduler_of(tmp_path)
    assert computed(scheduler, request(list(range(5000)))) == 5000


@pytest.mark.unchanged
@pytest.mark.any_platform
def test_other_models_keep_all_rows(tmp_path: Path) -> None:
    scheduler = scheduler_of(tmp_path, SMALL, caching=True)
    scheduler.kv_cache_manager.prompt_end = None
    first = list(range(1300))
    assert admitted(scheduler, request(first)) == (0, 0)
    assert admitted(scheduler, request([*first[:1000], 1, 2])) == (896, 896)
