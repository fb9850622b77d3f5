# SPDX-License-Identifier: Apache-2.0
"""Trees built, installed and served: one process of `engine.py` for each job."""

import json
import random
import tomllib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import torch

from proof.e2e.checkpoints import checkpoint, packed, v41, v41_chat
from proof.e2e.checkpoints.damage import damage
from proof.e2e.checkpoints.vision import StagedVision, Vision
from proof.e2e.inside.wrappers import WRAPPERS, wrappers_of
from proof.e2e.pictures import PLACEHOLDER, Picture, Text
from proof.e2e.running.other_models import Model
from proof.e2e.twins import v41_vision
from proof.e2e.twins.comparison import of_all_ranks
from proof.e2e.twins.twin import Reference, Twin
from proof.e2e.twins.v41_draft_twin import V41DraftTwin
from proof.e2e.twins.v41_twin import V41Twin
from proof.e2e.twins.vision_twin import VisionTwin
from stack.base.releases import Release, load
from stack.base.store import Store
from stack.builds.build import build, build_version
from stack.core.cache import Cache
from stack.core.process import Runner
from stack.core.project import Project
from stack.forks.server import Ahead, exit_text
from stack.series.apply import trees
from stack.series.order import read_order
from stack.series.tree import Tree
from stack.steptest.environment import engine_environment
from stack.steptest.server import warm_server
from standins.emulated_xpu.architectures import ARCHITECTURE, DEFAULT

HERE = Path(__file__).parents[1]
T = TypeVar("T")
LIMIT = 900.0
IMPORTED = (
    "standins.emulated_xpu.pytest_plugin",
    "proof.e2e.inside.engine_ops",
    "proof.e2e.inside.recording",
    "vllm.entrypoints.llm",
)
"""What the engines of one tree share."""
OTHERS_IMPORTED = (
    "standins.emulated_xpu.pytest_plugin",
    "proof.e2e.inside.other_ops",
    "vllm.entrypoints.llm",
)
"""What those of other models share, which have more ops."""
SHARING = "indexer_tp_shard_min_rows"
"""The setting of rows that ranks share."""
ABSENT = ("lmformatenforcer", "outlines_core")
"""Grammar backends that vLLM imports and that are not among our requirements."""
WRITERS = {
    **packed.WRITERS,
    "vision": Vision,
    "vision of six layers": StagedVision,
    "v4.1": v41.V41,
    "v4.1, Engram of two stages": v41.EngramOfTwoStages,
    "v4.1 with images": v41_vision.Images,
    "v4.1 that chats": v41_chat.Chat,
    "v4.1, windows of 64": v41.Narrow,
}
"""Those of the checkpoints that a job may name."""


@dataclass(frozen=True)
class Prompt:
    """Random tokens and how many to add; equal seeds give equal beginnings."""

    length: int
    new: int
    seed: int = 0
    own_tail: int = 0
    """The last tokens that differ from other prompts of the same seed."""
    sampling: tuple[tuple[str, Any], ...] = ()
    """Arguments of `SamplingParams`, and `regex` for a grammar; greedy if none."""
    priority: int = 0
    abort_after: int | None = None
    """The number of new tokens after which the request is aborted."""
    images: tuple[Picture, ...] = ()
    image_token: int = PLACEHOLDER
    """What stands for an image."""

    def order(self) -> dict[str, Any]:
        """The prompt as `engine.py` takes it."""
        abort = {} if self.abort_after is None else {"abort_after": self.abort_after}
        return abort | {
            "tokens": self.tokens,
            "new": self.new,
            "sampling": dict(self.sampling),
            "priority": self.priority,
            "images": [asdict(picture) for picture in self.images],
        }

    @property
    def tokens(self) -> list[int]:
        shared, own = random.Random(self.seed), random.Random(-1 - self.own_tail)
        body = [shared.randrange(2, checkpoint.VOCABULARY) for _ in range(self.length)]
        for position in range(self.length - self.own_tail, self.length):
            body[position] = own.randrange(2, checkpoint.VOCABULARY)
        for picture in self.images:
            body[picture.at] = self.image_token
        return body


