# SPDX-License-Identifier: Apache-2.0
"""The engine's records, put together request by request and held against the twin."""

from collections import defaultdict
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from proof.e2e.inside.blocks import NO_BLOCKS
from proof.e2e.twins.twin import Given, Reference, Roundings

Rows = dict[int, dict[str, torch.Tensor]]
"""What is known of each position."""


@dataclass
class Sublayer:
    """What a request's tokens gave to a sublayer and got from it, by position; the
    first `cached` ones are those of a request that began alike. V4.1's later layers
    compute rows of a prompt's end: those before `first` are zeros, and `keyless` if no
    keys were made of them either."""

    input: torch.Tensor
    output: torch.Tensor
    core: torch.Tensor | None = None
    topk: torch.Tensor | None = None
    blocks: torch.Tensor | None = None
    cached: int = 0
    first: int = 0
    keyless: bool = False


@dataclass
class Error:
    """One layer of one request against a twin, relative, over all its tokens.

    All are of the rows that are known. `plain` is the layer's output against the
    float32 twin, which takes the engine's choice where MXFP4 keys make it; `rounded`
    against the twin that rounds as the engine does. FP8 makes of a difference of 0.2 %
    one of 1 %, wherever it quantizes; so `core` is what the attention kernel gave
    against the rounding twin's, and `output` the layer's output against that twin's
    when it goes on from the engine's core; both over the tokens that the request itself
    computed, for behind a cached prefix those few show what its pages hold. `overlap`
    belongs to the indexer's choice, `blocks` to the candidate blocks of V4.1 that it
    was made among.
    """

    request: str
    layer: int
    ratio: int
    tokens: int
    plain: float
    rounded: float
    core: float
    output: float
    overlap: float | None = None
    blocks: float | None = None


def of_all_ranks(
    ranks: list[list[dict[str, Any]]], share_rows: bool = False
) -> list[dict[str, Any]]:
    """One engine's records from those of its tensor-parallel ranks.

    Each rank attends with its own heads. Where they `share_rows` of an indexer, each
    has candidate blocks of its own; everything else must be the same on all.
    """
    own = {"core", "blocks"} if share_rows else {"core"}
    whole = []
    for records in zip(*ranks, strict=True):
        for name, value in records[0].items():
            if isinstance(value, torch.Tensor) and name not in own:
                for other in records[1:]:
                    assert value.equal(other[name]), (name, records[0]["layer"])
        cores = [record["core"] for record in records if "core" in record]
        joined = {"core": torch.cat(cores, dim=1)} if cores else {}
        if share_rows and "blocks" in records[0]:
            joined["blocks"] = blocks_of_all([record["blocks"] for record in records])
        whole.append(records[0] | joined)
    return whole


def blocks_of_all(ranks: list[torch.Tensor]) -> torch.Tensor:
    """Candidate blocks of all rows, each of which some rank must have, and those that
    have it alike. No rank has any of a step whose requests are too short to choose."""
    whole = torch.stack(ranks).amax(0)
    for blocks in ranks:
        own = blocks[:, 0] != NO_BLOCKS
        assert blocks[own].equal(whole[own]), "ranks have other candidate blocks"
    written = (whole != NO_BLOCKS).any(1)
    assert written.all() or not written.any(), "rows without candidate blocks"
    return whole


def by_request(result: dict[str, Any], part: str) -> dict[tuple[str, int], Sublayer]:
    """Records of `part` by request and layer.

    The last computation of a position counts, as after pre-emption. A request that
    starts from cached pages has its first positions from one that began alike.
    """
    rows: dict[tuple[str, int], Rows] = defaultdict(dict)
    keys: dict[tuple[str, int], Rows] = defaultdict(dict)
    positions: list[torch.Tensor] = []
    for record in result["records"]:
        if record["part"] != "ffn":
            positions.append(record["positions"])
        # A feed-forward layer sees the tokens of the attention before it.
        here = positions[-1]
        if record["part"] not in (part, "keys"):
            continue
        into = rows if record["part"] == part else keys
        start = 0
        for request, count in record["rows"]:
            for row in range(start, start + count):
                kept = {
                    name: record[name][row]
                    for name in ("input", "output", "core", "topk", "blocks")
                    if name in record
                }
                into[request, record["layer"]][int(here[row])] = kept
            start += count
    sources = dict(keys)
    whole = {}
    for (request, layer), found in rows.items():
        later = any(r == request and source <= layer for r, source in sources)
        cached, donor = min(rows[request, 0] if later else found), request
        if cached:
            beginning = result["texts"][request][:cached]
            donors = (
                name
                for name, text in result["texts"].items()
                if name != request and text[:cached] == beginning
            )
            donor = max(
                donors,
                key=lambda n: sum(p < cached for p in rows.get((n, layer), ())),
            )
        first = _start_of_the_end(found)
        assert later or first == cached, "a position is missing"
        below = {p: row for p, row in rows[donor, layer].items() if p < cached}
        if below and first == cached:
            first = _start_of_the_end(below)
        assert sources or not first, "a position is missing"
        written = sources.get((donor, layer), {}) | sources.get((request, layer), {})
        above = {p: row for p, row in found.items() if p >= first}
        seen = _stacked(below | above, written, cached)
        if first:
            seen.first, seen.keyless = first, not written
        whole[request, layer] = seen
    return whole


