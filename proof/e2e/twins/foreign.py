# SPDX-License-Identifier: Apache-2.0
"""Hold the float32 twin of V4.1 to an implementation that nobody here wrote.

NVIDIA's nemo-automodel trains V4.1 and computes it in torch on a CPU. It loads the
published form by a loader of its own, so names and formats are held to it as well. It
rounds what inference stores: window keys to FP8 by 32, entries to NVFP4, the indexer's
vectors to MXFP4. The comparison runs with these roundings, which the twin then makes,
too, and with none. Each layer of the twin takes the foreign model's inputs.

    pip install --no-deps --target foreign nemo-automodel==0.7.0
    TORCHDYNAMO_DISABLE=1 PYTHONPATH=foreign python -m proof.e2e.twins.foreign

Prints relative errors, and fails if one is beyond its bound.
"""

import importlib
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from proof.e2e import pictures
from proof.e2e.checkpoints import checkpoint, v41
from proof.e2e.pictures import Picture
from proof.e2e.twins import rounding, tower, v41_vision
from proof.e2e.twins.comparison import relative
from proof.e2e.twins.rounding import Forms
from proof.e2e.twins.twin import Given
from proof.e2e.twins.v41_twin import V41Twin

LENGTH = 400
MODELS = "nemo_automodel.components.models"
SCALE_GROUP = 16
BOUND = 1e-5
"""A layer in float32, in another order of additions. Of whole runs with roundings no
bound is asked: one value that is rounded the other way changes all behind it."""
CHOICE = 0.999


@dataclass
class Foreign:
    """The foreign model, and what passed through its layers in the last run."""

    model: Any
    attention: Any
    """The module that rounds caches."""
    inputs: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    outputs: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)
    images: tuple[Picture, ...] = ()
    """Those of the tokens."""

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def logits(self, tokens: list[int]) -> torch.Tensor:
        ids, seen = torch.tensor([tokens]), {}
        if self.images:
            patches = [tower.patches_of(picture) for picture in self.images]
            side = (3, pictures.PATCH, pictures.PATCH)
            roles = torch.full_like(ids, -1)
            parts = [part for p in self.images for part in v41_vision.block(p)]
            roles[ids == v41.IMAGE] = torch.tensor(parts)
            seen = {
                "pixel_values": torch.cat(patches).unflatten(1, side),
                "image_grid_hws": torch.tensor(
                    [(p.down, p.along) for p in self.images]
                ),
                "vision_token_types": roles,
            }
        given: torch.Tensor = self.model(ids, **seen).logits[0]
        return given

    @contextmanager
    def exact(self) -> Iterator[None]:
        """Within, the model rounds nothing."""
        before = self.attention.quantize_cache
        self.attention.quantize_cache = lambda values, **_: values
        yield
        self.attention.quantize_cache = before

    def watch(self) -> None:
        for number, layer in self.model.model.layers.items():
            for part in ("attn", "ffn"):
                getattr(layer, part).register_forward_hook(
                    self._note(part, int(number))
                )

    def _note(self, part: str, layer: int) -> Callable[..., None]:
        def note(_: Any, args: Any, output: Any) -> None:
            self.inputs[part, layer] = args[0][0]
            if part == "attn":
                if output.state.topk_indices is not None:
                    self.chosen[layer] = output.state.topk_indices[0]
                output = output.hidden_states
            self.outputs[part, layer] = output[0]

        return note


def loaded(folder: Path) -> Foreign:
    """The foreign model of a published checkpoint, in float32."""
    package = importlib.import_module(f"{MODELS}.deepseek_v41.model")
    config = importlib.import_module(f"{MODELS}.deepseek_v41.config")
    common = importlib.import_module(f"{MODELS}.common")
    transformers = importlib.import_module("transformers")
    described = json.loads((folder / "config.json").read_text())
    for name in ("quantization_config", "model_type"):
        del described[name]
    described["torch_dtype"] = described["text_config"]["dtype"] = "float32"
    model = package.DeepseekV41ForCausalLM(
        config.DeepseekV41Config(**described),
        backend=common.BackendConfig(
            attn="eager",
            linear="torch",
            rms_norm="torch_fp32",
            experts="torch",
            dispatcher="torch",
        ),
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )
    weights = model.state_dict_adapter.from_hf(dict(checkpoint.tensors(folder)))
    model.load_state_dict(weights)
    attention = importlib.import_module(f"{MODELS}.deepseek_v41.attention")
    foreign = Foreign(model.eval(), attention)
    foreign.watch()
    return foreign


def nvfp4(x: torch.Tensor) -> torch.Tensor:
    """16 values in e2m1 share an e4m3 scale."""
    groups, largest = x.unflatten(-1, (-1, SCALE_GROUP)), rounding.E2M1_MAX
    amax = groups.abs().amax(-1, keepdim=True).clamp(min=largest * 2.0**-9)
    scale = rounding.e4m3(amax / largest)
    return (rounding.e2m1(groups / scale) * scale).flatten(-2)


