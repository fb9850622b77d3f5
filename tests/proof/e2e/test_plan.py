# SPDX-License-Identifier: Apache-2.0
"""A release's own start of the published model holds what the arithmetic says."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from lab import memory
from lab.planner import asked, choices, splits, trial
from lab.planner.checkpoints import NAMED
from lab.planner.checkpoints import checkpoint as known
from lab.planner.splits import Split
from proof.e2e.checkpoints import checkpoint, v41
from proof.e2e.running.serving import Engines, Job, Prompt
from stack.base.releases import load
from stack.core.cache import Cache
from stack.core.errors import InternalError
from stack.core.project import Project

EIGHT = (Split(8, 1),)


def beside(plan: Callable[..., Any], *given: Any) -> pytest.MarkDecorator:
    """Begins `plan(engines, release, *given)` beside other tests: one plan at a time,
    so it may change what `trial` reads."""

    def begin(engines: Engines, release: str, **_: Any) -> None:
        engines.begin(plan, release, *given)

    return pytest.mark.begins(start=begin)


def run(release: str, wanted: asked.Asked, only: Sequence[Split] = ()) -> trial.Trial:
    project = Project.find(Path(__file__).parent)
    pinned = load(project)[release]
    return trial.run(project, Cache.default(progress=print), pinned, wanted, only)


def flash_on(
    engines: Engines, release: str, device: str
) -> tuple[asked.Asked, trial.Trial]:
    wanted = asked.Asked(NAMED["flash"], asked.device(device), 8, 131_072, 8)
    return wanted, run(release, wanted, EIGHT)


@pytest.mark.newest
@beside(flash_on, "max1100")
def test_weights_are_those_of_the_arithmetic(engines: Engines, release: str) -> None:
    """Within 0.1 %, as stored or with linear layers in bf16, as the page says."""
    wanted, tried = engines.begin(flash_on, release, "max1100").result()
    (choice,) = choices.choices(wanted, tried)
    (stage,) = choice.attempt.stages
    forms = [memory.weights(memory.FLASH, 8, widened=wide) for wide in (False, True)]
    assert any(stage.weights == pytest.approx(form, rel=1e-3) for form in forms)
    # Of blocks of 256 tokens; the arithmetic leaves out buffers.
    tokens = memory.room(memory.FLASH, 8, wanted.device)
    assert 0.6 * tokens < choice.attempt.room * wanted.context < tokens


@pytest.mark.newest
@beside(flash_on, "b60")
def test_what_does_not_fit_is_refused(engines: Engines, release: str) -> None:
    wanted, tried = engines.begin(flash_on, release, "b60").result()
    assert not choices.choices(wanted, tried)
    (refused,) = tried.attempts
    room = wanted.usable() - asked.ACTIVATIONS
    short = [
        (memory.weights(memory.FLASH, 8, widened=wide) - room) / memory.GIB
        for wide in (False, True)
    ]
    # The arithmetic leaves out buffers: less than a GiB.
    found = choices.missing(wanted, refused)
    assert any(0 < found - least < 1 for least in short), (found, short)
    assert "GiB short on a device" in choices.why(wanted, refused)


LACKING = "layers.1.attn.wkv.scale"


def of_folders(engines: Engines, release: str) -> list[tuple[asked.Asked, trial.Trial]]:
    """A whole checkpoint, and one that lacks a tensor."""
    folder, _ = checkpoint.write(engines.work / "planned")
    file, found = folder / "model.safetensors", []
    for lacking in ("", LACKING):
        whole = load_file(file)
        whole.pop(lacking, None)
        save_file(whole, file)
        device = asked.device("b50")
        wanted = asked.Asked(known(str(folder)), device, 1, 512, 4)
        found.append((wanted, run(release, wanted)))
    return found


@pytest.mark.newest
@beside(of_folders)
def test_a_folder_is_planned_as_it_is(engines: Engines, release: str) -> None:
    whole, (wanted, tried) = engines.begin(of_folders, release).result()
    (choice,) = choices.choices(*whole)
    assert not choice.attempt.stages[0].unset
    assert tried.refused == f"the checkpoint has no {LACKING}"
    assert not tried.attempts
    pinned = load(Project.find(Path(__file__).parent))[release]
    error = choices.nothing_fits(wanted, pinned, tried)
    assert error.detail == (f"any split: {tried.refused}",)


@pytest.mark.full
@pytest.mark.newest
def test_replicas_share_the_experts(release: str, tmp_path: Path) -> None:
    given = known(str(checkpoint.write(tmp_path)[0])), asked.device("b50")
    one = asked.Asked(*given, 1, 512, 4)
    two = asked.Asked(*given, 2, 512, 4, replicas=2, expert_parallel=True)
    (alone,) = choices.choices(one, run(release, one))
    (both,) = choices.choices(two, run(release, two))
    assert both.attempt.name == "TP 1, DP 2, EP"
    assert both.attempt.fullest.weights < alone.attempt.fullest.weights


@pytest.mark.full
@pytest.mark.newest
def test_v41_pins_its_tables_in_the_host(release: str, tmp_path: Path) -> None:
    writer = v41.V41(0)
    folder, _ = checkpoint.write(tmp_path, writer)
    given = known(str(folder)), asked.device("b50")
    wanted = asked.Asked(*given, 1, 512, 4)
    (choice,) = choices.choices(wanted, run(release, wanted))
    tables: dict[str, int] = {}
    for name, tensor in writer.published.items():
        layer, found, _ = name.partition(".engram.embed.")
        if found:
            # A piece has the values of whole 4,096 rows, and behind them the scales.
            rows, width = tensor.shape
            room = -(-rows // 4096) * 4096 if "weight" in name else rows
            tables[layer] = tables.get(layer, 0) + room * width
    assert choice.attempt.fullest.pinned == sum(
        1 << (size - 1).bit_length() for size in tables.values()
    )
    assert not choice.attempt.stages[0].unset
    two = asked.Asked(*given, 2, 512, 4, replicas=2)
    refused, *_ = run(release, two).attempts
    assert "--data-parallel-size 2 is not tested with V4.1" in refused.refused


ONE_CARD = asked.Asked(NAMED["flash"], asked.device("b70"), 1, 8192, 1, host=192)
LONGER = replace(ONE_CARD, context=32_768, requests=4)
LITTLE = replace(ONE_CARD, host=96)


def with_host_experts(engines: Engines, release: str) -> list[trial.Trial]:
    alone = (Split(1, 1),)
    return [run(release, one, alone) for one in (ONE_CARD, LONGER, LITTLE)]


@pytest.mark.newest
@beside(with_host_experts)
def test_experts_in_the_host_take_what_a_start_gives_them(
    engines: Engines, release: str
) -> None:
    """43 layers of 256 experts of 12.75 MiB, after the cache of all requests."""
    of_all_layers, found = 43 * 12.75 * (1 << 20), []
    *enough, little = engines.begin(with_host_experts, release).result()
    for each, tried in zip((ONE_CARD, LONGER), enough, strict=True):
        resident, *_, auto = tried.attempts
        assert resident.refused and not resident.slots
        (stage,) = auto.stages
        assert stage.slot_bytes == auto.slots * of_all_layers
        assert 137 << 30 < stage.pinned < 138 << 30
        assert auto.room >= each.requests
        left = each.usable() - stage.held - stage.set_aside
        assert left > 0
        found.append(auto.slots)
        command = choices.serve(each, auto)
        assert "--moe-expert-cache-size auto" in command
        assert f"--max-num-seqs {each.requests}" in command
    assert 6 < found[1] < found[0]
    (_, short) = little.attempts
    assert "137.06 GiB of host memory, of which 96.00 GiB are free" in short.refused
    assert "41.06 GiB are missing" in short.refused


# 26.1 MB beside the activations: more slots than a token chooses, fewer than experts.
FEW_BYTES = (asked.ACTIVATIONS + 26.1e6) / asked.SHARE / (1 << 30)
SMALL = replace(asked.device("b50"), memory=FEW_BYTES)
CHUNK = 48


def with_few_slots(engines: Engines, release: str) -> tuple[asked.Asked, trial.Trial]:
    wanted = asked.Asked(known(str(engines.published)), SMALL, 1, 512, 8, host=64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trial, "CHUNKS", (CHUNK,))
        return wanted, run(release, wanted, (Split(1, 1),))


@pytest.mark.newest
@beside(with_few_slots)
def test_plan_and_start_give_experts_as_many_slots(
    engines: Engines, release: str
) -> None:
    """A start with the memory that the plan found beside the fewest slots."""
    wanted, tried = engines.begin(with_few_slots, release).result()
    *_, auto = tried.attempts
    (stage,) = auto.stages

    per_slot = stage.slot_bytes // auto.slots
    free = int(wanted.usable() - stage.held - stage.set_aside)
    free += per_slot * (auto.slots - checkpoint.CHOSEN)
    job = Job(
        "experts in the slots that fit",
        ((Prompt(9, 2, seed=3),),),
        (
            ("moe_expert_cache_size", -1),
            ("kv_cache_memory_bytes", None),
            ("max_num_batched_tokens", CHUNK),
            ("enable_prefix_caching", True),
            ("worker_cls", "proof.e2e.inside.recording.ToldMemoryWorker"),
        ),
        environment=(("E2E_MEMORY_LEFT", str(free)),),
    )
    log = engines.serve(release, job).log
    said = [line for line in log.splitlines() if "Experts on the device" in line]
    assert f"device: {auto.slots} of {checkpoint.FLASH.experts} a layer" in said[0]
    assert checkpoint.CHOSEN < auto.slots < checkpoint.FLASH.experts


def of_contexts(engines: Engines, release: str) -> list[trial.Attempt]:
    found = []
    for context in (131_072, 1_048_576):
        wanted = asked.Asked(NAMED["v4.1"], asked.device("b70"), 16, context, 1)
        (choice,) = choices.choices(wanted, run(release, wanted, (Split(8, 2),)))
        found.append(choice.attempt)
    return found


@pytest.mark.newest
@beside(of_contexts)
def test_workspaces_of_a_long_context_are_set_aside(
    engines: Engines, release: str
) -> None:
    """Of three requests prefill gathers the keys at once; the first layers of ratio 1
    have a row for each token."""
    short, long = engines.begin(of_contexts, release).result()
    assert short.fullest.set_aside == asked.ACTIVATIONS
    keys = 3 * (1_048_576 + 128 + long.max_num_batched_tokens) * 512 * 2
    scores = 512 << 20
    assert 0 < long.fullest.workspaces - keys - scores < 64 << 20
    assert long.fullest.set_aside == asked.BESIDE_WORKSPACES + long.fullest.workspaces


@pytest.mark.full
@pytest.mark.newest
@pytest.mark.parametrize("kind", ["v4.1", "flash"])
def test_a_start_takes_the_workspace_of_its_plan(
    engines: Engines, release: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large after its prompts as a plan of the same lengths says."""
    name, context, chunk = "v4.1" if kind == "v4.1" else "", 512, 64
    folder = engines.written(name)[0] if name else engines.published
    monkeypatch.setattr(trial, "CHUNKS", (chunk,))
    wanted = asked.Asked(known(str(folder)), asked.device("b50"), 1, context, 1)
    (choice,) = choices.choices(wanted, run(release, wanted))
    lengths = ("max_model_len", context), ("max_num_batched_tokens", chunk)
    given = v41.SERVER if name else ()
    job = Job(
        f"{kind}, as planned",
        ((Prompt(70, 2, seed=1),),),
        (*given, *lengths),
        checkpoint=name,
    )
    planned = choice.attempt.fullest.workspaces - (512 << 20)
    assert engines.serve(release, job).workspace == planned


