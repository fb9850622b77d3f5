# SPDX-License-Identifier: Apache-2.0
"""Both Containerfiles as a build writes them: parsed, linted, and their scripts run by
programs that only note their calls."""

import io
import json
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser
from made import ONEAPI, read, text
from shipped_stack import ShippedStack
from tiny_stack import DOCKERFILE, PUBLISHING

from stack.base.releases import Release
from stack.core.project import Project
from stack.release.runtime import OneApi, Runtime
from stack.release.ship import HEALTH, IMAGE, INSTALL, OFFICIAL_IMAGE, STARTERS

VIRTUAL_ENVIRONMENT = "/opt/venv"
"""Where the base's images, and ours, have their Python environment."""
Lines = list[dict[str, str]]


def everything(release: Release) -> Runtime:
    """A runtime of which each part that a base may name is there."""
    of_torch = read(DOCKERFILE, release, PUBLISHING)
    return replace(
        read(ONEAPI, release),
        drivers=of_torch.drivers,
        removed=of_torch.removed,
        packages=of_torch.packages,
    )


MADE: dict[str, tuple[str, Callable[[Release], Runtime]]] = {
    "of its own": (IMAGE, lambda release: read(DOCKERFILE, release)),
    "with all": (IMAGE, everything),
    "upstream's": (
        OFFICIAL_IMAGE,
        lambda release: read(DOCKERFILE, release, PUBLISHING),
    ),
}


@pytest.fixture(params=MADE)
def path(request: pytest.FixtureRequest, release: Release, tmp_path: Path) -> Path:
    name, made = MADE[request.param]
    file = tmp_path / name
    file.write_text(text(name, release, made(release)))
    return file


def parsed(data: str) -> Lines:
    parser = DockerfileParser(fileobj=io.BytesIO(data.encode()))
    return [line for line in parser.structure if line["instruction"] != "COMMENT"]


@pytest.fixture
def lines(path: Path) -> Lines:
    return parsed(path.read_text())


def of(lines: Lines, instruction: str) -> list[str]:
    return [line["value"] for line in lines if line["instruction"] == instruction]


def hadolint(path: Path) -> subprocess.CompletedProcess[str]:
    program = Path(sysconfig.get_path("scripts")) / "hadolint"
    return subprocess.run(
        [str(program), "--no-color", str(path)], capture_output=True, text=True
    )


def test_hadolint_has_nothing_to_say(path: Path):
    done = hadolint(path)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_hadolint_does_judge(path: Path):
    path.write_text(path.read_text() + "RUN cd /tmp\n")
    done = hadolint(path)
    assert (done.returncode, "DL3003" in done.stdout) == (1, True), done.stdout


def test_it_asks_for_no_argument(lines: Lines):
    """So `podman build` and `docker build` take the same line."""
    assert of(lines, "ARG") == []
    assert "{{" not in str(lines)


def test_it_copies_what_lies_beside_a_wheel(shipped: ShippedStack):
    folder = shipped.root / "dist/v1.0"
    for name in (IMAGE, OFFICIAL_IMAGE):
        [copied] = of(parsed((folder / name).read_text()), "COPY")
        *names, place = copied.split()
        assert place == "./"
        assert {"constraints.txt", "runtime.txt", "pinned.py", HEALTH} <= set(names)
        assert set(names) <= {path.name for path in folder.iterdir()}
        assert [each for each in names if each.endswith(".whl")]


def test_the_health_check_runs_a_file_that_is_copied(lines: Lines):
    [check] = of(lines, "HEALTHCHECK")
    program, file = json.loads(check.partition("CMD ")[2])
    assert program == f"{VIRTUAL_ENVIRONMENT}/bin/python3"
    copy = next(i for i, line in enumerate(lines) if line["instruction"] == "COPY")
    places = of(lines[:copy], "WORKDIR")
    *names, target = lines[copy]["value"].split()
    assert target == "./"
    assert file in {f"{places[-1]}/{name}" for name in names}


def test_the_server_is_what_starts_and_asks_for_its_key(path: Path, lines: Lines):
    """By a file that is copied: no `vllm serve` of its own, whose paths are open."""
    shell, script = json.loads(of(lines, "ENTRYPOINT")[0])
    assert (shell, script) == ("sh", "/opt/wheel/serve.sh")
    [copied] = of(lines, "COPY")
    assert set(STARTERS) <= set(copied.split())
    # The official image keeps upstream's user.
    assert of(lines, "USER") == (["10001"] if path.name == IMAGE else [])


def test_it_sets_what_graphs_over_ranks_need_as_the_page_says(
    lines: Lines, real_project: Project
):
    page = (real_project.root / "docs/deploying.md").read_text()
    named = set(re.findall(r"(?m)^export (CCL_SYCL_\w+_SIMPLE_THRESHOLD=\d+)$", page))
    assert len(named) == 2
    assert named <= set(" ".join(of(lines, "ENV")).split())


