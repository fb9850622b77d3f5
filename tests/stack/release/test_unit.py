# SPDX-License-Identifier: Apache-2.0
"""The systemd unit beside what docs/deploying.md says of a server in no container."""

import re
import shlex
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
from fenced import block

ROOT = Path(__file__).parents[3]
UNIT = ROOT / "deploy/vllm-xpu-dsv4.service"
PAGE = "docs/deploying.md"
FOREIGN = ("user", "executable", "No such file")
"""What a machine without the server lacks."""


@pytest.fixture(scope="module")
def settings() -> dict[str, list[str]]:
    """The values of each setting, in their order."""
    text = re.sub(r"^#.*\n", "", UNIT.read_text(), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting:
            found.setdefault(name, []).append(value)
    return found


def words(name: str, program: str) -> list[str]:
    """The words behind `program` in a block of the page."""
    text = block(PAGE, name).replace("\\\n", " ")
    line = next(line for line in text.splitlines() if program in line)
    return shlex.split(line.partition(program)[2])


def test_it_starts_what_the_page_starts(settings: dict[str, list[str]]):
    [line] = settings["ExecStart"]
    shell, script, _, *flags = shlex.split(line)
    assert (shell, Path(script).name) == ("/bin/sh", "serve.sh")
    _, *asked = words("serve", "vllm serve ")
    assert flags == ["--host", "127.0.0.1", *asked]


def test_it_has_the_variables_of_the_page(settings: dict[str, list[str]]):
    spawn = block(PAGE, "serve").split()[0]
    exported = re.findall(r"^export (\S+)$", block(PAGE, "thresholds"), re.MULTILINE)
    assert {spawn, *exported} <= {*settings["Environment"]}


def test_its_key_is_in_a_file_and_nowhere_else(settings: dict[str, list[str]]):
    [file] = settings["EnvironmentFile"]
    assert f'echo "VLLM_API_KEY=$(openssl rand -hex 32)" > {file}' in UNIT.read_text()
    assert not file.startswith("-"), "a server without a key must not start"
    assert not any("API_KEY" in value for value in settings["Environment"])
    assert "--api-key" not in settings["ExecStart"][0]


def test_it_ends_as_the_page_says(settings: dict[str, list[str]]):
    page = (ROOT / PAGE).read_text()
    for name in ("KillMode", "OOMPolicy"):
        assert f"`{name}={settings[name][0]}`" in page
    script = (ROOT / "stack/release/serve.sh").read_text()
    drain = int(re.findall(r"--shutdown-timeout (\d+)", script)[0])
    given = dict(pairwise(words("image", "docker run ")))
    assert settings["TimeoutStopSec"] == [given["--stop-timeout"]]
    assert int(settings["TimeoutStopSec"][0]) >= drain + 10
    assert settings["Restart"] == ["always"]
    assert "exit 2" in script and settings["RestartPreventExitStatus"] == ["2"]


def test_systemd_reads_it():
    if not (program := shutil.which("systemd-analyze")):
        pytest.skip("no systemd-analyze")
    run = subprocess.run([program, "verify", UNIT], capture_output=True, text=True)
    said = [line for line in run.stderr.splitlines() if UNIT.name in line]
    assert [one for one in said if not any(word in one for word in FOREIGN)] == []
