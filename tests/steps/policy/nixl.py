# SPDX-License-Identifier: Apache-2.0
"""A server of DeepSeek-V4 on XPU takes pages by NIXL where they were compared."""

from pathlib import Path
from typing import Any

import pytest
from helpers import layout

from . import starts
from .options import DSPARK as STAGES_OF_DSPARK

NAMES = ["NixlConnector", "NixlPullConnector"]
MTP = {"method": "mtp", "num_speculative_tokens": 1}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 1, "prompt_lookup_max": 2}
DSPARK = {"method": "dspark", "num_speculative_tokens": 3}


def end_of_configuration(
    folder: Path, transfer: dict[str, Any] | None, fields: Any = None, **options: Any
) -> str:
    """How a start with or without a connector ends, or that it goes on."""
    kind = layout.module("vllm.config").KVTransferConfig
    told = kind(kv_role="kv_consumer", **transfer) if transfer else None
    fields = {"num_hash_layers": 0, **(fields or {})}
    options |= {"kv_transfer_config": told}
    return starts.end(lambda: starts.configured(folder, fields, **options))


@pytest.mark.unchanged
@pytest.mark.parametrize("buffers", ["xpu", "cpu"])
@pytest.mark.parametrize("name", NAMES)
def test_one_server_reads_and_one_answers(
    tmp_path: Path, name: str, buffers: str
) -> None:
    transfer = {"kv_connector": name, "kv_buffer_device": buffers}
    for drafts, fields in ((None, None), (MTP, None), (DSPARK, STAGES_OF_DSPARK)):
        for ranks in (1, 2):
            end = end_of_configuration(
                tmp_path,
                transfer,
                fields,
                speculative_config=drafts,
                tensor_parallel_size=ranks,
            )
            assert end == "a configuration", f"the start ends with {end}"


@pytest.mark.parametrize("name", NAMES)
def test_both_at_once(tmp_path: Path, name: str) -> None:
    told = {"bidirectional_kv_xfer": True}
    transfer = {"kv_connector": name, "kv_connector_extra_config": told}
    end = end_of_configuration(tmp_path, transfer)
    assert "Drop it from kv_connector_extra_config" in end, f"the start ends with {end}"


def test_stages(tmp_path: Path) -> None:
    """The release itself refuses them, after it read the weights."""
    transfer = {"kv_connector": "NixlConnector"}
    end = end_of_configuration(tmp_path, transfer, pipeline_parallel_size=2)
    assert "in place of --pipeline-parallel-size" in end, f"the start ends with {end}"


@pytest.mark.parametrize(
    ("drafts", "served", "refused"),
    [(None, 8, 16), (MTP, 2, 4), (DSPARK, 2, 4)],
    ids=["alone", "MTP", "DSpark"],
)
def test_sizes_that_nobody_compared(
    tmp_path: Path, drafts: Any, served: int, refused: int
) -> None:
    transfer = {"kv_connector": "NixlConnector"}
    fields = {"num_attention_heads": 16, "o_groups": 16}
    if drafts is DSPARK:
        fields |= STAGES_OF_DSPARK

    def end(ranks: int) -> str:
        options = {"tensor_parallel_size": ranks, "speculative_config": drafts}
        return end_of_configuration(tmp_path, transfer, fields, **options)

    assert end(served) == "a configuration"
    found = end(refused)
    wanted = f"over {refused} tensor-parallel ranks"
    assert wanted in found and "on both sides" in found, f"the start ends with {found}"


def test_replicas(tmp_path: Path) -> None:
    transfer = {"kv_connector": "NixlConnector"}
    end = end_of_configuration(tmp_path, transfer, data_parallel_size=2)
    assert "Start a server for each" in end, f"the start ends with {end}"


def test_drafts_of_another_kind(tmp_path: Path) -> None:
    transfer = {"kv_connector": "NixlConnector"}
    end = end_of_configuration(tmp_path, transfer, speculative_config=NGRAMS)
    assert "drafts of ngram. Use method mtp" in end, f"the start ends with {end}"


@pytest.mark.parametrize("name", NAMES)
def test_one_of_several(tmp_path: Path, name: str) -> None:
    members = [
        {"kv_connector": member, "kv_role": "kv_both"}
        for member in ("OffloadingConnector", name)
    ]
    transfer = {
        "kv_connector": "MultiConnector",
        "kv_connector_extra_config": {"connectors": members},
    }
    end = end_of_configuration(tmp_path, transfer)
    wanted = f"{name} is not tried with the model as one of several. Use it alone"
    assert wanted in end, f"the start ends with {end}"


def test_pages_that_are_written(tmp_path: Path) -> None:
    transfer = {"kv_connector": "NixlPushConnector"}
    end = end_of_configuration(tmp_path, transfer)
    assert "compared those. Use NixlConnector" in end, f"the start ends with {end}"


@pytest.mark.unchanged
def test_no_connector(tmp_path: Path) -> None:
    assert end_of_configuration(tmp_path, None) == "a configuration"


@pytest.mark.unchanged
def test_a_connector_that_does_not_read_them(tmp_path: Path) -> None:
    transfer = {"kv_connector": "OffloadingConnector"}
    end = end_of_configuration(tmp_path, transfer, pipeline_parallel_size=2)
    assert end == "a configuration", f"the start ends with {end}"
