# SPDX-License-Identifier: Apache-2.0
"""A release's own start of the published model holds what the arithmetic says."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from benchmarks import memory
from e2e import checkpoint, v41
from e2e.serving import Engines
from planner import asked, choices, trial
from xpustack.base.releases import load
from xpustack.core.cache import Cache
from xpustack.core.project import Project


@dataclass(frozen=True)
class OneSplit(asked.Asked):
    """Eight ranks of one stage alone."""

    def splits(self) -> list[dict[str, int]]:
        return [{"tensor_parallel_size": 8, "pipeline_parallel_size": 1}]


def start(
    engines: Engines, release: str, device: str
) -> tuple[asked.Asked, trial.Trial]:
    wanted = OneSplit(asked.checkpoint("flash"), asked.device(device), 8, 131_072, 8)
    return wanted, run(release, wanted)


def on_a_device(device: str) -> pytest.MarkDecorator:
    """Starts it for the test beside other tests."""

    def begin(engines: Engines, release: str) -> None:
        engines.begin(start, release, device)

    return pytest.mark.begins(start=begin)


def run(release: str, wanted: asked.Asked) -> trial.Trial:
    project = Project.find(Path(__file__).parent)
    pinned = load(project)[release]
    return trial.run(project, Cache.default(progress=print), pinned, wanted)


@pytest.mark.newest
@on_a_device("max1100")
def test_weights_are_those_of_the_arithmetic(engines: Engines, release: str) -> None:
    """Within 0.1 %, as stored or with linear layers in bf16, as the page says."""
    wanted, tried = engines.begin(start, release, "max1100").result()
    (choice,) = choices.choices(wanted, tried)
    (stage,) = choice.attempt.stages
    forms = [memory.weights(memory.FLASH, 8, widened=wide) for wide in (False, True)]
    assert any(stage.weights == pytest.approx(form, rel=1e-3) for form in forms)
    # Of blocks of 256 tokens; the arithmetic leaves out buffers.
    tokens = memory.room(memory.FLASH, 8, wanted.device)
    assert 0.6 * tokens < choice.attempt.room * wanted.context < tokens


@pytest.mark.newest
@on_a_device("b60")
def test_what_does_not_fit_is_refused(engines: Engines, release: str) -> None:
    wanted, tried = engines.begin(start, release, "b60").result()
    assert not choices.choices(wanted, tried)
    (refused,) = choices.refusals(tried, [])
    room = wanted.usable() - choices.ACTIVATIONS
    short = [
        (memory.weights(memory.FLASH, 8, widened=wide) - room) / memory.GIB
        for wide in (False, True)
    ]
    # The arithmetic leaves out buffers: less than a GiB.
    found = choices.missing(wanted, refused)
    assert any(0 < found - least < 1 for least in short), (found, short)
    assert "GiB short on a device" in choices.why(wanted, refused)


@pytest.mark.newest
def test_a_folder_is_planned_as_it_is(release: str, tmp_path: Path) -> None:
    folder, _ = checkpoint.write(tmp_path)
    device = asked.device("b50")
    wanted = asked.Asked(asked.checkpoint(str(folder)), device, 1, 512, 4)
    (choice,) = choices.choices(wanted, run(release, wanted))
    assert not choice.attempt.stages[0].unset
    file = folder / "model.safetensors"
    whole = load_file(file)
    del whole["layers.1.attn.wkv.scale"]
    save_file(whole, file)
    wanted = asked.Asked(asked.checkpoint(str(folder)), device, 1, 512, 4)
    (refused,) = run(release, wanted).attempts
    assert refused.refused == "the checkpoint has no layers.1.attn.wkv.scale"


@pytest.mark.full
@pytest.mark.newest
def test_replicas_share_the_experts(release: str, tmp_path: Path) -> None:
    given = asked.checkpoint(str(checkpoint.write(tmp_path)[0])), asked.device("b50")
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
    given = asked.checkpoint(str(folder)), asked.device("b50")
    wanted = asked.Asked(*given, 1, 512, 4)
    (choice,) = choices.choices(wanted, run(release, wanted))
    tables = [t.nbytes for n, t in writer.published.items() if ".engram.embed." in n]
    assert choice.attempt.fullest.pinned == sum(
        1 << (size - 1).bit_length() for size in tables
    )
    assert not choice.attempt.stages[0].unset
    two = asked.Asked(*given, 2, 512, 4, replicas=2)
    (refused,) = run(release, two).attempts
    assert "--data-parallel-size 2 is not tested with V4.1" in refused.refused