MANY = asked.Asked(NAMED["flash"], asked.device("b60"), 24, 131_072, 16)


def of_many(engines: Engines, release: str) -> trial.Trial:
    (*_, cut) = splits.possible(NAMED["flash"], 20)
    return run(release, MANY, (Split(8, 3), cut))


@pytest.mark.newest
@beside(of_many)
def test_more_devices_than_a_host_has(engines: Engines, release: str) -> None:
    """24 B60, of which the emulated host has 16, in vLLM's own cut; and 20 in ours."""
    tried = engines.begin(of_many, release).result()
    found = {one.attempt.name: one for one in choices.choices(MANY, tried)}
    assert found["TP 8, PP 3"].serves
    assert found["TP 1, PP 20"].serves
    command = choices.serve(MANY, found["TP 1, PP 20"].attempt)
    assert "VLLM_PP_LAYER_PARTITION=3,2," in command
    assert " --pipeline-parallel-size 20 " in command


@pytest.mark.full
@pytest.mark.newest
def test_ten_b60_carry_what_eight_cannot(release: str) -> None:
    """The search: the hint of a plan that starts nowhere."""
    wanted = asked.Asked(NAMED["flash"], asked.device("b60"), 8, 131_072, 16)
    tried = run(release, wanted)
    assert not any(one.serves for one in choices.choices(wanted, tried))
    few = choices.fewest(wanted, tried)
    assert few is not None
    assert (few.devices, few.name) == (10, "TP 2, PP 5")


