# SPDX-License-Identifier: Apache-2.0
"""Both Containerfiles: parsed, linted, and in step with what a build yields."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import version as version_of
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from shipped_stack import ShippedStack

from xpustack.core.project import Project
from xpustack.release.ship import HEALTH, STARTERS

ARGUMENTS = {
    "deploy/Containerfile": "container.args",
    "deploy/official.Containerfile": "official.args",
}
VIRTUAL_ENVIRONMENT = "/opt/venv"
"""Where the base's images, and ours, have their Python environment."""


@pytest.fixture(params=ARGUMENTS)
def path(request: pytest.FixtureRequest, real_project: Project) -> Path:
    return real_project.root / request.param


@pytest.fixture
def lines(path: Path) -> list[dict[str, str]]:
    parser = DockerfileParser(fileobj=io.BytesIO(path.read_bytes()))
    return [line for line in parser.structure if line["instruction"] != "COMMENT"]


def of(lines: list[dict[str, str]], instruction: str) -> list[str]:
    return [line["value"] for line in lines if line["instruction"] == instruction]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    return subprocess.run(
        [str(program), "--no-color", str(path)], capture_output=True, text=True
    )


def test_hadolint_has_nothing_to_say(path: Path):
    done = hadolint(path)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_does_judge(path: Path, tmp_path: Path):
    bad = tmp_path / "Containerfile"
    bad.write_text(path.read_text() + "RUN cd /tmp\n")
    done = hadolint(bad)
    assert (done.returncode, "DL3003" in done.stdout) == (1, True), done.stdout


def test_its_arguments_are_those_that_a_build_yields(
    path: Path, lines: list[dict[str, str]], shipped: ShippedStack
):
    name = ARGUMENTS[f"deploy/{path.name}"]
    text = (shipped.root / "dist/v1.0" / name).read_text()
    given = {line.partition("=")[0] for line in text.splitlines()}
    asked = {value.partition("=")[0] for value in of(lines, "ARG")}
    assert asked == given
    assert not any(" " in line for line in text.splitlines())


def test_it_copies_what_lies_beside_a_wheel(
    lines: list[dict[str, str]], shipped: ShippedStack
):
    [copied] = of(lines, "COPY")
    *names, wheel, place = copied.split()
    assert (wheel, place) == ("${WHEEL}", "./")
    folder = shipped.root / "dist/v1.0"
    assert {"constraints.txt", "runtime.txt"} <= set(names)
    assert set(names) <= {path.name for path in folder.iterdir()}


def test_the_image_comes_from_the_base_and_no_host_is_named(
    path: Path, lines: list[dict[str, str]]
):
    [image] = of(lines, "FROM")
    assert image in ("${BASE_IMAGE}", "${OFFICIAL_IMAGE}")
    assert not re.search(r"https?://|\.(com|org|io|ai)\b", path.read_text())


def test_the_health_check_runs_a_file_that_is_copied(lines: list[dict[str, str]]):
    [check] = of(lines, "HEALTHCHECK")
    program, file = json.loads(check.partition("CMD ")[2])
    assert program == f"{VIRTUAL_ENVIRONMENT}/bin/python3"
    copy = next(i for i, line in enumerate(lines) if line["instruction"] == "COPY")
    places = of(lines[:copy], "WORKDIR")
    *names, target = lines[copy]["value"].split()
    assert target == "./"
    assert file in {f"{places[-1]}/{name}" for name in names}
    assert HEALTH in names


def test_the_server_is_what_starts_and_asks_for_its_key(
    path: Path, lines: list[dict[str, str]]
):
    """By a file that is copied: no `vllm serve` of its own, whose paths are open."""
    shell, script = json.loads(of(lines, "ENTRYPOINT")[0])
    assert (shell, script) == ("sh", "/opt/wheel/serve.sh")
    [copied] = of(lines, "COPY")
    assert set(STARTERS) <= set(copied.split())
    # The official image keeps upstream's user.
    users = of(lines, "USER")
    assert users == (["10001"] if path.name == "Containerfile" else [])


def test_it_sets_what_graphs_over_ranks_need_as_the_page_says(
    lines: list[dict[str, str]], real_project: Project
):
    page = (real_project.root / "docs/deploying.md").read_text()
    named = set(re.findall(r"(?m)^export (CCL_SYCL_\w+_SIMPLE_THRESHOLD=\d+)$", page))
    assert len(named) == 2
    assert named <= set(" ".join(of(lines, "ENV")).split())


def test_both_use_the_folder_of_the_environment_that_the_base_uses(
    lines: list[dict[str, str]],
):
    assert any(f"{VIRTUAL_ENVIRONMENT}" in script for script in of(lines, "RUN"))


def test_the_official_image_keeps_everything_but_vllm(real_project: Project):
    text = (real_project.root / "deploy/official.Containerfile").read_text()
    [line] = re.findall(r"pip install (.*(?:\\\n.*)?)", text)
    assert "--no-deps" in line and "apt-get" not in text


