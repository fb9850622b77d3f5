# SPDX-License-Identifier: Apache-2.0
"""What a plan makes of the starts that were tried, and of wrong input."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Result, invoke
from msgspec import structs

from lab.memory import FLASH
from lab.planner import asked, choices, devices, splits, trial
from lab.planner import page as plans
from lab.planner.checkpoints import NAMED, V41_KEYS, checkpoint
from stack.base.releases import Release, load
from stack.core.errors import UsageError
from stack.core.markdown import with_section
from stack.core.project import Project
from stack.core.rows import read_rows

GIB = 1 << 30
PROJECT = Project.find(Path(__file__).parent)


@pytest.fixture
def release() -> Release:
    return load(PROJECT)["v0.33.0"]


def wanted(device: str = "b60", count: int = 16, requests: int = 16) -> asked.Asked:
    found = asked.device(device)
    return asked.Asked(checkpoint("flash"), found, count, 131_072, requests)


def attempt(
    ranks: int, stages: int, weights: float, room: int, refused: str = "", **more: int
) -> trial.Attempt:
    held = trial.Stage(int(weights * GIB), GIB // 2, GIB)
    chunk = more.get("chunk", 8192)
    built = more.get("built", stages)
    return trial.Attempt(ranks, stages, chunk, refused, (held,) * built, room)


FLASH_ON_B60 = ("v0.33.0", "--model", "flash", "--device", "b60")


def run(*words: str) -> Result:
    return invoke("-C", PROJECT.root, "plan", *words)


def test_every_split_uses_every_device():
    found = splits.possible(NAMED["flash"], 24)
    assert [(one.ranks, one.stages) for one in found] == [(8, 3), (4, 6), (2, 12)]
    assert not any(one.partition for one in found)
    names = splits.impossible(NAMED["flash"], 24)
    assert list(names) == [
        *("TP 24", "TP 12, PP 2", "TP 6, PP 4", "TP 3, PP 8", "TP 1, PP 24")
    ]
    assert names["TP 1, PP 24"] == (
        "24 stages: the first needs 3 layers, and each one of ratio 4"
    )
    (*_, last) = splits.possible(NAMED["flash"], 20)
    assert (last.stages, last.partition[0], sum(last.partition)) == (20, 3, 43)
    assert "24 ranks do not divide the model's 8 output groups" in names["TP 24"]


@pytest.mark.parametrize("name", ["b60", "B60", "arc-pro-b60", "max1100", "max 1550"])
def test_devices_have_short_names(name: str):
    if name == "arc-pro-b60":
        with pytest.raises(UsageError):
            asked.device(name)
    else:
        assert asked.short(asked.device(name)) == name.lower().replace(" ", "")


def test_the_largest_chunk_that_has_room_counts():
    tried = trial.Trial(
        0,
        (
            attempt(8, 2, 10, room=9),
            attempt(8, 2, 10, room=20, chunk=4096),
            attempt(4, 4, 10, room=7),
        ),
    )
    first, second = choices.choices(wanted(), tried)
    assert first.attempt.max_num_batched_tokens == 4096
    assert first.serves
    assert second.limit(wanted()) == "cache: 7 of 16 requests fit"


def test_those_that_serve_all_requests_come_first_then_the_fastest():
    tried = trial.Trial(0, tuple(attempt(n, 16 // n, 10, room=20) for n in (2, 4, 8)))
    found = choices.choices(wanted(), tried)
    speeds = [choice.speed.slow * choice.speed.fast for choice in found]
    assert speeds == sorted(speeds, reverse=True)
    assert all("cache" not in choice.limit(wanted()) for choice in found)


def test_what_is_short_is_said_in_gib(release: Release):
    four = wanted(count=4)
    tried = trial.Trial(
        0,
        (
            attempt(4, 1, 37.2, room=0, refused="No available memory"),
            attempt(2, 2, 36.9, room=0, refused="No available memory"),
            attempt(1, 4, 0, room=0, refused="too few layers", built=0),
            structs.replace(attempt(2, 5, 20, room=18), searched=True),
        ),
    )
    error = choices.nothing_fits(four, release, tried)
    # 36.9 + 0.5 + 3 of 21.6 GiB; then all others.
    assert error.detail == (
        "TP 2, PP 2: 18.8 GiB short on a device: weights and buffers 37.4, activations"
        " 3, usable 21.6",
        "TP 4: 19.1 GiB short on a device: weights and buffers 37.7, activations 3,"
        " usable 21.6",
        "TP 1, PP 4: too few layers",
        "with experts in the host's memory, where they take 137 GiB: --host-memory GIB",
    )
    assert str(error.hint).startswith("xpustack plan v")
    assert str(error.hint).endswith("--device b60 --count 10")
    tables = structs.replace(tried.attempts[0].stages[0], pinned=33 * GIB)
    pinning = structs.replace(tried.attempts[0], stages=(tables,))
    assert choices.why(four, pinning).endswith("usable 21.6; the host pins 132 besides")


def test_what_no_devices_change_names_no_count(release: Release):
    refused = attempt(4, 1, 0, room=0, refused="no such model", built=0)
    tried = trial.Trial(0, (refused, structs.replace(refused, searched=True)))
    error = choices.nothing_fits(wanted(count=4), release, tried)
    assert error.detail[0] == "TP 4: no such model"
    assert "--count" not in str(error.hint)


def test_the_fewest_devices_are_those_that_carry_the_load():
    few = structs.replace(attempt(2, 5, 20, room=18), searched=True)
    fewer = structs.replace(attempt(1, 9, 20, room=7), searched=True)
    own = attempt(8, 2, 10, room=21)
    tried = trial.Trial(0, (own, fewer, few))
    found = choices.fewest(wanted(), tried)
    assert found is not None
    assert found.devices == 10
    assert [one.attempt.name for one in choices.choices(wanted(), tried)] == [
        "TP 8, PP 2"
    ]


def test_a_hint_asks_the_same_question():
    asks = replace(
        wanted(),
        context=4096,
        share=0.85,
        speculation={"method": "mtp", "num_speculative_tokens": 1},
    )
    line = " ".join(choices.words(asks, "v0.33.0", 10))
    assert line.endswith(
        "--count 10 --context 4096 --gpu-memory-utilization 0.85 --speculative-config"
        """ '{"method": "mtp", "num_speculative_tokens": 1}'"""
    )


def test_a_refusal_of_the_release_is_passed_on(release: Release):
    refused = attempt(16, 1, 0, 0, refused="16 does not\ndivide 8", built=0)
    assert choices.why(wanted(), refused) == "16 does not divide 8"


def test_the_command_is_the_documented_one(release: Release):
    """Flags, order and values of the page's section Serve."""
    page = (PROJECT.root / "docs/deploying.md").read_text("utf-8")
    documented = page.partition("## Serve")[2].partition("```sh serve\n")[2]
    documented = " ".join(documented.partition("```")[0].replace("\\\n", "").split())
    split = attempt(4, 4, 10, room=37)
    assert choices.serve(wanted("b60", 16), split) == documented
    image = choices.container(wanted("b60", 16), split, release)
    assert image.endswith(documented.partition("DeepSeek-V4-Flash ")[2])
    assert "vllm-xpu-dsv4:0.33.0 /model" in image
    build = choices.image(release)
    assert build in " ".join(page.replace("\\\n", "").split())
    assert "/official.Containerfile" in build and "vllm-xpu-dsv4:0.33.0 dist/" in build