def with_an_unknown_argument(engines: Engines, release: str) -> str:
    """The error."""
    wanted = asked.Asked(NAMED["flash"], asked.device("b60"), 8, 4096, 1)
    given = trial.engine(wanted) | {"no_such_argument": 1}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(trial, "engine", lambda _: given)
        with pytest.raises(InternalError, match="no_such_argument") as caught:
            run(release, wanted, EIGHT)
    assert caught.value.exit_code == 70
    return str(caught.value)


@pytest.mark.newest
@beside(with_an_unknown_argument)
def test_what_the_planner_lacks_is_its_own_fault(
    engines: Engines, release: str
) -> None:
    """An argument that the engine does not know is none of its refusals."""
    error = engines.begin(with_an_unknown_argument, release).result()
    assert "says nothing about whether the model starts" in error


IMPOSSIBLE = (Split(24, 1), Split(16, 1), Split(3, 8), Split(1, 44), Split(1, 16))


def of_impossible(engines: Engines, release: str) -> list[trial.Trial]:
    """Splits by number, one whose stages have other caches, and one of V4.1."""
    wanted = asked.Asked(NAMED["flash"], asked.device("b60"), 24, 4096, 1)
    apart = Split(1, 24, (3, *[2] * 17, *[1] * 6))
    of_v41 = replace(wanted, checkpoint=NAMED["v4.1"])
    return [
        run(release, wanted, IMPOSSIBLE),
        run(release, wanted, (apart,)),
        run(release, of_v41, (Split(8, 3),)),
    ]