@dataclass(frozen=True)
class Job:
    """One engine: its arguments, waves of prompts, and what is broken on purpose."""

    name: str
    waves: tuple[tuple[Prompt, ...], ...]
    engine: tuple[tuple[str, Any], ...] = ()
    sabotage: bool = False
    overwrites: bool = False
    """Whether a row of a page is overwritten as soon as a step starts behind it."""
    counting: bool = False
    """Whether the launches of each layer are noted, and nothing else."""
    checkpoint: str = ""
    """Which checkpoint is served: of `WRITERS`, or as given to `Engines.add_checkpoint`
    and `add_damaged`; DeepSeek's own if none."""
    refused: tuple[Prompt, ...] = ()
    """What is asked at the end, and must be refused; the first prompt is then asked
    again."""
    splits_keys: bool = True
    """Whether programs of a decode share a token's keys, which the interpreter runs
    slowly."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables that the engine sees besides those of every job."""
    architecture: str = DEFAULT
    """Of the emulated device: one of `standins/emulated_xpu/architectures.toml`."""
    short: bool = False
    """Whether another job of the same kind, which runs with `--full`, has the prompts
    of the tables: this one's figures are not written down."""

    @property
    def prompts(self) -> list[Prompt]:
        return [prompt for wave in self.waves for prompt in wave]

    @property
    def tokens(self) -> int:
        """Tokens read and written by all prompts."""
        return sum(prompt.length + prompt.new for prompt in self.prompts)


class EngineStopped(RuntimeError):
    """An engine ended with an error; the message has the end of its output."""


@dataclass
class Served:
    """What an engine gave: `answer` as `engine.py` writes it."""

    job: Job
    answer: dict[str, Any]
    log: str
    seconds: float
    read: list[list[int]] = field(init=False)
    """The tokens of each prompt, with those of its images."""
    workspace: int = field(init=False)
    """Bytes of the largest of its ranks' workspaces."""
    shared: list[list[list[int]]] = field(init=False)
    """Of each rank, how many rows each rank of its stage scored, at every exchange."""
    texts: dict[str, Text] = field(init=False)
    """Prompt and answer of each request, by the engine's name for it."""
    figures: dict[str, dict[str, float]] = field(init=False, default_factory=dict)
    """What the checks found of each layer, the worst over the requests."""

    def __post_init__(self) -> None:
        ranks = self.answer.pop("ranks")
        stages = dict(self.job.engine).get("pipeline_parallel_size", 1)
        size = len(ranks) // stages
        self.shared = [rank["shared"] for rank in ranks]
        self.workspace = max(rank.get("workspace", 0) for rank in ranks)
        self.answer["records"] = []
        for first in range(0, len(ranks), size):
            before = len(self.answer["records"])
            stage = [rank["records"] for rank in ranks[first : first + size]]
            self.answer["records"] += of_all_ranks(stage, any(self.shared))
            # The last stage has the logits.
            self.answer["logits"] = [
                entry | {"after": before + entry["after"]}
                for entry in ranks[first]["logits"]
            ]
        self.read = [tokens for wave in self.answer["read"] for tokens in wave]
        whole = [
            Text(read + new, prompt.images)
            for prompt, read, new in zip(
                self.job.prompts, self.read, self.new_tokens(), strict=True
            )
        ]
        rows = {name for r in self.answer["records"] for name, _ in r["rows"]}
        # The engine counts its requests and may add a random part to the number.
        numbers = sorted((int(name.partition("-")[0]), name) for name in rows)
        self.texts = {name: whole[number] for number, name in numbers}
        self.answer["texts"] = self.texts

    def new_tokens(self) -> list[list[int]]:
        return [tokens for wave in self.answer["tokens"] for tokens in wave]

    def note(self, layer: object, **figures: float) -> None:
        """Add to `figures` of a layer, or of the logits."""
        known = self.figures.setdefault(str(layer), {})
        for name, figure in figures.items():
            known[name] = max(figure, known.get(name, 0.0))