def test_expert_parallel_and_many_requests_are_in_the_command():
    many = wanted(requests=200)
    whole = trial.Attempt(8, 2, 8192, "", (), 200, enable_expert_parallel=True)
    assert whole.name == "TP 8, PP 2, EP"
    command = choices.serve(many, whole)
    assert "--pipeline-parallel-size 2 --enable-expert-parallel" in command
    assert "--max-num-seqs 200" in command
    assert trial.engine(many)["max_num_seqs"] == 200


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("v0.33.0", "--model", "flash", "--device", "b61"), 2, "b50"),
        (("v0.33.0", "--model", "/nowhere", "--device", "b60"), 2, "no checkpoint"),
        (("v9.9.9", "--model", "flash", "--device", "b60"), 2, "v9.9.9"),
        ((*FLASH_ON_B60, "--context", "10000000"), 2, "end at 1048576 tokens"),
        ((*FLASH_ON_B60, "--gpu-memory-utilization", "1.5"), 2, "Must be <= 1"),
        ((*FLASH_ON_B60, "--gpu-memory-utilization", "most"), 2, '"most" is not a'),
        ((*FLASH_ON_B60, "--speculative-config", "mtp"), 2, "no JSON object"),
        ((*FLASH_ON_B60, "--speculative-config", "{}"), 2, "no method and number"),
        ((*FLASH_ON_B60, "--limit-mm-per-prompt", '{"video": 1}'), 2, "how many im"),
        ((*FLASH_ON_B60, "--limit-mm-per-prompt", '{"image": 1}'), 2, "takes no im"),
    ],
)
def test_wrong_input_is_three_lines_at_most(
    words: tuple[str, ...], code: int, says: str
):
    done = run(*words, "--count", "8")
    assert done.exit_code == code
    assert says in done.output
    lines = [n for n in done.output.splitlines() if not n.startswith("  release: ")]
    assert len(lines) <= 3
    assert "  next: " in done.output


