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
def service() -> dict[str, Any]:
    text = (ROOT / "deploy/compose.yaml").read_text()
    (found,) = yaml.safe_load(text)["services"].values()
    return dict(found)


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
