# SPDX-License-Identifier: Apache-2.0
"""How far each pinned release comes on the emulated XPU, untouched and patched.

One process a tree answers every question (see emulated_probe.py): importing vLLM is
what takes the time.
"""

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from xpustack.base.releases import load
from xpustack.base.store import Store
from xpustack.builds.build import build, build_version
from xpustack.core.cache import Cache
from xpustack.core.process import Runner, clean_environment
from xpustack.core.project import Project
from xpustack.series.apply import trees

RELEASES = ("v0.21.0", "v0.22.1", "v0.23.0", "v0.33.0")
MODULES = ("ATTENTION", "COMPRESSOR", "MHC", "MODEL", "MTP")
GUARDS = "platform-guards"
HERE = Path(__file__).parent


class Probes:
    """Answers of installed trees, each asked once."""

    def __init__(self, project: Project, cache: Cache, work: Path) -> None:
        self.project, self.cache, self.work = project, cache, work
        self.answers: dict[tuple[str, str | None, str], dict[str, Any]] = {}
        self._lay_out()

    def __call__(
        self, release: str, upto: str | None = None, by: str = "entry-point"
    ) -> dict[str, Any]:
        key = (release, upto, by)
        if key not in self.answers:
            self.answers[key] = self._ask(self._site(release, upto), by)
        return self.answers[key]

    def _lay_out(self) -> None:
        """A folder in which emulated_xpu is installed, without the repository."""
        for folder in (self.project.emulation, self.project.kernels):
            (self.work / folder.name).symlink_to(folder)
        helpers = self.project.root / "tests/steps/helpers"
        (self.work / "helpers").symlink_to(helpers)
        described = tomllib.loads((self.project.root / "pyproject.toml").read_text())
        (point,) = described["project"]["entry-points"]["vllm.platform_plugins"].items()
        distribution = self.work / "emulated_xpu-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text("Name: emulated-xpu\nVersion: 0\n")
        (distribution / "entry_points.txt").write_text(
            "[vllm.platform_plugins]\n{} = {}\n".format(*point)
        )

    def _site(self, release: str, upto: str | None) -> Path:
        """Where the wheel of the base, or of the tree after `upto`, is installed."""
        store, pinned = Store(self.cache), load(self.project)[release]
        grown = trees(store, self.project, pinned)
        tree = next(tree for tree in grown.trees if tree.slug == upto)
        version = build_version(tree, len(grown.steps))
        return build(Runner(), store, tree, version).installed

    def _ask(self, site: Path, by: str) -> dict[str, Any]:
        output = self.work / "answer.json"
        output.unlink(missing_ok=True)
        done = Runner().run(
            [sys.executable, str(HERE / "emulated_probe.py"), by, str(output)],
            cwd=self.work,
            env=clean_environment(
                CUDA_VISIBLE_DEVICES="",
                HF_HUB_OFFLINE="1",
                OMP_NUM_THREADS="1",
                PYTHONPATH=f"{site}:{self.work}",
                TRITON_INTERPRET="1",
                VLLM_CACHE_ROOT=str(self.work / "cache"),
                VLLM_CONFIG_ROOT=str(self.work / "config"),
                VLLM_NO_USAGE_STATS="1",
                **({"VLLM_PLUGINS": "emulated_xpu"} if by == "entry-point" else {}),
            ),
            timeout=180,
        )
        assert done.returncode == 0, "\n".join(done.last_lines(40))
        answer: dict[str, Any] = json.loads(output.read_text())
        return answer


@pytest.fixture(scope="module")
def probe(
    real_project: Project, real_cache: Cache, tmp_path_factory: pytest.TempPathFactory
) -> Probes:
    return Probes(real_project, real_cache, tmp_path_factory.mktemp("probe"))


@pytest.mark.parametrize("release", RELEASES)
def test_vllm_finds_the_platform_by_its_entry_point(
    release: str, probe: Probes
) -> None:
    found = probe(release)
    assert found["platform"] == "EmulatedXpuPlatform"
    assert found["is_xpu"] is True
    assert found["device_type"] == "cpu"


def test_the_pytest_plugin_sets_the_same_platform_up(probe: Probes) -> None:
    assert probe("v0.23.0", by="pytest-plugin") == probe("v0.23.0")


@pytest.mark.parametrize("release", RELEASES)
def test_cuda_raises_until_a_runner_replaces_it(release: str, probe: Probes) -> None:
    answers = probe(release)["cuda"]
    assert answers
    for name, answer in answers.items():
        assert answer.startswith(("RuntimeError: ", "AssertionError: ")), (name, answer)


@pytest.mark.parametrize("release", RELEASES[1:])
def test_modules_of_the_new_layout_import_untouched(
    release: str, probe: Probes
) -> None:
    found = probe(release)
    assert found["layout"]["new"] is True
    assert found["imports"] == dict.fromkeys(MODULES, "ok")


def test_the_old_layout_needs_tilelang_to_import(probe: Probes) -> None:
    found = probe("v0.21.0")
    assert found["layout"]["new"] is False
    assert "mhc.py" in found["imports"]["MHC"], found["imports"]
    assert "NoneType" in found["imports"]["MHC"], found["imports"]
    assert set(found["layers"].values()).isdisjoint({"ok"}), found["layers"]


def test_guards_let_the_old_layout_import(probe: Probes) -> None:
    assert probe("v0.21.0", GUARDS)["imports"] == dict.fromkeys(MODULES, "ok")


@pytest.mark.parametrize("release", ["v0.23.0", "v0.33.0"])
def test_layers_of_each_ratio_are_built_where_upstream_has_the_path(
    release: str, probe: Probes
) -> None:
    found = probe(release)
    assert found["layout"]["xpu_folder"] is True
    assert found["layers"] == {"0": "ok", "4": "ok", "128": "ok"}


def test_the_new_layout_without_the_path_wants_a_cuda_device(probe: Probes) -> None:
    layers = probe("v0.22.1")["layers"]
    for ratio in ("0", "4", "128"):
        assert layers[ratio].startswith("AssertionError: "), layers


@pytest.mark.parametrize("release", ["v0.21.0", "v0.22.1"])
def test_guards_let_layers_of_each_ratio_be_built(release: str, probe: Probes) -> None:
    assert probe(release, GUARDS)["layers"] == {"0": "ok", "4": "ok", "128": "ok"}
