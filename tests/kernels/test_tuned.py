# SPDX-License-Identifier: Apache-2.0
"""A device's file of measured configurations, and what a file that is wrong costs."""

import json
import logging
from pathlib import Path

import pytest

from kernels.xpu_dsv4 import _tuned
from kernels.xpu_dsv4._decode_config import (
    TunedDecode,
    decode_config,
    sparse_decode_workspace_size,
)
from kernels.xpu_dsv4._logits import DEFAULT, LogitsConfig, logits_config
from kernels.xpu_dsv4.sparse_prefill import TunedPrefill, prefill_config

DEVICE = "Test(R) GPU 9"
DECODE = TunedDecode(9, 16, 16, 32, 40, 2, 2, 128, True, True)
PREFILL = TunedPrefill(1, 16, 16, 32, 4, 2, 128, True, True)
LOGITS = LogitsConfig(4, 32, 4, 1, 128)


def document(**changes: object) -> dict[str, object]:
    rows = {
        "sparse_decode": [DECODE._asdict()],
        "sparse_prefill": [PREFILL._asdict()],
        "mqa_logits": [LOGITS._asdict()],
    }
    return {"schema": 1, "device": DEVICE, "rows": {**rows, **changes}}


@pytest.fixture
def folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Path:
    """An empty folder of files, read anew by each test, of `DEVICE`."""
    monkeypatch.delenv(_tuned.VARIABLE, raising=False)
    monkeypatch.setattr(_tuned, "FOLDER", tmp_path)
    monkeypatch.setattr(_tuned, "_device_name", lambda kind: DEVICE)
    caplog.set_level(logging.WARNING)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    _tuned.tuned_rows.cache_clear()
    _tuned._rows_by_kernel.cache_clear()


def write(folder: Path, content: object) -> Path:
    path = folder / "test-r-gpu-9.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def choices() -> list[object]:
    """What every kernel takes, for many shapes."""
    return [
        *(decode_config("xpu", t, h, 640) for t in (1, 64) for h in (1, 9, 16, 64)),
        *(prefill_config("xpu", heads) for heads in (1, 16, 64)),
        logits_config("mqa_logits", "xpu"),
        logits_config("mqa_logits_mxfp4", "xpu"),
        logits_config("paged_mqa_logits", "xpu"),
    ]


@pytest.fixture
def default(folder: Path) -> list[object]:
    return choices()


def test_without_a_file_nothing_is_said(default, caplog):
    assert default[-1] == DEFAULT
    assert not caplog.records


def test_a_file_decides_for_its_heads_alone(default, folder, caplog):
    write(folder, document())
    forget()
    assert decode_config("xpu", 1, 8, 640) == default[0]
    assert decode_config("xpu", 1, 64, 640) == default[3]
    config = decode_config("xpu", 1, 16, 640)
    assert (config.block_n, config.num_warps, config.splits) == (32, 2, 20)
    odd = decode_config("xpu", 1, 16, 640, aligned=False)
    assert (odd.num_warps, odd.q_blocks, odd.splits) == (4, False, 20)
    assert prefill_config("xpu", 16).num_warps == 4
    assert not prefill_config("xpu", 16, aligned=False).q_blocks
    assert logits_config("mqa_logits", "xpu") == LOGITS
    assert logits_config("paged_mqa_logits", "xpu") == DEFAULT
    assert not caplog.records


def test_only_gathered_mxfp4_keys_take_tiles_of_more_than_64(folder, caplog):
    wide = LOGITS._replace(block_n=256)
    kernels = ("mqa_logits", "mqa_logits_mxfp4", "paged_mqa_logits")
    write(folder, document(**{name: [wide._asdict()] for name in kernels}))
    forget()
    found = [logits_config(name, "xpu") for name in kernels]
    assert found == [DEFAULT, wide, DEFAULT]
    assert len(caplog.records) == 2


@pytest.mark.parametrize("aligned", [True, False])
def test_workspace_serves_a_measured_configuration(folder, aligned):
    write(folder, document())
    forget()
    size = sparse_decode_workspace_size(300, 16, 640)
    splits = [decode_config("xpu", t, 16, 640, aligned).splits for t in range(1, 301)]
    assert splits == sorted(splits, reverse=True)
    assert size == max(
        t * 16 * count * 514 for t, count in enumerate(splits, 1) if count > 1
    )


def test_the_variable_names_another_file(default, folder, monkeypatch):
    other = folder / "other.json"
    other.write_text(json.dumps(document()))
    monkeypatch.setenv(_tuned.VARIABLE, str(other))
    forget()
    assert logits_config("mqa_logits", "xpu") == LOGITS


FAULTS = {
    "no JSON": "{",
    "no table": [],
    "another schema": {**document(), "schema": 2},
    "another device": {**document(), "device": "Other GPU"},
    "no rows": {"schema": 1, "device": DEVICE},
    "rows of another kind": {**document(), "rows": {"sparse_decode": {}}},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_fit_is_left_alone(fault, default, folder, caplog):
    path = write(folder, FAULTS[fault])
    forget()
    assert choices() == default
    assert choices() == default
    (record,) = caplog.records
    assert str(path) in record.getMessage()


def test_a_named_file_that_is_missing(default, folder, monkeypatch, caplog):
    monkeypatch.setenv(_tuned.VARIABLE, str(folder / "absent.json"))
    forget()
    assert choices() == default
    (record,) = caplog.records
    assert "absent.json" in record.getMessage()


GONE = {
    "a tile that the kernel lost": DECODE._replace(block_n=24)._asdict(),
    "a field that is gone": {**DECODE._asdict(), "pairs": 2},
    "a field that is missing": {"block_n": 32},
    "a text": {**DECODE._asdict(), "num_warps": "4"},
    "a number for a truth value": {**DECODE._asdict(), "q_blocks": 1},
    "no row": 3,
}


@pytest.mark.parametrize("gone", GONE)
def test_a_configuration_that_is_gone_costs_its_kernel_alone(
    gone, default, folder, caplog
):
    write(folder, document(sparse_decode=[GONE[gone]]))
    forget()
    assert choices()[:8] == default[:8]
    assert logits_config("mqa_logits", "xpu") == LOGITS
    (record,) = caplog.records
    assert "sparse_decode" in record.getMessage()
    assert "tune this device again" in record.getMessage()


def test_kernels_ask_for_no_file_off_a_gpu():
    assert _tuned._device_name("meta") is None
    assert _tuned._device_name("cpu") is None