def test_wrong_input_is_one_document():
    done = run("v0.33.0", "--model", "flash", "--device", "x", "--count", "1", "--json")
    document = json.loads(done.stdout)
    assert document["errors"][0]["error"] == "UsageError"
    assert document["command"] == "plan"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "Expecting"),
        ('{"model_type": "llama"}', "its model_type is llama"),
        ('{"model_type": "deepseek_v4"}', "config.json has no compress_ratios"),
        ('{"model_type": "deepseek_v41"}', "config.json has no text_config"),
        (
            '{"model_type": "deepseek_v41", "text_config": {"compress_ratios": []}}',
            "config.json has no num_hidden_layers",
        ),
    ],
)
def test_a_folder_that_is_no_checkpoint(config: str, says: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UsageError, match="no checkpoint") as caught:
        checkpoint(str(tmp_path))
    assert says in caught.value.detail[0]


def test_flash_is_that_of_the_arithmetic():
    assert checkpoint("flash").model is FLASH


def test_a_configuration_is_enough(tmp_path: Path):
    text = dict.fromkeys(V41_KEYS, 3) | {
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "engram_layer_ids": [1],
    }
    packing = {"quant_method": "fp8", "expert_dtype": "fp4"}
    config = {"model_type": "deepseek_v41", "text_config": text}
    config["quantization_config"] = packing
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = checkpoint(str(tmp_path))
    assert not found.tensors
    assert found.length == 3
    packing["moe_quant_algo"] = "NVFP4"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as caught:
        checkpoint(str(tmp_path))
    assert "another quantization than DeepSeek's own" in caught.value.detail[0]
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(UsageError) as caught:
        checkpoint(str(tmp_path))
    assert caught.value.detail == ("model.safetensors is no safetensors file",)


