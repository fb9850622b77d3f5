# SPDX-License-Identifier: Apache-2.0
"""The host's time is taken of calls that would launch."""

import pytest

from lab.benchmarks import host


def test_each_call_launches() -> None:
    found = {name: host.launches_of(call) for name, call in host.calls().items()}
    assert found == {"decode": 2, "insert": 1, "inverse RoPE": 1}


def test_each_op_gets_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "CALLS", 2)
    monkeypatch.setattr(host, "ROUNDS", 1)
    found = host.measure()
    assert list(found) == ["decode", "insert", "inverse RoPE"]
    assert all(value > 0 for value in found.values())