def test_every_script_is_one_that_bash_understands(lines: Lines):
    bash = shutil.which("bash")
    assert bash is not None
    for script in of(lines, "RUN"):
        done = subprocess.run(
            [bash, "-n", "-c", script], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        # A command that fails must stop the build.
        assert ";" not in script


def test_the_official_image_keeps_everything_but_vllm(release: Release):
    lines = parsed(text(OFFICIAL_IMAGE, release, read(DOCKERFILE, release, PUBLISHING)))
    assert of(lines, "FROM") == [f"example/vllm-openai-xpu:{release.name}"]
    install, check = of(lines, "RUN")
    assert "--no-deps" in install and install.endswith("./x.whl")
    assert check == f"{VIRTUAL_ENVIRONMENT}/bin/python3 pinned.py"


def test_an_image_of_its_own_installs_by_the_script_that_users_run(release: Release):
    lines = parsed(text(IMAGE, release, read(DOCKERFILE, release)))
    assert of(lines, "FROM") == ["example/gpu-runtime:2"]
    *_, venv, install = of(lines, "RUN")
    assert venv == f"python3.12 -m venv {VIRTUAL_ENVIRONMENT}"
    assert install.endswith(f"sh {INSTALL} {VIRTUAL_ENVIRONMENT}/bin/python3")
    assert "/opt/venv/lib:/usr/local/lib" in " ".join(of(lines, "ENV"))


def run_with_stubs(
    scripts: list[str], folder: Path
) -> tuple[list[subprocess.CompletedProcess[str]], list[str]]:
    """Run instructions' scripts with programs that only note how they were called;
    system folders become folders below `folder`."""
    programs, log = folder / "bin", folder / "log"
    programs.mkdir()
    log.touch()
    for name in ("apt-get", "curl", "gpg", "bash"):
        stub = programs / name
        stub.write_text(f'#!/bin/sh\necho "{name} $*" >> {log}\ntouch oneccl.sh\n')
        stub.chmod(0o755)
    for place in ("usr/share/keyrings", "etc/apt/sources.list.d", "var/lib/apt/lists"):
        (folder / place).mkdir(parents=True)
    (folder / "etc/apt/preferences.d").mkdir()
    done = []
    for script in scripts:
        for place in ("/usr/share/keyrings", "/etc/apt", "/var/lib/apt", "/opt/intel"):
            script = script.replace(place, f"{folder}{place}")
        done.append(
            subprocess.run(
                ["/bin/bash", "-o", "pipefail", "-c", script],
                cwd=folder,
                env={"PATH": f"{programs}:/usr/bin:/bin"},
                capture_output=True,
                text=True,
            )
        )
    return done, log.read_text().splitlines()


def test_intels_packages_and_oneccl_are_installed_where_they_are_named(
    release: Release, tmp_path: Path
):
    root = tmp_path / "opt/intel/oneapi/ccl/9.1"
    (root / "lib").mkdir(parents=True)
    scripts = of(parsed(text(IMAGE, release, everything(release))), "RUN")
    done, calls = run_with_stubs(scripts[1:5], tmp_path)
    assert [each.returncode for each in done] == [0, 0, 0, 0], done
    installed = [call for call in calls if "apt-get install" in call]
    assert installed[1].endswith(
        "intel-oneapi-compiler-dpcpp-cpp-2025.3 intel-oneapi-mkl-devel-2025.3"
    )
    assert "bash oneccl.sh -a --silent --eula accept" in calls
    assert (root.parent / "latest").resolve() == root
    source = (tmp_path / "etc/apt/sources.list.d/oneapi.list").read_text()
    assert source.endswith(" https://example.org/oneapi all main\n")
    pin = (tmp_path / "etc/apt/preferences.d/oneapi.pref").read_text()
    assert "Pin: version 2025.3*\n" in pin


def test_nothing_of_it_stands_where_the_release_names_none(release: Release):
    bare = replace(
        read(ONEAPI, release),
        oneapi=OneApi(),
        installer="",
        drivers=(),
        library_path=(),
    )
    image = text(IMAGE, release, bare)
    assert "oneapi" not in image and "oneccl" not in image and ".deb" not in image


def test_an_installer_that_installs_elsewhere_stops_the_build(
    release: Release, tmp_path: Path
):
    scripts = of(parsed(text(IMAGE, release, read(ONEAPI, release))), "RUN")
    [script] = [script for script in scripts if "oneccl.sh" in script]
    [done], _ = run_with_stubs([script], tmp_path)
    assert done.returncode != 0