def _start_of_the_end(found: Rows) -> int:
    """The first of the last positions without a gap: a chunk that later layers do not
    need leaves them one row."""
    first = max(found)
    while first - 1 in found:
        first -= 1
    return first


def logits_by_request(
    result: dict[str, Any], last: bool = False
) -> dict[str, dict[int, torch.Tensor]]:
    """What was sampled from, by request and the position of the last token seen.

    With `last`, a position that was computed again later has none: what its layers
    gave (`by_request`) is of that later time.
    """
    repeated = last_computed(result) if last else {}
    found: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for entry in result["logits"]:
        seen = [r for r in result["records"][: entry["after"]] if r["part"] == "attn"]
        if not seen or len(entry["values"]) != len(entry["requests"]):
            continue
        end = 0
        for row, (request, count) in enumerate(seen[-1]["rows"]):
            end += count
            position = int(seen[-1]["positions"][end - 1])
            if repeated.get((request, position), 0) < entry["after"]:
                found[request][position] = entry["values"][row]
    return found


def last_computed(result: dict[str, Any]) -> dict[tuple[str, int], int]:
    """The number of the last attention record of each request's positions."""
    found = {}
    for number, record in enumerate(result["records"]):
        if record["part"] == "attn":
            positions = iter(record["positions"].tolist())
            for request, count in record["rows"]:
                for position in islice(positions, count):
                    found[request, position] = number
    return found


def _stacked(found: Rows, written: Rows, cached: int) -> Sublayer:
    """The rows by position; of one that is missing the input of which keys were
    `written`, or zeros."""
    end = found[max(found)]
    none = {n: torch.full_like(x, -(n in ("topk", "blocks"))) for n, x in end.items()}
    rows = [found.get(p, none | written.get(p, {})) for p in range(max(found) + 1)]
    columns = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    whole = {n: columns.pop(n).long() for n in ("topk", "blocks") if n in columns}
    floats = {n: column.float() for n, column in columns.items()}
    return Sublayer(**floats, **whole, cached=cached)


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours - reference).norm() / reference.norm())


def attention_errors(
    result: dict[str, Any], twin: Reference, roundings: Roundings
) -> list[Error]:
    """Every attention layer of every request, fed with the engine's own inputs."""
    ratios = {
        record["layer"]: record["ratio"]
        for record in result["records"]
        if record["part"] == "attn"
    }
    errors = []
    requests = by_request(result, "attn")
    for (request, layer), seen in requests.items():
        if layer >= twin.depth:
            continue
        twin.beside({n: s.input for (r, n), s in requests.items() if r == request})
        tokens = result["texts"][request]
        # MXFP4 keys choose one entry in ten that float32 keys do not.
        among = Given(seen.topk if roundings.index_fp4 else None, blocks=seen.blocks)
        plain = twin.attention(layer, seen.input, among, tokens)
        free = Given(seen.topk, blocks=seen.blocks)
        whole = Given(seen.topk, seen.core, seen.blocks)
        with twin.rounded(roundings):
            rounded = twin.attention(layer, seen.input, free, tokens)
            output = twin.attention(layer, seen.input, whole, tokens)
        assert seen.core is not None and free.own_core is not None
        first = seen.first + (twin.window - 1 if seen.keyless else 0)
        known, own = slice(first, None), slice(max(seen.cached, first), None)
        errors.append(
            Error(
                request,
                layer,
                ratios[layer],
                len(seen.input),
                relative(seen.output[known], plain[known]),
                relative(seen.output[known], rounded[known]),
                relative(seen.core[own], free.own_core[own]),
                relative(seen.output[own], output[own]),
                None if seen.topk is None else free.overlap(ratios[layer], seen.first),
                free.same_blocks(seen.first),
            )
        )
    return errors


def feed_forward_errors(
    result: dict[str, Any], twin: Reference, roundings: Roundings
) -> dict[tuple[str, int], float]:
    """Relative error of each request's experts by layer, from the engine's inputs.

    Of the text's tokens all but the last one are read; behind them an engine may have
    read drafts that were rejected, which nobody knows.
    """
    errors = {}
    for (request, layer), seen in by_request(result, "ffn").items():
        if layer < twin.depth:
            tokens = result["texts"][request][:-1][: len(seen.input)]
            own = slice(seen.first, len(tokens))
            with twin.rounded(roundings):
                expected = twin.feed_forward(layer, seen.input[own], tokens[own])
            errors[request, layer] = relative(seen.output[own], expected)
    return errors