@pytest.mark.newest
@beside(of_impossible)
def test_splits_that_cannot_be_are_refused_by_the_release(
    engines: Engines, release: str
) -> None:
    """Those that a plan does not start: the rules are the release's."""
    by_number, apart, of_v41 = engines.begin(of_impossible, release).result()
    for one in by_number.attempts:
        assert one.refused, one.name
        assert not one.stages
    (refused,) = apart.attempts
    assert "Workers disagree on supported KV cache layouts" in refused.refused
    (refused,) = of_v41.attempts
    assert "Use VLLM_PP_LAYER_PARTITION so that stages begin" in refused.refused


V41 = asked.Asked(NAMED["v4.1"], asked.device("b70"), 24, 131_072, 16)


def of_v41_cuts(engines: Engines, release: str) -> list[trial.Trial]:
    """A cut at its sources, and one that leaves a stage without any."""
    cuts = Split(8, 3, (8, 12, 20)), Split(8, 5, (2, 6, 6, 6, 20))
    return [run(release, V41, [cut]) for cut in cuts]


@pytest.mark.newest
@beside(of_v41_cuts)
def test_v41_is_cut_where_it_can_be(engines: Engines, release: str) -> None:
    can_be, beginning_at_two = engines.begin(of_v41_cuts, release).result()
    (choice,) = choices.choices(V41, can_be)
    assert choice.serves
    assert choice.attempt.partition == "8,12,20"
    (refused,) = beginning_at_two.attempts
    assert "Workers disagree on supported KV cache layouts" in refused.refused


@pytest.mark.full
@pytest.mark.newest
def test_a_configuration_plans_as_its_checkpoint(release: str, tmp_path: Path) -> None:
    folder, _ = checkpoint.write(tmp_path)
    device = asked.device("b50")
    whole = asked.Asked(known(str(folder)), device, 1, 512, 4)
    (with_weights,) = choices.choices(whole, run(release, whole))
    (folder / "model.safetensors").unlink()
    alone = asked.Asked(known(str(folder)), device, 1, 512, 4)
    (choice,) = choices.choices(alone, run(release, alone))
    assert choice.attempt.room == with_weights.attempt.room
    assert choice.attempt.fullest.weights == with_weights.attempt.fullest.weights
    assert not choice.attempt.fullest.unset


def without_and_with(engines: Engines, release: str, kind: str) -> list[trial.Attempt]:
    """Of the same question without drafts or images, and with them."""
    name = {"mtp": "flash", "images": "vision"}[kind]
    plain = asked.Asked(NAMED[name], asked.device("b70"), 8, 8_192, 4)
    more = (
        replace(plain, speculation={"method": "mtp", "num_speculative_tokens": 1})
        if kind == "mtp"
        else replace(plain, images=4)
    )
    found = []
    for wanted in (plain, more):
        (choice,) = choices.choices(wanted, run(release, wanted, EIGHT))
        found.append(choice.attempt)
    return found


@pytest.mark.newest
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=beside(without_and_with, kind))
        for kind in ("mtp", "images")
    ],
)
def test_drafts_and_images_take_memory(
    engines: Engines, release: str, kind: str
) -> None:
    without, with_more = engines.begin(without_and_with, release, kind).result()
    assert with_more.fullest.weights > without.fullest.weights + 5e7
    assert with_more.room < without.room
