# SPDX-License-Identifier: Apache-2.0
"""Every split that is asked for, started in the release's patched vLLM without devices
and without values; kept by content."""

import itertools
import json
import sys
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec

from lab.planner import splits
from lab.planner.asked import ACTIVATIONS, BESIDE_WORKSPACES, CHUNKS, Asked
from lab.planner.splits import Split
from stack.base.releases import Release
from stack.base.store import Store
from stack.builds.build import backend_server, build, build_version
from stack.core import fingerprint
from stack.core.cache import Cache
from stack.core.errors import EnvironmentProblem, InternalError
from stack.core.files import closure
from stack.core.process import TIMED_OUT, Runner, usable_cpus
from stack.core.project import Project
from stack.series.apply import trees
from stack.steptest import environment
from stack.steptest.environment import engine_environment

PROGRAMS = Path(__file__).with_name("programs")
LIMIT = 1800.0
SEARCHED = 6
"""Splits that are started at most in search of the fewest devices."""
MANY_REQUESTS = 128
"""More at a time must be asked for: vLLM's own limit depends on the device."""
FEW_STAGES = 4
"""Up to so many, a split is named with the layers of each, if they are not vLLM's."""
ABSENT = ("lmformatenforcer", "outlines_core")
"""Grammar backends that vLLM imports and that are not among our requirements."""


class Stage(msgspec.Struct, frozen=True):
    """What the first rank of a pipeline stage holds, in bytes.

    Attributes:
        buffers: beside the weights: tables of positions, constants, scratch.
        host: memory of its process, on a CPU.
        workspaces: what the release's warm-up run reserves for any later step: gathered
            keys, and the indexer's scores.
        pinned: memory of the host that the device reads, such as Engram's tables; in
            powers of two, as the allocator gives it.
        unset: parameters for which the checkpoint has nothing.
        slots: experts of a layer that lie on the device, the others in the host's
            memory; 0 if all do.
        slot_bytes: of all layers.
    """

    weights: int
    buffers: int
    host: int
    pinned: int = 0
    workspaces: int = 0
    unset: tuple[str, ...] = ()
    slots: int = 0
    slot_bytes: int = 0

    @property
    def held(self) -> int:
        return self.weights + self.buffers + self.slot_bytes

    @property
    def set_aside(self) -> int:
        """For activations and workspaces."""
        return max(ACTIVATIONS, BESIDE_WORKSPACES + self.workspaces)


class Attempt(msgspec.Struct, frozen=True):
    """One start of a split.

    Attributes:
        refused: why the engine does not start; empty if it does.
        stages: those that were built.
        room: requests of the whole context that fit, in all replicas.
        partition: layers of each stage, if they are not vLLM's own.
        searched: whether nobody asked for it: a split of fewer or more devices.
        moe_expert_cache_size: what the option was; 0 for experts on the devices.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    max_num_batched_tokens: int
    refused: str
    stages: tuple[Stage, ...]
    room: int
    enable_expert_parallel: bool = False
    data_parallel_size: int = 1
    partition: str = ""
    searched: bool = False
    moe_expert_cache_size: int = 0

    @property
    def name(self) -> str:
        stages, replicas = self.pipeline_parallel_size, self.data_parallel_size
        parts = [f"TP {self.tensor_parallel_size}"]
        layers = self.partition.replace(",", " + ")
        shown = f" ({layers} layers)" if layers and stages <= FEW_STAGES else ""
        parts += [f"PP {stages}{shown}"] if stages > 1 else []
        parts += [f"DP {replicas}"] if replicas > 1 else []
        parts += ["EP"] if self.enable_expert_parallel else []
        parts += ["host experts"] if self.moe_expert_cache_size else []
        return ", ".join(parts)

    @property
    def ranks(self) -> int:
        """Of each stage, in all replicas."""
        return self.tensor_parallel_size * self.data_parallel_size

    @property
    def devices(self) -> int:
        return self.ranks * self.pipeline_parallel_size

    @property
    def built(self) -> bool:
        return len(self.stages) == self.pipeline_parallel_size

    @property
    def slots(self) -> int:
        """Experts of a layer on the device, the others in the host's memory."""
        return min((stage.slots for stage in self.stages), default=0)

    @property
    def fullest(self) -> Stage:
        """Which leaves the least for the cache."""
        return max(self.stages, key=lambda stage: stage.held + stage.set_aside)


class Trial(msgspec.Struct, frozen=True):
    """All attempts, and the bytes of the checkpoint's tensors.

    Attributes:
        refused: what the checkpoint lacks; nothing was started then.
    """

    checkpoint: int = 0
    attempts: tuple[Attempt, ...] = ()
    refused: str = ""


def engine(asked: Asked) -> dict[str, object]:
    """Arguments of vLLM's engine that every split has."""
    architecture = asked.checkpoint.architecture
    given: dict[str, object] = {
        "kv_cache_dtype": "fp8",
        "block_size": architecture.block_size,
        "max_model_len": asked.context,
        "gpu_memory_utilization": asked.share,
    }
    if architecture.images:
        given["limit_mm_per_prompt"] = {"image": asked.images}
    if architecture.needs_tokenizer:
        given["skip_tokenizer_init"] = False
    if asked.of_a_replica > MANY_REQUESTS:
        given["max_num_seqs"] = asked.of_a_replica
    if asked.speculation:
        given["speculative_config"] = dict(asked.speculation)
    return given