def test_every_script_is_one_that_bash_understands(lines: list[dict[str, str]]):
    bash = shutil.which("bash")
    assert bash is not None
    for script in of(lines, "RUN"):
        done = subprocess.run(
            [bash, "-n", "-c", script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        # A step between semicolons that fails must stop the build.
        assert ";" not in script or "set -o errexit;" in script or "-c" in script


def test_its_last_check_refuses_another_version(
    lines: list[dict[str, str]], tmp_path: Path
):
    """The very script, run here against pytest's own version."""
    [script] = [script for script in of(lines, "RUN") if "importlib" in script]
    code = re.search(r'python3 -c "(.*)"', script, re.DOTALL)
    assert code is not None

    def run(
        version: str, runtime: str = "", removed: str = ""
    ) -> subprocess.CompletedProcess[str]:
        (tmp_path / "constraints.txt").write_text(
            f"# a comment: torch==0\npytest=={version}\n"
        )
        (tmp_path / "runtime.txt").write_text(f"# nothing==0\n{runtime}\n")
        return subprocess.run(
            [sys.executable, "-c", code[1]],
            cwd=tmp_path,
            env={**os.environ, "REMOVED": removed},
            capture_output=True,
            text=True,
        )

    assert run(pytest.__version__).returncode == 0
    assert (
        run(pytest.__version__, f"rich=={version_of('rich')}", "oneccl").returncode == 0
    )
    done = run("0.1")
    assert (done.returncode, "not 0.1" in done.stderr) == (1, True)
    assert run(pytest.__version__, "rich==0.1").returncode == 1
    if "REMOVED" in code[1]:
        assert "still there" in run(pytest.__version__, removed="a,rich").stderr


def run_with_stubs(
    script: str, arguments: dict[str, str], folder: Path
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run an instruction's script with programs that only note how they were called;
    system folders become folders below `folder`."""
    programs, log = folder / "bin", folder / "log"
    programs.mkdir()
    log.touch()
    for name in ("apt-get", "curl", "gpg", "bash", "pip"):
        stub = programs / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\ntouch oneccl.sh\n')
        stub.chmod(0o755)
    for place in ("/usr/share/keyrings", "/etc/apt", "/var/lib/apt"):
        script = script.replace(place, f"{folder}{place}")
    for place in ("usr/share/keyrings", "etc/apt/sources.list.d", "var/lib/apt/lists"):
        (folder / place).mkdir(parents=True)
    (folder / "etc/apt/preferences.d").mkdir()
    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", script],
        cwd=folder,
        env={"PATH": f"{programs}:/usr/bin:/bin", **arguments},
        capture_output=True,
        text=True,
    )
    return done, log.read_text().splitlines()


@pytest.fixture
def self_made(real_project: Project) -> list[str]:
    data = (real_project.root / "deploy/Containerfile").read_bytes()
    parser = DockerfileParser(fileobj=io.BytesIO(data))
    return of(parser.structure, "RUN")


def test_intels_packages_and_oneccl_are_installed_where_they_are_named(
    self_made: list[str], tmp_path: Path
):
    [script] = [script for script in self_made if "ONEAPI_PACKAGES" in script]
    root = tmp_path / "opt/ccl/9.1"
    (root / "lib").mkdir(parents=True)
    arguments = {
        "ONEAPI_PACKAGES": "intel-oneapi-a-1.0,intel-oneapi-b-1.0",
        "ONEAPI_PIN": "1.0*",
        "ONEAPI_SIGNER_URL": "https://example.org/key",
        "ONEAPI_SOURCE_URL": "https://example.org/oneapi",
        "CCL_INSTALLER_URL": "https://example.org/ccl.sh",
        "CCL_ROOT": str(root),
    }
    done, calls = run_with_stubs(script, arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    installed = [call.split()[-1] for call in calls if "apt-get install" in call]
    assert installed == ["intel-oneapi-a-1.0", "intel-oneapi-b-1.0"]
    assert "bash oneccl.sh -a --silent --eula accept" in calls
    assert (root.parent / "latest").resolve() == root
    source = (tmp_path / "etc/apt/sources.list.d/oneapi.list").read_text()
    assert source.endswith(" https://example.org/oneapi all main\n")
    pin = (tmp_path / "etc/apt/preferences.d/oneapi.pref").read_text()
    assert "Pin: version 1.0*\n" in pin


def test_nothing_of_it_happens_where_the_release_names_none(
    self_made: list[str], tmp_path: Path
):
    [script] = [script for script in self_made if "ONEAPI_PACKAGES" in script]
    done, calls = run_with_stubs(script, {}, tmp_path)
    assert (done.returncode, calls) == (0, [])


def test_an_installer_that_installs_elsewhere_stops_the_build(
    self_made: list[str], tmp_path: Path
):
    [script] = [script for script in self_made if "ONEAPI_PACKAGES" in script]
    arguments = {"CCL_INSTALLER_URL": "x", "CCL_ROOT": str(tmp_path / "absent")}
    done, _ = run_with_stubs(script, arguments, tmp_path)
    assert done.returncode != 0


def test_the_runtime_comes_last_and_replaces_what_goes(
    self_made: list[str], tmp_path: Path
):
    [script] = [script for script in self_made if "runtime.txt; then" in script]
    (tmp_path / "pins.txt").write_text("torch==1 --hash=sha256:0\n")
    (tmp_path / "runtime.txt").write_text("# none\noneccl==8\n")
    arguments = {
        "INDEX_URLS": "https://a.example,https://b.example",
        "REMOVED": "oneccl,oneccl-devel",
        "TRITON": "triton==3",
        "WHEEL": "vllm.whl",
    }
    done, calls = run_with_stubs(script, arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    words = [call.replace("--no-cache-dir ", "").split() for call in calls]
    indexes = "--extra-index-url https://a.example --extra-index-url https://b.example"
    assert [" ".join(call).replace(f" {indexes}", "") for call in words] == [
        "pip install --no-deps --require-hashes --requirement pins.txt",
        "pip install --constraint constraints.txt ./vllm.whl",
        "pip uninstall --yes triton triton-xpu",
        "pip install --no-deps triton==3",
        "pip uninstall --yes oneccl",
        "pip uninstall --yes oneccl-devel",
        "pip install --requirement runtime.txt",
    ]
