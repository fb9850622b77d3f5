# SPDX-License-Identifier: Apache-2.0
"""deploy/llm-d.yaml beside the page's flags, and, where they are, by llm-d's chart and
Helm: `pip install helm-python-sdk==0.2.2`, and XPUSTACK_LLM_D names the chart's folder
(charts/llm-d-modelservice of v0.4.12)."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from fenced import block

ROOT = Path(__file__).parents[3]
PAGE = "docs/deploying.md"
SIDES = ("prefill", "decode")
OWN = ("--tensor-parallel-size", "--pipeline-parallel-size", "--max-num-batched-tokens")
"""What a plan says of other devices than the page's; stages are not served apart."""
GRACE = 10
"""Seconds that an orchestrator waits longer than a server drains."""


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "deploy/llm-d.yaml").read_text())
    return found


def container(values: dict[str, Any], side: str) -> dict[str, Any]:
    (one,) = values[side]["containers"]
    return dict(one)


def flags(values: dict[str, Any], side: str) -> dict[str, str]:
    pairs = (flag.partition("=") for flag in container(values, side)["args"])
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize("side", SIDES)
def test_its_flags_are_those_of_the_page(values: dict[str, Any], side: str):
    words = block(PAGE, "serve").replace("\\\n", " ").partition("vllm serve ")[2]
    _, *given = re.sub(r" (?!--)", "=", " ".join(words.split())).split(" ")
    page = dict(flag.partition("=")[::2] for flag in given)
    own = flags(values, side)
    grace = values[side]["terminationGracePeriodSeconds"]
    assert int(own.pop("--shutdown-timeout")) + GRACE == grace
    transfer = json.loads(own.pop("--kv-transfer-config"))
    role = {"prefill": "kv_producer", "decode": "kv_consumer"}[side]
    assert transfer["kv_connector"] == "NixlConnector"
    assert transfer["kv_role"] == role
    for name in OWN:
        page.pop(name, None)
        own.pop(name, None)
    assert own == page


def test_both_sides_are_of_one_revision(values: dict[str, Any]):
    given = [container(values, side) for side in SIDES]
    assert given[0]["image"] == given[1]["image"] == "vllm-xpu-dsv4:0.33.0"
    assert given[0]["env"] == given[1]["env"]
    for side in SIDES:
        assert values[side]["strategy"] == {"type": "Recreate"}


def test_pods_without_a_key_take_few_connections(values: dict[str, Any]):
    (policy,) = values["extraObjects"]
    among, clients = policy["spec"]["ingress"]
    selected = policy["spec"]["podSelector"]
    assert among == {"from": [{"podSelector": selected}]}
    assert selected["matchLabels"].items() <= values["modelArtifacts"]["labels"].items()
    (where,) = clients["from"]
    assert list(where) == ["namespaceSelector"]
    routing = values["routing"]
    ports = {port["port"] for port in clients["ports"]}
    assert ports == {routing["servicePort"], routing["proxy"]["targetPort"]}


def test_the_chart_takes_them(values: dict[str, Any]):
    helm = pytest.importorskip("helm_python")
    if not (folder := os.environ.get("XPUSTACK_LLM_D")):
        pytest.skip("XPUSTACK_LLM_D names no chart")
    chart = helm.Chart.load(folder)
    chart.validate_schema(values)
    made = chart.render(values, name="dsv4", namespace="dsv4")
    objects = [one for text in made.values() for one in yaml.safe_load_all(text) if one]
    pods = {
        one["metadata"]["name"].rpartition("-")[2]: one["spec"]["template"]["spec"]
        for one in objects
        if one["kind"] == "Deployment"
    }
    assert set(pods) == set(SIDES)
    for side, port in (("prefill", 8000), ("decode", 8200)):
        (server,) = pods[side]["containers"]
        assert server["command"] == ["vllm", "serve"]
        assert server["args"][1:3] == ["--port", str(port)]
        assert server["livenessProbe"]["httpGet"] == {"path": "/health", "port": port}
        assert server["resources"]["limits"]["gpu.intel.com/xe"] == "8"
    (sidecar,) = pods["decode"]["initContainers"]
    assert {"--port=8000", "--vllm-port=8200"} <= set(sidecar["args"])