def run(
    project: Project,
    cache: Cache,
    release: Release,
    asked: Asked,
    only: Sequence[Split] = (),
) -> Trial:
    """Start every split, and search for the fewest devices, unless the same was started
    before.

    Args:
        only: splits that are started instead.

    Raises:
        InternalError: the planner failed, which says nothing about the release.
        StackError: the release cannot be built.
    """
    known, each = asked.checkpoint, asked.count // asked.replicas
    if each > splits.most(known):
        return Trial()
    store = Store(cache)
    grown = trees(store, project, release)
    every = list(only or splits.possible(known, each))
    if asked.host:
        every += [replace(one, host_experts=True) for one in every]
    fewer = ((n, one) for n, one in splits.fewest(asked) if n != asked.count)
    fixed = only or asked.host
    search = [] if fixed else list(itertools.islice(fewer, SEARCHED))
    order = {
        "model": known.name,
        "folder": str(known.folder),
        "config": "" if known.tensors else known.config,
        "tensors": known.tensors,
        "memory": int(asked.device.memory * (1 << 30)),
        "activations": ACTIVATIONS,
        "beside_workspaces": BESIDE_WORKSPACES,
        "requests": asked.of_a_replica,
        "chunks": CHUNKS,
        "host": asked.host << 30,
        "engine": engine(asked),
        "devices": asked.count,
        "splits": [one.arguments(asked) for one in every],
        "search": [
            {"devices": devices, "split": one.arguments(asked)}
            for devices, one in search
        ],
    }
    key = fingerprint.digest(
        kind="plan",
        tree=grown.tip.tree_id,
        kernels=release.xpu_kernels.version,
        order=json.dumps(order),
        config=known.config,
        programs=fingerprint.files_digest(_programs(project)),
        lock=fingerprint.lock(),
    )
    found = cache.results_get(key)
    if found is None:
        cache.progress(
            f"{release.name}: starting vLLM for {len(every)} splits, on no device;"
            " this takes about a minute"
        )
        with Runner().stop_on_error() as runner, cache.scratch() as folder:
            version = build_version(grown.tip, len(grown.steps))
            with closing(backend_server(runner)) as server:
                site = build(server, store, grown.tip, version).installed
            if not known.tensors:
                order["folder"] = str(folder)
            order["cpus"] = usable_cpus()
            found = _start(project, release, runner, site, folder, order)
        cache.results_put(key, found)
    return msgspec.convert(found, Trial)


def _programs(project: Project) -> dict[str, Path]:
    """The files that a start depends on, beside the release's own: what it imports, and
    what the emulation reads besides."""
    root = project.root
    found = fingerprint.folder_files(project.emulation)
    found |= fingerprint.folder_files(project.kernels)
    begun = [*PROGRAMS.glob("*.py"), root / "proof/e2e/absent.py"]
    begun += [path for path in found.values() if path.suffix == ".py"]
    for path in (Path(__file__), Path(environment.__file__)):
        found[path.relative_to(root).as_posix()] = path
    return found | closure(begun, root)


def _start(
    project: Project,
    release: Release,
    runner: Runner,
    site: Path,
    folder: Path,
    order: dict[str, object],
) -> dict[str, object]:
    job, answer = folder / "job.json", folder / "answer.json"
    job.write_text(json.dumps(order))
    support = _support(project, folder / "support")
    done = runner.run(
        [sys.executable, str(PROGRAMS / "start.py"), str(job), str(answer)],
        cwd=folder,
        env=engine_environment(
            release.xpu_kernels.version, folder, (site, support, project.root)
        ),
        timeout=LIMIT,
    )
    if done.returncode == TIMED_OUT:
        raise EnvironmentProblem(
            f"starting the splits took more than {LIMIT / 60:.0f} minutes",
            release=release.name,
            detail=done.last_lines(5),
            hint="uptime; then the same again, on a quieter machine",
        )
    found = json.loads(answer.read_text()) if answer.is_file() else {}
    fault = found.get("fault", "")
    if done.returncode or not found or fault:
        raise InternalError(
            "the planner failed, which says nothing about whether the model starts:"
            f" {_last(fault) or f'exit status {done.returncode}'}",
            release=release.name,
            detail=fault.splitlines() or done.last_lines(),
            hint="this is a fault of xpustack plan: report the lines above",
        )
    return dict(found)


def _last(text: str) -> str:
    return text.strip().rpartition("\n")[2]


def _support(project: Project, folder: Path) -> Path:
    """A folder that makes vLLM find the emulation, and what it imports for nothing."""
    described = tomllib.loads((project.root / "pyproject.toml").read_text("utf-8"))
    group = "vllm.platform_plugins"
    points = described["project"]["entry-points"][group]
    distribution = folder / "emulated_xpu-0.dist-info"
    distribution.mkdir(parents=True)
    (distribution / "METADATA").write_text("Name: emulated-xpu\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    text = "\n".join([f"[{group}]", *lines, ""])
    (distribution / "entry_points.txt").write_text(text)
    for name in ABSENT:
        (folder / f"{name}.py").symlink_to(project.root / "proof/e2e/absent.py")
    return folder
