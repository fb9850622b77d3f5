# SPDX-License-Identifier: Apache-2.0
"""Model how long a prompt takes until its first token: its chunks follow each other
through the stages, each as soon as the stage and the one before it are done.

All layers of a chunk count alike. Layers behind the last one that writes compressed
entries compute the prompt's end alone (step `v41-replay`).
"""

from collections.abc import Callable, Sequence

from lab.aot.costs.host_experts import Slots, overlaps, streamed
from lab.aot.costs.step import NOTHING, Kernels, Range, Split, prefill, total
from lab.memory import WINDOW, Shapes


def end_rows(model: Shapes) -> int:
    """Rows of a prompt's end on which its first token depends through the last
    layers: each of them sees one window further back."""
    return WINDOW + (model.late - 1) * (WINDOW - 1) if model.late else 0


def rows(model: Shapes, tokens: int, chunk: int, *, replay: bool) -> list[list[int]]:
    """Of each chunk of a prompt of `tokens` tokens, the rows that each layer computes.

    Args:
        replay: whether the last layers compute the end alone.
    """
    end = tokens - end_rows(model) if replay and model.late else 0
    found = []
    for first in range(0, tokens, chunk):
        last = min(tokens, first + chunk)
        late = max(0, last - max(first, end))
        early = model.layers - model.late
        found.append([last - first] * early + [late] * model.late)
    return found


def first_token(
    model: Shapes,
    split: Split,
    sizes: Sequence[int],
    tokens: int,
    chunk: int,
    slots: Slots | None = None,
    *,
    replay: bool = True,
) -> Range:
    """Milliseconds until the first token of a prompt that comes alone, without
    attention and the indexer's scores.

    Args:
        sizes: layers of each stage.
        chunk: tokens of the prompt in a step at most.
        slots: if experts lie in the host's memory.
    """
    chunks = rows(model, tokens, chunk, replay=replay)
    counts = {count for layers in chunks for count in layers}
    times = {count: _layer(model, split, count, slots) for count in counts}
    return Range(
        _through(chunks, sizes, lambda n: times[n].fast),
        _through(chunks, sizes, lambda n: times[n].slow),
    )


def _layer(model: Shapes, split: Split, count: int, slots: Slots | None) -> Range:
    """Milliseconds of a layer over so many rows, experts of the host included."""
    if not count:
        return NOTHING
    parts = prefill(model, split, count, 0, Kernels({}, {}))
    time = total(parts)
    if slots:
        link = streamed(model, split, slots, count).milliseconds
        beside = 0.0
        if overlaps(model, count):
            beside = next(p.milliseconds.fast for p in parts if p.name == "experts")
        time += Range(max(0, link.fast - beside), link.slow)
    return time.times(1 / model.layers)


def _through(
    chunks: Sequence[Sequence[int]],
    sizes: Sequence[int],
    of_rows: Callable[[int], float],
) -> float:
    """When the last stage has done the last chunk."""
    done = [0.0] * len(sizes)
    for layers in chunks:
        first, arrives = 0, 0.0
        for stage, size in enumerate(sizes):
            begins = max(arrives, done[stage])
            arrives = begins + sum(map(of_rows, layers[first : first + size]))
            done[stage], first = arrives, first + size
    return done[-1]
