# SPDX-License-Identifier: Apache-2.0
"""The sweep: what may win, and what its file holds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab.benchmarks.tune import Tried, winner
from lab.benchmarks.tuned_rows import TunedDecode

ROOT = Path(__file__).parents[3]


def tried(microseconds: float, wrong: str = "", name: str = "T1") -> Tried:
    return Tried("k", "all", {"block_n": 16}, {name: microseconds}, wrong)


def test_the_fastest_wins_if_it_gains_enough():
    assert winner([tried(100), tried(80), tried(60), tried(90)]) == tried(60)
    assert winner([tried(100), tried(98)]) is None
    assert winner([tried(100)]) is None


def test_a_wrong_candidate_never_wins():
    assert winner([tried(100), tried(1, "relative error 1e-1")]) is None


def test_a_candidate_that_is_right_wins_over_a_default_that_is_wrong():
    assert winner([tried(100, "OutOfResources"), tried(80)]) == tried(80)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a dry run of one kernel writes."""
    made = tmp_path_factory.mktemp("tuned")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lab.benchmarks.tune", "--device", "interpreter"),
            *("--kernel", "paged_mqa_logits", "--out", str(made)),
        ],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.startswith("tuning CPU, interpreted\n")
    return made


def test_what_was_tried_is_written(folder: Path):
    default, candidate = json.loads((folder / "tried.json").read_text())
    assert default["configuration"] is None
    assert not default["wrong"] and not candidate["wrong"]
    assert default["microseconds"].keys() == candidate["microseconds"].keys()


def test_the_file_names_its_device(folder: Path):
    (path,) = folder.glob("cpu*.json")
    content = json.loads(path.read_text())
    assert content.keys() == {"schema", "device", "rows"}
    assert content["device"] == "CPU, interpreted"


def test_a_measured_row_is_a_configuration():
    row = TunedDecode(9, 16, 16, 32, 40, 2, 2, 128, True)
    config = row.config(1, 16, 640)
    assert (config.block_n, config.num_warps, config.splits) == (32, 2, 20)
    odd = row.config(1, 16, 640, aligned=False)
    assert (odd.num_warps, odd.q_blocks, odd.splits) == (4, False, 20)