class Engines:
    """Serves jobs on trees, two at a time, each once.

    Args:
        branch: the tree that is served as the patched one; by default a series' tip.
    """

    def __init__(
        self, work: Path, cache: Cache, workers: int = 2, branch: Tree | None = None
    ) -> None:
        self.work, self.cache, self.branch = work, cache, branch
        self.project = Project.find(HERE)
        self.published, self.twin = checkpoint.write(work / "checkpoint")
        self._checkpoints: dict[str, tuple[Path, Path]] = {}
        self._twins: dict[str, Reference] = {}
        self._writing = Lock()
        self._lay_out()
        self._server = warm_server(Runner())
        self._pool = ThreadPoolExecutor(workers)
        self._late = ThreadPoolExecutor(1)
        self._longer = ThreadPoolExecutor(1)
        self._running: dict[tuple[str, bool, str], Future[Served]] = {}
        self._begun: dict[tuple[object, ...], Future[Any]] = {}

    def order(
        self, release: str, job: Job, patched: bool = True, *, at_once: bool = False
    ) -> Future[Served]:
        """Start a job, unless it was started before; `at_once` lets it overtake those
        that were."""
        key = (release, patched, job.name)
        if key not in self._running:
            pool = self._late if at_once else self._pool
            self._running[key] = pool.submit(self._serve, release, job, patched)
        return self._running[key]

    def serve(self, release: str, job: Job, patched: bool = True) -> Served:
        """The job's result. One that was not ordered overtakes those that were.

        Raises:
            EngineStopped: the engine ended with an error; the message has its trace.
        """
        return self.order(release, job, patched, at_once=True).result()

    def begin(self, work: Callable[..., T], *given: object) -> Future[T]:
        """Call `work(engines, *given)` beside the jobs, one such call at a time, unless
        it was called before. It may serve jobs, but holds no result to a twin, whose
        roundings all threads would see."""
        key = (work, *given)
        if key not in self._begun:
            self._begun[key] = self._longer.submit(work, self, *given)
        return self._begun[key]

    def written(self, name: str) -> tuple[Path, Path]:
        """The published form and the twin of another writer's checkpoint."""
        if name not in self._checkpoints:
            self.add_checkpoint(name, WRITERS[name](0))
        return self._checkpoints[name]

    def twin_of(self, name: str) -> Reference:
        """The model of a checkpoint in float32; of DeepSeek's own if none."""
        if name not in self._twins:
            folder = self.written(name)[1] if name else self.twin
            if name.startswith("vision"):
                self._twins[name] = VisionTwin(*self.written(name))
            elif name.startswith("v4.1 with images"):
                self._twins[name] = v41_vision.V41VisionTwin(folder)
            elif name.startswith("v4.1 with drafts"):
                self._twins[name] = V41DraftTwin(folder)
            elif name.startswith("v4.1"):
                self._twins[name] = V41Twin(folder)
            else:
                self._twins[name] = Twin(folder)
        return self._twins[name]

    def add_checkpoint(self, name: str, writer: checkpoint.Writer) -> None:
        """Write a checkpoint that jobs can name, unless it is there."""
        with self._writing:
            if name not in self._checkpoints:
                folder = self.work / f"checkpoint-{name}"
                self._checkpoints[name] = checkpoint.write(folder, writer)

    def add_damaged(self, fault: str) -> None:
        """Write DeepSeek's checkpoint with one of `damage.DAMAGES`, under its name."""
        with self._writing:
            if fault not in self._checkpoints:
                folder = self.work / f"checkpoint-{fault}"
                damage(self.published, folder, fault)
                self._checkpoints[fault] = (folder, self.twin)

    def has_step(self, release: str, slug: str) -> bool:
        """Whether the release's series has the step."""
        return slug in read_order(self.project, release)

    def has_dspark(self, release: str) -> bool:
        """Whether upstream's release has DSpark's draft model for XPU."""
        return release != "v0.22.1"

    def has_v41(self, release: str) -> bool:
        """Whether the release serves V4.1 on XPU."""
        return self.has_step(release, "v41-model")

    def finished(self) -> Iterator[tuple[str, str, Served]]:
        """The engines that ended well, by release and tree."""
        for (release, patched, _), future in self._running.items():
            if future.done() and not future.cancelled() and not future.exception():
                yield release, "patched" if patched else "untouched", future.result()

    def close(self) -> None:
        for pool in (self._longer, self._pool, self._late):
            pool.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def lacking(self, release: str, job: Job) -> dict[str, dict[str, dict[str, str]]]:
        """By model class, damage and tensor, what a start would say of the tensor with
        that damage; empty if it does not name it."""
        found: dict[str, dict[str, dict[str, str]]] = self._answer(
            release, job, True, "proof.e2e.inside.lacking"
        )[0]
        return found

    def _serve(self, release: str, job: Job, patched: bool) -> Served:
        return Served(
            job, *self._answer(release, job, patched, "proof.e2e.inside.engine")
        )

    def _answer(
        self, release: str, job: Job, patched: bool, program: str
    ) -> tuple[Any, str, float]:
        """What a program wrote down, the end of its log, and its seconds."""
        pinned = load(self.project)[release]
        tree = f"{release}-{'patched' if patched else 'untouched'}"
        name = f"{tree}-{job.name}"
        order, answer = self.work / f"{name}.json", self.work / f"{name}.pt"
        model = self.written(job.checkpoint)[0] if job.checkpoint else self.published
        order.write_text(
            json.dumps(
                {
                    "model": str(model),
                    "engine": dict(job.engine),
                    "sabotage": job.sabotage,
                    "overwrites": job.overwrites,
                    "counting": job.counting,
                    "splits_keys": job.splits_keys,
                    "environment": {
                        ARCHITECTURE: job.architecture,
                        **dict(job.environment),
                    },
                    "waves": [[p.order() for p in wave] for wave in job.waves],
                    "refused": [p.order() for p in job.refused],
                }
            )
        )
        words = (program, str(order), str(answer))
        lines, seconds = self.run(pinned, patched, words, IMPORTED)
        result = torch.load(answer, weights_only=False)
        return result, "\n".join(lines[-200:]), seconds

    def others(
        self, release: str, patched: bool, models: Sequence[Model]
    ) -> dict[str, dict[str, Any]]:
        """What a tree gives of other models than DeepSeek-V4, by kind, served one
        after the other; `stopped` says why one did not start.

        Raises:
            EngineStopped: the process of all of them ended with an error.
        """
        with self._writing:
            for model in models:
                folder = self.work / "others" / model.kind
                if not folder.is_dir():
                    model.write(folder)
        tree = "patched" if patched else "untouched"
        order = self.work / f"{release}-{tree}-{models[0].kind}.json"
        orders = [model.order(self.work / "others" / model.kind) for model in models]
        order.write_text(json.dumps(orders))
        answer = order.with_suffix(".answer")
        pinned = load(self.project)[release]
        words = ("proof.e2e.inside.other_engine", str(order), str(answer))
        self.run(pinned, patched, words, OTHERS_IMPORTED)
        found: dict[str, dict[str, Any]] = json.loads(answer.read_text())
        return found

    def run(
        self,
        pinned: Release,
        patched: bool,
        words: tuple[str, str, str],
        imported: tuple[str, ...],
        limit: float = LIMIT,
    ) -> tuple[list[str], float]:
        """Run a program with its order and its answer inside a tree, for `limit`
        seconds at most; its output by lines, and its seconds.

        Raises:
            EngineStopped: it ended with an error, or gave no answer.
        """
        site = self.installed(pinned, patched)
        tree = "patched" if patched else "untouched"
        env = self._environment(pinned, site, self.work / f"{pinned.name}-{tree}")
        order, answer = map(Path, words[1:])
        output, support = order.with_suffix(".log"), self.work / "support"
        done = self._server.run(
            list(words),
            cwd=support,
            path=[site, support],
            env=env,
            output=output,
            limit=limit,
            ahead=Ahead(imported, env),
        )
        lines = output.read_text(errors="replace").splitlines()
        if done.status or not answer.is_file():
            end = exit_text(done.status)
            raise EngineStopped(
                "\n".join([f"{order.stem}: the engine {end}", *lines[-60:]])
            )
        return lines, done.seconds

    def installed(self, pinned: Release, patched: bool) -> Path:
        """The files of a release, as its wheel installs them."""
        store = Store(self.cache)
        grown = trees(store, self.project, pinned)
        tree = (self.branch or grown.tip) if patched else grown.base
        version = build_version(tree, len(grown.steps))
        return build(self._server, store, tree, version).installed

    def environment(self, release: str, own: Path) -> dict[str, str]:
        """What an engine of a patched release sees."""
        pinned = load(self.project)[release]
        return self._environment(pinned, self.installed(pinned, True), own)

    def _environment(self, pinned: Release, site: Path, own: Path) -> dict[str, str]:
        """What an engine of one tree sees; `own` is for what vLLM keeps of that tree,
        such as what it found in a model's class."""
        version = pinned.xpu_kernels.version
        wrappers = {}
        if version in WRAPPERS:
            found = wrappers_of(self.cache, version, self.work)
            wrappers["EMULATED_XPU_WRAPPERS"] = str(found)
        path = (site, self.work / "support")
        return engine_environment(version, own, path, **wrappers)

    def _lay_out(self) -> None:
        """A folder in which emulated_xpu is installed, without the rest of the
        repository."""
        support = self.work / "support"
        support.mkdir()
        for folder in (HERE.parent, self.project.emulation, self.project.kernels):
            (support / folder.name).symlink_to(folder)
        for name in ABSENT:
            (support / f"{name}.py").symlink_to(HERE / "absent.py")
        described = tomllib.loads((self.project.root / "pyproject.toml").read_text())
        (point,) = described["project"]["entry-points"]["vllm.platform_plugins"].items()
        distribution = support / "emulated_xpu-0.dist-info"
        distribution.mkdir()
        (distribution / "METADATA").write_text("Name: emulated-xpu\nVersion: 0\n")
        (distribution / "entry_points.txt").write_text(
            "[vllm.platform_plugins]\n{} = {}\n".format(*point)
            + "[vllm.general_plugins]\n"
            + "emulated_xpu = standins.emulated_xpu.transfers:provide\n"
            + "e2e = proof.e2e.inside.server_plugin:register\n"
        )


@contextmanager
def opened_engines(
    work: Path, cache: Cache, branch: Tree | None = None
) -> Iterator[Engines]:
    opened = Engines(work, cache, branch=branch)
    try:
        yield opened
    finally:
        opened.close()