def test_replicas_share_devices_and_requests():
    whole = wanted()
    two = replace(whole, count=4, replicas=2, expert_parallel=True)
    more = {"data_parallel_size": 2, "enable_expert_parallel": True}
    found = splits.possible(two.checkpoint, two.count // two.replicas)
    assert [one.arguments(two) for one in found] == [
        {"tensor_parallel_size": n, "pipeline_parallel_size": 2 // n} | more
        for n in (2, 1)
    ]
    assert two.of_a_replica == 8
    with pytest.raises(UsageError, match="16 devices cannot be 3 equal replicas"):
        replace(whole, replicas=3)


def test_replicas_are_in_the_command_and_in_the_model_of_speed():
    two = replace(wanted(), replicas=2)
    built = attempt(8, 1, 10, room=20)
    (alone,) = choices.choices(two, trial.Trial(0, (built,)))
    both = structs.replace(built, data_parallel_size=2)
    (choice,) = choices.choices(two, trial.Trial(0, (both,)))
    assert both.name == "TP 8, DP 2"
    assert "--data-parallel-size 2 " in choices.serve(two, both)
    assert choice.speed != alone.speed


def test_v41_says_its_blocks_and_its_parser():
    asks = replace(wanted(), checkpoint=checkpoint("v4.1"))
    tried = trial.Trial(0, tuple(attempt(n, 16 // n, 20, room=20 + n) for n in (2, 8)))
    first, second = choices.choices(asks, tried)
    assert first.speed.slow * first.speed.fast > second.speed.slow * second.speed.fast
    command = choices.serve(asks, first.attempt)
    assert "/path/to/DeepSeek-V4.1-Flash" in command
    assert "--block-size 128" in command
    assert "--tool-call-parser deepseek_v41" in command
    assert """--limit-mm-per-prompt '{"image": 0}'""" in command
    assert trial.engine(asks)["limit_mm_per_prompt"] == {"image": 0}


def test_the_page_shows_the_rows():
    rows = read_rows(PROJECT.root / plans.DATA)
    page = PROJECT.root / plans.PAGE
    assert with_section(page, plans.SECTION, plans.shown(rows)) == page.read_text()
    page, few = PROJECT.root / plans.SPEED_PAGE, plans.few_cards(rows)
    assert with_section(page, plans.FEW_CARDS, few) == page.read_text()


def test_each_machine_of_the_rows_can_be_planned_again():
    rows = read_rows(PROJECT.root / plans.DATA)
    found = list(plans.plans_of(rows))
    assert len(found) == len(
        {tuple(row.get(name, "") for name in plans.MACHINE) for row in rows}
    )
    for _, release, *options in found:
        given = dict(zip(options[::2], options[1::2], strict=True))
        assert load(PROJECT)[release]
        machine = [row for row in rows if row["release"] == release]
        assert asked.device(given["--device"]).name in {
            row["device"] for row in machine
        }
        assert NAMED[given["--model"]].label in {row["model"] for row in machine}


def test_a_plan_replaces_the_rows_of_its_machine():
    choice = {
        "split": "TP 8",
        "weights_bytes": 19 * GIB,
        "buffers_bytes": GIB // 2,
        "requests": 20,
        "chunk": 8192,
        "host_bytes": 8 * GIB,
        "pinned_bytes": 0,
        "tokens_per_second": [100.0, 200.0],
        "tokens_per_second_of_one": [10.0, 20.0],
        "slots": 0,
        "first_token_seconds": {"8192": [0.5, 1.25]},
        "limit": "launches",
    }
    machine = dict.fromkeys(plans.MACHINE, "x") | {"host_memory": ""}
    reasons = {"TP 16": "16 does not divide 8. Use 8."}
    machine["serve"] = "vllm serve DeepSeek-V4-Flash"
    rows = plans.rows_of(machine | {"choices": [choice] * 2, "refused": reasons})
    assert [row.get("serve") for row in rows] == [machine["serve"], "", None]
    del rows[1]
    (starts,) = plans.shown(rows).splitlines()[2:]
    assert "| TP 8 | 19.0 | 20 | 8192 | 8 + 0 | 100 to 200 | launches |" in starts
    day = {"made": "2026-11-29"}
    assert "| launches | 2026-11-29 |" in plans.shown([row | day for row in rows])
    short = {"TP 4": "2 GiB short on a device", "TP 16": "16 does not divide 8"}
    (refused,) = plans.shown(
        plans.rows_of(machine | {"choices": [], "refused": short})
    ).splitlines()[2:]
    assert refused.endswith("| 2 GiB short on a device |  |")
    few = machine | {"host_memory": "192", "choices": [choice | {"slots": 60}]}
    (cards,) = plans.few_cards(plans.rows_of(few | {"refused": {}})).splitlines()[2:]
    assert cards.startswith("| x x | 192 | 60 | 10 to 20 | 100 to 200 | 8192: 0.5 to 1")
    assert not plans.shown(plans.rows_of(few | {"refused": {}})).splitlines()[2:]
    choice |= {"requests": 30}
    again = plans.rows_of(machine | {"choices": [choice], "refused": {}})
    other = [row | {"count": "16"} for row in rows]
    assert plans.merged([*rows, *other], again) == [*again, *other]


def test_v41_is_cut_for_its_prompts_too() -> None:
    """Layers 21 to 39 compute a prompt's end alone: cut in the middle, the second stage
    would wait."""
    known = NAMED["v4.1"]
    assert splits.for_prompts(known, 2) == (14, 26)
    assert not splits.for_prompts(known, 1)
    assert not splits.for_prompts(NAMED["flash"], 2)
    names = [
        structs.replace(attempt(8, 2, 10, room=20), partition=cut).name
        for cut in ("", "14,26")
    ]
    assert names == ["TP 8, PP 2", "TP 8, PP 2 (14 + 26 layers)"]
    asks = replace(wanted("b70"), checkpoint=known)
    even, early = (
        choices.choices(asks, trial.Trial(0, (one,)))[0].first_token
        for one in (
            attempt(8, 2, 10, room=20),
            structs.replace(attempt(8, 2, 10, room=20), partition="14,26"),
        )
    )
    assert list(even) == [8192, 131_072]
    assert early[131_072].slow < 0.8 * even[131_072].slow


def on_the_host(room: int, refused: str = "", **more: int) -> trial.Attempt:
    found = attempt(1, 1, 9, room, refused, **more)
    stages = tuple(
        structs.replace(one, slots=27, slot_bytes=14 * GIB, pinned=137 * GIB)
        for one in found.stages
    )
    return structs.replace(found, moe_expert_cache_size=-1, stages=stages)


def test_experts_of_the_host_are_in_the_command_and_in_the_model() -> None:
    asks = replace(wanted("b70", 1, 1), context=8192, host=192)
    (choice,) = choices.choices(asks, trial.Trial(0, (on_the_host(2),)))
    assert choice.attempt.name == "TP 1, host experts"
    assert choice.limit(asks) == "host link: experts of the host"
    assert 5 < choice.speed.slow < choice.speed.fast < 20
    assert choice.speed == choice.alone
    assert 1 < choice.link_bytes.fast / GIB < choice.link_bytes.slow / GIB < 3.2
    assert "--moe-expert-cache-size auto" in choices.serve(asks, choice.attempt)
    faster = replace(asks, link=50)
    (more,) = choices.choices(faster, trial.Trial(0, (on_the_host(2),)))
    assert more.speed.slow > 1.3 * choice.speed.slow


def test_what_the_host_lacks_comes_first_and_is_in_the_hint(release: Release) -> None:
    asks = replace(wanted("b60", 1, 1), host=96)
    says = (
        "model.layers.0.ffn.experts: experts need 137.06 GiB of host memory, of which"
        " 96.00 GiB are free: 41.06 GiB are missing; add memory"
    )
    tried = trial.Trial(0, (attempt(1, 1, 146, room=0), on_the_host(0, says, built=0)))
    error = choices.nothing_fits(asks, release, tried)
    first, second = error.detail
    assert first == f"TP 1, host experts: {says}"
    assert second.startswith("TP 1: 127.9 GiB short on a device")
    assert str(error.hint).endswith("--concurrency 1 --host-memory 138")


def test_a_count_that_no_split_has_is_refused_at_once():
    begin = time.monotonic()
    done = run(*FLASH_ON_B60, "--count", "999999999999")
    assert time.monotonic() - begin < 5
    assert done.exit_code == 1
    assert "at most 8 ranks that share the output groups and 21 stages" in done.output
    assert "--count " in done.output.partition("next: ")[2]


def test_graphs_are_in_doubt_on_max():
    for name, count in (("max1100", 1), ("max1550", 1), ("b60", 0)):
        found = devices.warnings(asked.device(name))
        assert len(found) == count
        assert all("vllm-project/vllm#48946" in text for text in found)


def test_a_cut_is_in_the_commands(release: Release):
    found = splits.possible(NAMED["v4.1"], 24)
    assert [(one.ranks, one.stages, one.partition) for one in found] == [
        (8, 3, (8, 12, 20)),
        (8, 3, (8, 6, 26)),
    ]
    asks = replace(wanted(count=24), checkpoint=NAMED["v4.1"])
    cut = structs.replace(attempt(8, 3, 10, room=20), partition="8,12,20")
    even = structs.replace(cut, partition="")
    uneven, level = (
        choices.choices(asks, trial.Trial(0, (one,)))[0].speed for one in (cut, even)
    )
    assert uneven.fast < level.fast
    assert choices.serve(asks, cut).startswith("VLLM_PP_LAYER_PARTITION=8,12,20 VLLM_")
    image = choices.container(asks, cut, release)
    assert " --env VLLM_PP_LAYER_PARTITION=8,12,20 vllm-xpu-dsv4:" in image


def test_options_reach_the_engine_and_the_commands():
    drafts = {"method": "dspark", "num_speculative_tokens": 5}
    asks = replace(
        wanted(),
        checkpoint=NAMED["vision"],
        share=0.8,
        speculation=drafts,
        images=4,
    )
    given = trial.engine(asks)
    assert given["gpu_memory_utilization"] == 0.8
    assert given["speculative_config"] == drafts
    assert given["limit_mm_per_prompt"] == {"image": 4}
    assert asks.usable() == pytest.approx(24 * 0.8 * GIB)
    command = choices.serve(asks, attempt(8, 2, 10, room=20))
    assert "--gpu-memory-utilization 0.8" in command
    assert """--limit-mm-per-prompt '{"image": 4}'""" in command
    assert f"--speculative-config '{json.dumps(drafts)}'" in command
