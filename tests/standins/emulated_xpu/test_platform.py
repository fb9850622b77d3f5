# SPDX-License-Identifier: Apache-2.0
"""How far each pinned release comes on the emulated XPU, untouched and patched.

One process a tree answers every question (see emulated_probe.py): importing vLLM is
what takes the time. The processes are forks of one that has imported what vLLM imports,
as those of the steps' tests are.
"""

import json
import tomllib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from test_decisions import own_answers

from stack.base.releases import load
from stack.base.store import Store
from stack.builds.build import build, build_version
from stack.builds.copy import build_scripts, copied, takes_part
from stack.builds.installed import install
from stack.core.cache import Cache
from stack.core.process import Runner, clean_environment
from stack.core.project import Project
from stack.forks.server import Server
from stack.series.apply import trees
from stack.series.tree import Series, Tree
from stack.steptest.server import ENVIRONMENT, warm_server

RELEASES = ("v0.22.1", "v0.26.0", "v0.33.0")
MODULES = ("ATTENTION", "COMPRESSOR", "MHC", "MODEL", "MTP")
GUARDS = "platform-guards"
HERE = Path(__file__).parent


class Probes:
    """Answers of installed trees, each asked once."""

    def __init__(
        self, project: Project, cache: Cache, work: Path, server: Server
    ) -> None:
        self.project, self.cache, self.work = project, cache, work
        self.server = server
        self.sites: dict[tuple[str, str | None], Path] = {}
        self.answers: dict[tuple[str, str | None, str], dict[str, Any]] = {}
        self._lay_out()

    def __call__(
        self, release: str, upto: str | None = None, by: str = "entry-point"
    ) -> dict[str, Any]:
        key = (release, upto, by)
        if key not in self.answers:
            if (release, upto) not in self.sites:
                self.sites[release, upto] = self._site(release, upto)
            self.answers[key] = self._ask(self.sites[release, upto], by)
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
        """Where the base, or the tree after `upto`, is installed."""
        store, pinned = Store(self.cache), load(self.project)[release]
        series = trees(store, self.project, pinned)
        tree = next(tree for tree in series.trees if tree.slug == upto)
        last = len(series.steps)
        scripts = build_scripts(store.git, series.base.tree_id)
        changed = {path for step in series.steps for path in step.changed}
        if any(takes_part(path, scripts) for path in changed):
            version = build_version(tree, last)
            return build(self.server, store, tree, version).installed
        return self._copied(store, series, tree)

    def _copied(self, store: Store, series: Series, tree: Tree) -> Path:
        """An earlier tree as a copy of the whole series, which `tox -e steps` builds of
        each release: nothing is built for these tests alone."""
        last, tip = len(series.steps), series.tip
        whole = build(self.server, store, tip, build_version(tip, last))
        version = build_version(tree, last)
        files = copied(store, (tip, whole), tree, version)
        home = self.work / version
        home.mkdir()
        install(self.cache, files, home)
        return home / whole.installed.name

    def _ask(self, site: Path, by: str) -> dict[str, Any]:
        answer, said = self.work / "answer.json", self.work / "said.txt"
        answer.unlink(missing_ok=True)
        done = self.server.run(
            [str(HERE / "emulated_probe.py"), by, str(answer)],
            cwd=self.work,
            path=[site, self.work],
            env=clean_environment(
                **ENVIRONMENT,
                OMP_NUM_THREADS="1",
                PYTHONPATH=f"{site}:{self.work}",
                VLLM_CACHE_ROOT=str(self.work / "cache"),
                VLLM_CONFIG_ROOT=str(self.work / "config"),
                VLLM_NO_USAGE_STATS="1",
                **({"VLLM_PLUGINS": "emulated_xpu"} if by == "entry-point" else {}),
            ),
            output=said,
            limit=180,
        )
        assert done.status == 0, (done, said.read_text()[-4000:])
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


@pytest.fixture(scope="module")
def probe(
    real_project: Project, real_cache: Cache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Probes]:
    work = tmp_path_factory.mktemp("probe")
    with closing(warm_server(Runner())) as server:
        yield Probes(real_project, real_cache, work, server)


@pytest.mark.parametrize("release", RELEASES)
def test_vllm_finds_the_platform_by_its_entry_point(
    release: str, probe: Probes
) -> None:
    found = probe(release)
    assert found["platform"] == "EmulatedXpuPlatform"
    assert found["is_xpu"] is True
    assert found["device_type"] == "cpu"


@pytest.mark.parametrize("release", RELEASES)
def test_the_release_answers_what_is_not_listed(release: str, probe: Probes) -> None:
    assert set(probe(release)["own_answers"]) <= own_answers().keys()


def test_the_pytest_plugin_sets_the_same_platform_up(probe: Probes) -> None:
    assert probe("v0.33.0", by="pytest-plugin") == probe("v0.33.0")


@pytest.mark.parametrize("release", RELEASES)
def test_cuda_raises_until_a_runner_replaces_it(release: str, probe: Probes) -> None:
    answers = probe(release)["cuda"]
    assert answers
    for name, answer in answers.items():
        assert answer.startswith(("RuntimeError: ", "AssertionError: ")), (name, answer)


@pytest.mark.parametrize("release", RELEASES)
def test_modules_import_untouched(release: str, probe: Probes) -> None:
    assert probe(release)["imports"] == dict.fromkeys(MODULES, "ok")


@pytest.mark.parametrize("release", ["v0.26.0", "v0.33.0"])
def test_layers_of_each_ratio_are_built_where_upstream_has_the_path(
    release: str, probe: Probes
) -> None:
    found = probe(release)
    assert found["layout"]["xpu_folder"] is True
    assert found["layers"] == {"0": "ok", "4": "ok", "128": "ok"}


def test_a_release_without_the_path_wants_a_cuda_device(probe: Probes) -> None:
    layers = probe("v0.22.1")["layers"]
    for ratio in ("0", "4", "128"):
        assert layers[ratio].startswith("AssertionError: "), layers


def test_guards_let_layers_of_each_ratio_be_built(probe: Probes) -> None:
    assert probe("v0.22.1", GUARDS)["layers"] == {"0": "ok", "4": "ok", "128": "ok"}
