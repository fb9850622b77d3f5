# SPDX-License-Identifier: Apache-2.0
"""The compose file beside what docs/deploying.md says of a container."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from fenced import block

ROOT = Path(__file__).parents[3]
PAGE = "docs/deploying.md"


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    text = (ROOT / "deploy/compose.yaml").read_text()
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


@pytest.fixture(scope="module")
def service(services: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return services["vllm"]


def words(name: str, program: str) -> list[str]:
    """The words behind `program` in a block of the page."""
    text = block(PAGE, name).replace("\\\n", " ")
    line = next(line for line in text.splitlines() if program in line)
    return shlex.split(line.partition(program)[2])


def test_its_flags_are_those_of_the_page(service: dict[str, Any]):
    _, *given = words("serve", "vllm serve ")
    flags = re.sub(r" (?!--)", "=", " ".join(given)).split(" ")
    model, *own = service["command"]
    assert (model, own) == ("/model", flags)


def test_it_gives_the_container_what_the_page_gives(service: dict[str, Any]):
    given = words("image", "docker run ")
    pairs = list(pairwise(given))
    groups = [value for flag, value in pairs if flag == "--group-add"]
    (by_number,) = service["group_add"]
    assert groups == ["$(stat -c %g /dev/dri/renderD128)"]
    assert re.fullmatch(r"\$\{RENDER_GROUP:\?.*stat -c %g\}", by_number)
    page = dict(pairs)
    assert [page["--device"]] == service["devices"]
    assert page["--ipc"] == service["ipc"]
    assert [page["--publish"]] == service["ports"]
    assert f"{page['--stop-timeout']}s" == service["stop_grace_period"]
    assert page["--volume"].partition(":")[2] == "/model:ro"
    assert service["volumes"][0].endswith("}:/model:ro")
    assert "vllm-xpu-dsv4:0.33.0" in given
    assert service["image"] == "${IMAGE:-vllm-xpu-dsv4:0.33.0}"


def test_it_does_not_start_without_a_key(service: dict[str, Any]):
    assert service["environment"]["VLLM_API_KEY"].startswith("${VLLM_API_KEY:?")


def test_each_service_has_limits_and_comes_back(services: dict[str, dict[str, Any]]):
    assert list(services) == ["vllm", "proxy"]
    for one in services.values():
        assert one["mem_limit"] and one["pids_limit"]
        assert one["restart"] == "unless-stopped"


def test_users_come_by_the_proxy_and_its_paths(services: dict[str, dict[str, Any]]):
    proxy = services["proxy"]
    assert "./proxy.conf:/etc/nginx/nginx.conf:ro" in proxy["volumes"]
    conf = (ROOT / "deploy/proxy.conf").read_text()
    (port,) = re.findall(r"listen (\d+) ssl;", conf)
    assert [one.partition(":")[2] for one in proxy["ports"]] == [port]
    assert "server vllm:8000;" in conf
    (kinds,) = re.findall(r"location ~ \^/\((.*)\)\$ \{", conf)
    matched = re.compile(f"/(?:{kinds})")
    page = (ROOT / PAGE).read_text()
    (told,) = re.findall(r"a proxy\s+that passes on (.*?)\.\s", page, re.S)
    for path in re.findall("`(/[^`]*)`", told):
        assert matched.fullmatch(path)