THEIRS = Forms(
    window=lambda x: rounding.grouped(x, rounding.MX_GROUP, 1e-4, ue8m0=True),
    entry=nvfp4,
    index_key=rounding.mxfp4,
    index_query=rounding.mxfp4,
)


@dataclass
class Figures:
    """Relative errors of the twin by layer, and of its logits."""

    attention: dict[int, float]
    experts: dict[int, float]
    streams: dict[int, float]
    """The worse of the inputs of attention and experts, from the sublayers before."""
    choice: dict[int, float]
    """The part of the foreign choice that the twin makes."""
    logits: float

    def lines(self) -> Iterator[str]:
        yield "layer  attention   experts   streams  same choice"
        for layer, attention in self.attention.items():
            same = self.choice.get(layer)
            yield (
                f"{layer:5d}  {attention:9.1e} {self.experts[layer]:9.1e}"
                f" {self.streams[layer]:9.1e}"
                + ("" if same is None else f"  {same:11.5f}")
            )
        yield f"logits {self.logits:9.1e}"

    def faults(self) -> list[str]:
        """What is worse than it may be."""
        errors = {
            "attention": self.attention,
            "experts": self.experts,
            "streams": self.streams,
        }
        wrong = [
            f"{part} of layer {layer}: {error:.1e}"
            for part, found in errors.items()
            for layer, error in found.items()
            if error > BOUND
        ]
        return wrong + [
            f"choice of layer {layer}: {same:.5f}"
            for layer, same in self.choice.items()
            if same < CHOICE
        ]


def compared(twin: V41Twin, foreign: Foreign, tokens: list[int]) -> Figures:
    """Each layer from the foreign model's inputs, and the whole model."""
    theirs = foreign.logits(tokens)
    logits = relative(twin.logits(tokens), theirs)
    twin.beside({n: x for (part, n), x in foreign.inputs.items() if part == "attn"})
    attention, experts, choice = {}, {}, {}
    streams: dict[int, float] = {}
    for layer in range(twin.depth):
        given = Given(foreign.chosen.get(layer))
        ours = twin.attention(layer, foreign.inputs["attn", layer], given)
        attention[layer] = relative(ours, foreign.outputs["attn", layer])
        ours = twin.feed_forward(layer, foreign.inputs["ffn", layer], tokens)
        experts[layer] = relative(ours, foreign.outputs["ffn", layer])
        if given.own_topk is not None:
            choice[layer] = given.overlap(twin.ratio(layer))

    def answer(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
        error = relative(x, foreign.inputs[part, layer])
        streams[layer] = max(error, streams.get(layer, 0.0))
        return foreign.outputs[part, layer]

    twin.states(tokens, answer)
    return Figures(attention, experts, streams, choice, logits)


def with_images(
    tokens: list[int], twin: v41_vision.V41VisionTwin, foreign: Foreign
) -> list[int]:
    """The same with two images, one longer than the window, which both models see."""
    drawn = (Picture(0, 30, 39, seed=1), Picture(0, 7, 10, seed=2))
    first, second = ([v41.IMAGE] * len(v41_vision.block(p)) for p in drawn)
    whole = [*tokens[:9], *first, *tokens[9:60], *second, *tokens[60:120]]
    twin.pictures[tuple(whole)] = foreign.images = drawn
    return whole


def main() -> int:
    """Compare with and without the foreign roundings."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        published, plain = checkpoint.write(Path(folder), v41.V41(0))
        twin, foreign = V41Twin(plain), loaded(published)
    with tempfile.TemporaryDirectory() as folder:
        published, plain = checkpoint.write(Path(folder), v41_vision.Images(0))
        seeing, seen_by = v41_vision.V41VisionTwin(plain), loaded(published)
    drawn = random.Random(1)
    tokens = [drawn.randrange(2, checkpoint.VOCABULARY) for _ in range(LENGTH)]
    with foreign.exact():
        exact = compared(twin, foreign, tokens)
    with twin.shaped(THEIRS):
        rounded = compared(twin, foreign, tokens)
    with seen_by.exact():
        images = compared(seeing, seen_by, with_images(tokens, seeing, seen_by))
    for what, figures in (
        ("nothing is rounded", exact),
        ("rounded as in training", rounded),
        ("with two images, nothing is rounded", images),
    ):
        print(f"{LENGTH} tokens, {what}:", *figures.lines(), sep="\n")
        wrong += [f"{what}: {fault}" for fault in figures.faults()]
    for figures in (exact, images):
        if figures.logits > BOUND:
            wrong.append(f"logits: {figures.logits:.1e}")
    print("\n".join(wrong) or "the twin agrees")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
