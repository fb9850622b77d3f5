# SPDX-License-Identifier: Apache-2.0
"""What a plan makes of the starts that were tried, and of wrong input."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import Result, invoke
from msgspec import structs

from benchmarks.memory import FLASH
from planner import asked, choices, trial
from planner import page as plans
from xpustack.base.releases import Release, load
from xpustack.core.errors import UsageError
from xpustack.core.markdown import with_section
from xpustack.core.project import Project
from xpustack.core.rows import read_rows

GIB = 1 << 30
PROJECT = Project.find(Path(__file__).parent)


@pytest.fixture
def release() -> Release:
    return load(PROJECT)["v0.33.0"]


def wanted(device: str = "b60", count: int = 16, requests: int = 16) -> asked.Asked:
    found = asked.device(device)
    return asked.Asked(asked.checkpoint("flash"), found, count, 131_072, requests)


def attempt(
    ranks: int, stages: int, weights: float, room: int, refused: str = "", **more: int
) -> trial.Attempt:
    held = trial.Stage(int(weights * GIB), GIB // 2, GIB)
    chunk = more.get("chunk", 8192)
    built = more.get("built", stages)
    return trial.Attempt(ranks, stages, chunk, refused, (held,) * built, room)


def run(*words: str) -> Result:
    return invoke("-C", PROJECT.root, "plan", *words)


def test_every_split_uses_every_device():
    splits = wanted(count=6).splits()
    assert [tuple(one.values()) for one in splits] == [(6, 1), (3, 2), (2, 3), (1, 6)]


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
    refused = [
        attempt(4, 1, 37.2, room=0, refused="No available memory"),
        attempt(2, 2, 37.9, room=0, refused="No available memory"),
        attempt(1, 4, 0, room=0, refused="too few layers", built=0),
    ]
    error = choices.nothing_fits(four, release, refused)
    # 37.2 + 0.5 + 3 of 21.6 GiB.
    assert error.detail == (
        "TP 4: 19.1 GiB short on a device: weights and buffers 37.7, activations 3,"
        " usable 21.6",
    )
    assert "--device b60 --count 16" in str(error.hint)
    assert len(str(error).splitlines()) == 3
    tables = structs.replace(refused[0].stages[0], pinned=33 * GIB)
    pinning = structs.replace(refused[0], stages=(tables,))
    assert choices.why(four, pinning).endswith("usable 21.6; the host pins 132 besides")


def test_a_refusal_of_the_release_is_passed_on(release: Release):
    refused = attempt(16, 1, 0, 0, refused="16 does not\ndivide 8", built=0)
    assert choices.why(wanted(), refused) == "16 does not divide 8"


def test_the_command_is_the_documented_one(release: Release):
    """Flags, order and values of the page's section Serve."""
    page = (PROJECT.root / "docs/deploying.md").read_text("utf-8")
    documented = page.partition("## Serve")[2].partition("```sh\n")[2]
    documented = " ".join(documented.partition("```")[0].replace("\\\n", "").split())
    command = choices.serve(wanted("b70", 8), attempt(8, 1, 19, room=20))
    assert command == f"VLLM_WORKER_MULTIPROC_METHOD=spawn {documented}"
    image = choices.container(wanted("b70", 8), attempt(8, 1, 19, room=20), release)
    assert image.endswith(documented.partition("DeepSeek-V4-Flash ")[2])
    assert "vllm-xpu-dsv4:0.33.0 /model" in image


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
    ],
)
def test_wrong_input_is_three_lines(words: tuple[str, ...], code: int, says: str):
    done = run(*words, "--count", "8")
    assert done.exit_code == code
    assert says in done.output
    lines = [n for n in done.output.splitlines() if not n.startswith("  release: ")]
    assert len(lines) == 3
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
        asked.checkpoint(str(tmp_path))
    assert says in caught.value.detail[0]


def test_flash_is_that_of_the_arithmetic():
    assert asked.checkpoint("flash").model is FLASH


def test_a_file_without_tensors_is_no_checkpoint(tmp_path: Path):
    text = dict.fromkeys(asked.V41_KEYS, 3) | {
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "engram_layer_ids": [1],
    }
    config = {"model_type": "deepseek_v41", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as caught:
        asked.checkpoint(str(tmp_path))
    assert caught.value.detail == ("it has no *.safetensors",)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 16)
    with pytest.raises(UsageError) as caught:
        asked.checkpoint(str(tmp_path))
    assert caught.value.detail == ("model.safetensors is no safetensors file",)


def test_replicas_share_devices_and_requests():
    whole = wanted()
    two = replace(whole, count=4, replicas=2, expert_parallel=True)
    more = {"data_parallel_size": 2, "enable_expert_parallel": True}
    assert two.splits() == [
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
    asks = replace(wanted(), checkpoint=asked.checkpoint("v4.1"))
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
        "limit": "launches",
    }
    machine = dict.fromkeys(plans.MACHINE, "x")
    reasons = {"TP 16": "16 does not divide 8. Use 8."}
    rows = plans.rows_of(machine | {"choices": [choice], "refused": reasons})
    (starts,) = plans.shown(rows).splitlines()[2:]
    assert "| TP 8 | 19.0 | 20 | 8192 | 8 + 0 | 100 to 200 | launches |" in starts
    short = {"TP 4": "2 GiB short on a device", "TP 16": "16 does not divide 8"}
    (refused,) = plans.shown(
        plans.rows_of(machine | {"choices": [], "refused": short})
    ).splitlines()[2:]
    assert refused.endswith("| 2 GiB short on a device |")
    choice |= {"requests": 30}
    again = plans.rows_of(machine | {"choices": [choice], "refused": {}})
    other = [row | {"count": "16"} for row in rows]
    assert plans.merged([*rows, *other], again) == [*again, *other]
