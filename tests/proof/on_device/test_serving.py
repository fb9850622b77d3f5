# SPDX-License-Identifier: Apache-2.0
"""`xpustack device serve` on a made-up machine: what its checks see."""

import json
from pathlib import Path

import pytest
from device_calls import call, calls, serving


def test_serve_runs_its_checks(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serving(monkeypatch)
    done = call(checkout, "serve", "report", "--json")
    assert done.exit_code == 0, done.output
    assert "5 of 5 checks passed" in done.stdout
    assert calls(checkout) == ["probe", "checkpoint", *["engine"] * 2, "reference"]
    page = (checkout / ".device/xpu/report/report.md").read_text()
    assert "| an all-reduce of two ranks |" not in page
    assert "| the same requests get the same tokens again | passed | 240 req" in page


def test_two_devices_serve_as_two_ranks(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, devices=2)
    done = call(checkout, "serve")
    assert done.exit_code == 0, done.output
    assert "7 of 7 checks passed" in done.stdout


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("graphs", "eager and captured engines give the same tokens: request 1"),
        ("reference", "the tokens are those of Hugging Face's model"),
        ("nan", "no log probability is NaN or infinite: 1 are"),
        ("repeat", "no answer repeats one token: request"),
        ("change", "the same requests get the same tokens again: request"),
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
    assert calls(checkout).count("engine") == 2
    serve = json.loads(done.stdout)["data"]["stages"][1]
    assert len(serve["data"]["checks"]) == 5


def test_an_engine_that_fails_shows_its_last_lines(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving(monkeypatch, fail=["engine"])
    done = call(checkout, "serve")
    assert done.exit_code == 1
    assert "the engine, eager ended with exit status 1" in done.stdout
