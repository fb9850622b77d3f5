# SPDX-License-Identifier: Apache-2.0
"""`xpustack device serve` on a made-up machine: what its checks see."""

import json
from pathlib import Path
from typing import Any

import pytest
from device_calls import call, calls, serving


def test_serve_runs_its_checks(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch)
    done = call(checkout, "serve", "report", "--json")
    assert done.exit_code == 0, done.output
    assert "6 of 6 checks passed" in done.stdout
    assert calls(checkout) == [
        *("probe", "checkpoint", "engine", "engine", "reference", "engine"),
    ]
    page = (checkout / ".device/xpu/report/report.md").read_text()
    assert "| an all-reduce of two ranks |" not in page
    assert "| the same requests get the same tokens again | passed | 240 req" in page


def test_two_devices_serve_as_two_ranks(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, devices=2)
    done = call(checkout, "serve")
    assert done.exit_code == 0, done.output
    assert "8 of 8 checks passed" in done.stdout


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("graphs", "eager and captured engines give the same tokens: request 1"),
        ("reference", "the tokens are those of Hugging Face's model"),
        ("nan", "no log probability is NaN or infinite: 1 are"),
        ("repeat", "no answer repeats one token: request"),
        ("change", "the same requests get the same tokens again: request"),
        ("hosted", "experts in host memory give the same tokens: request 1, token 3"),
        ("ranks", "two ranks give the tokens of one: request 1, token 3"),
    ],
)
def test_what_serve_sees(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    serving(monkeypatch, devices=2, wrong=[fault])
    done = call(checkout, "serve")
    assert done.exit_code == 1
    assert f"serve: {said}" in done.stdout


def test_an_all_reduce_that_hangs_keeps_the_ranks_from_starting(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proof.on_device.stages.serve.ALL_REDUCE_SECONDS", 2.0)
    serving(monkeypatch, devices=2, hang=["all_reduce"])
    done = call(checkout, "serve", "--json")
    assert done.exit_code == 1
    assert "an all-reduce of two ranks: did not end within 2 s" in done.stdout
    assert calls(checkout).count("engine") == 3
    serve = json.loads(done.stdout)["data"]["stages"][1]
    assert len(serve["data"]["checks"]) == 6


def test_an_engine_that_fails_shows_its_last_lines(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, fail=["engine"])
    done = call(checkout, "serve")
    assert done.exit_code == 1
    assert "the engine, eager ended with exit status 1" in done.stdout


def test_an_older_vllm_has_no_experts_in_host_memory(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, lacks=True)
    done = call(checkout, "serve", "report")
    assert done.exit_code == 0
    page = (checkout / ".device/xpu/report/report.md").read_text()
    assert "| left out | this vLLM has no moe_expert_cache_size |" in page


def checkpoint(checkout: Path) -> str:
    folder = checkout.parent / "flash"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return str(folder)


def test_an_owners_checkpoint_is_served_with_its_experts_in_host_memory(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake answers 8 tokens a second after the prompt, or 16 to four requests."""
    serving(monkeypatch)
    done = call(checkout, "model", "report", "--model", checkpoint(checkout))
    assert done.exit_code == 0, done.output
    assert "8.0 tokens/s of one request, 16.0 of 4" in done.stdout
    assert "20% of experts had a slot" in done.stdout
    page = (checkout / ".device/xpu/report/report.md").read_text()
    assert "| tokens per second of one | 8.00 |" in page


@pytest.mark.parametrize(
    ("settings", "verdict", "said"),
    [
        ({"wrong": ["nan"]}, 1, "1 log probabilities are NaN or infinite"),
        ({"fail": ["engine"]}, 1, "the engine, host experts ended with exit status 1"),
        ({"lacks": True}, 0, "this vLLM has no moe_expert_cache_size"),
    ],
)
def test_an_owners_checkpoint_that_is_not_served(
    checkout: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    verdict: int,
    said: str,
) -> None:
    serving(monkeypatch, **settings)
    done = call(checkout, "model", "--model", checkpoint(checkout))
    assert done.exit_code == verdict
    assert said in done.stdout


def test_a_folder_without_a_checkpoint(checkout: Path) -> None:
    done = call(checkout, "model", "--model", str(checkout))
    assert done.exit_code == 2
    assert "there is no checkpoint" in done.output
