# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4.1 in float32, from its description, and the same with roundings.

transformers has no such model; `foreign.py` holds this one to an implementation that
nobody here wrote. Each method is a formula of the model; a request's tokens are always
computed from the first one on, without pages, chunks or batches.

Layers read what others made of their inputs: entries and keys of a KV source, the
choice of an index source, and the candidate blocks. The twin therefore keeps the inputs
of all layers of a text, its own or (`beside`) an engine's.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from proof.e2e.checkpoints import checkpoint, engram, v41
from proof.e2e.pictures import Key, Text
from proof.e2e.twins.comparison import by_request
from proof.e2e.twins.rounding import Forms
from proof.e2e.twins.twin import Given, Reference, Roundings, of_indices

Sublayer = Callable[[str, int, torch.Tensor], torch.Tensor]
"""What "attn" or "ffn" of a layer gives for its input `[T, hidden]`."""
LEAST_DOT = 1e-6


class Mixes(NamedTuple):
    """How a sublayer joins the streams: `pre` `[T, S]` makes the input of the *next*
    one, `post` `[T, S]` adds its output, `comb` `[T, from, to]` mixes the streams."""

    pre: torch.Tensor
    post: torch.Tensor
    comb: torch.Tensor


class V41Twin(Reference):
    """The model of a V4.1 checkpoint's float32 form."""

    def __init__(self, folder: Path) -> None:
        described = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = described["text_config"]
        self.weights = dict(checkpoint.tensors(folder))
        self.forms = Forms()
        layers = tuple(self.config["engram_layer_ids"])
        known = engram.compressed(v41.texts(self.config["vocab_size"]))
        self.hashes = engram.Hashes(layers, tuple(known))
        self.depth = int(self.config["num_hidden_layers"])
        self.window = int(self.config["sliding_window"])
        self._inputs: dict[int, torch.Tensor] = {}
        self._chosen: dict[Key, dict[int, Given]] = {}
        """What an engine chose in each layer of a text."""
        self._goes_on = False

    def look_at(self, result: Any) -> None:
        """Learn what an engine chose. MXFP4 makes other choices of inputs that differ
        by 0.2 %, so the rounding twin's own would show what it chose, not what it
        computed; check_attention holds each layer's choice to the twin's."""
        for (request, layer), seen in by_request(result.answer, "attn").items():
            text = result.texts[request]
            if seen.topk is not None:
                topk, blocks = (
                    _padded(kept, len(text)) for kept in (seen.topk, seen.blocks)
                )
                chosen = self._chosen.setdefault(text.key, {})
                chosen[layer] = Given(topk, blocks=blocks)

    def beside(self, inputs: Mapping[int, torch.Tensor]) -> None:
        self._inputs = dict(inputs)

    @contextmanager
    def rounded(self, roundings: Roundings) -> Iterator[None]:
        """Within, the model rounds as vLLM's XPU path does."""
        kinds = roundings.activations, roundings.output_fp8, roundings.index_fp4
        self._goes_on = roundings.index_fp4
        try:
            with self.shaped(Forms.of_xpu(*kinds)):
                yield
        finally:
            self._goes_on = False

    @contextmanager
    def shaped(self, forms: Forms) -> Iterator[None]:
        """Within, the model rounds as `forms` says."""
        before, self.forms = self.forms, forms
        try:
            yield
        finally:
            self.forms = before

    def logits(self, tokens: list[int]) -> torch.Tensor:
        """`[T, vocabulary]` of one prompt."""
        chosen: dict[int, Given] = {}
        if self._goes_on and isinstance(tokens, Text):
            chosen = self._chosen.get(tokens.key, {})

        def own(part: str, layer: int, x: torch.Tensor) -> torch.Tensor:
            if part == "attn":
                return self.attention(layer, x, chosen.get(layer), tokens)
            return self.feed_forward(layer, x, tokens)

        return self.spoken(self.states(tokens, own))

    def spoken(self, states: torch.Tensor) -> torch.Tensor:
        """The logits of what the output head sees."""
        return self._dense("head", states)

    def states(self, tokens: list[int], sublayer: Sublayer) -> torch.Tensor:
        """What the output head sees, `[T, hidden]`, if sublayers give what `sublayer`
        says."""
        streams, pre = self.through(range(self.depth), tokens, sublayer)
        return self._norm("norm", self._collapsed(streams, pre))

    def through(
        self, layers: range, tokens: list[int], sublayer: Sublayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The streams behind `layers`, and the mix that collapses them. Each sublayer
        collapses the streams with the mixes of the one before it."""
        streams = self.embedded(tokens)[:, None].expand(-1, checkpoint.STREAMS, -1)
        pre = torch.zeros(streams.shape[:2])
        pre[:, 0] = 1
        for layer in layers:
            name = self._name(layer)
            if layer in self.hashes.layers:
                streams = self.remembered(layer, streams, tokens)
            for part in ("attn", "ffn"):
                mixes = self.mixes(f"{name}.hc_{part}", streams)
                x = self._norm(f"{name}.{part}_norm", self._collapsed(streams, pre))
                added = mixes.post[..., None] * sublayer(part, layer, x)[:, None]
                mixed = torch.einsum("tij,tid->tjd", mixes.comb, streams)
                streams, pre = self.forms.kept(added + mixed), mixes.pre
        return streams, pre

    def embedded(self, tokens: list[int]) -> torch.Tensor:
        """What the first layer sees of each token, `[T, hidden]`."""
        return self.weights["embed.weight"][tokens]

    def _collapsed(self, streams: torch.Tensor, pre: torch.Tensor) -> torch.Tensor:
        return self.forms.kept((pre[..., None] * streams).sum(1))

    def mixes(self, name: str, streams: torch.Tensor) -> Mixes:
        """The mixes that a sublayer makes of the streams `[T, S, hidden]`."""
        size, eps = streams.shape[1], self.config["hc_eps"]
        scale, base = self.weights[f"{name}_scale"], self.weights[f"{name}_base"]
        projected = (
            _normed(streams.flatten(1), self._eps) @ self.weights[f"{name}_fn"].T
        )
        parts = projected.split((size, size, size * size), -1)
        bases = base.split((size, size, size * size))
        pre, post, comb = (
            p * s + b for p, s, b in zip(parts, scale, bases, strict=True)
        )
        comb = comb.unflatten(-1, (size, size)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.config["hc_sinkhorn_iters"] - 1):
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return Mixes(pre.sigmoid() + eps, 2 * post.sigmoid(), comb)

    def remembered(
        self, layer: int, streams: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        """The streams with what Engram's table says about each token's n-grams, by a
        gate for each stream."""
        name, width = f"layers.{layer}.engram", streams.shape[-1]
        place = self.hashes.layers.index(layer)
        places = self.hashes.rows(tokens, place, unread=v41.IMAGE)
        rows = self.weights[f"{name}.embed.weight"][places]
        both = self._linear(f"{name}.wkv", self.forms.kept(rows.flatten(1)))
        keys = both[:, :-width].unflatten(1, streams.shape[1:])
        weights = self.weights[f"{name}.q_weight"] * self.weights[f"{name}.k_weight"]
        fits = _normed(streams, self._eps) * weights * _normed(keys, self._eps)
        dot = fits.sum(-1) * width**-0.5
        gate = dot.abs().clamp(min=LEAST_DOT).sqrt().copysign(dot).sigmoid()
        return self.forms.kept(streams + gate[..., None] * both[:, None, -width:])

    def attention(
        self,
        layer: int,
        x: torch.Tensor,
        given: Given | None = None,
        tokens: list[int] | None = None,
    ) -> torch.Tensor:
        """One layer's attention over the inputs `[T, hidden]` of a whole request."""
        self._inputs[layer] = x
        name, ratio = f"{self._name(layer)}.attn", self.ratio(layer)
        positions, compresses = torch.arange(len(x)), ratio > 0
        q = self._heads(f"{name}.wq_b", self._queries(name, x))
        q = self.forms.kept(self.turned(q, positions, compresses))
        kv = self._norm(f"{name}.kv_norm", self._linear(f"{name}.wkv", x))
        keys = self.forms.window(self.turned(kv, positions, compresses))
        seen = self.near(positions)
        if compresses:
            entries = self.entries(self._source("kv", layer))
            chosen = self._taken(layer, given, len(entries))
            keys, seen = torch.cat((keys, entries)), torch.cat((seen, chosen), 1)
        core = self.forms.kept(self._core(q, keys, seen, f"{name}.attn_sink"))
        if given is not None:
            given.own_core = core
            core = core if given.core is None else given.core
        back = self.forms.output(self.turned(core, positions, compresses, back=True))
        groups = self.config["o_groups"]
        wo_a = self.weights[f"{name}.wo_a.weight"].unflatten(0, (groups, -1))
        grouped = back.flatten(1).unflatten(1, (groups, -1))
        low = self.forms.kept(torch.einsum("tgk,grk->tgr", grouped, wo_a).flatten(1))
        return self._linear(f"{name}.wo_b", low)

    def near(self, positions: torch.Tensor) -> torch.Tensor:
        """Which tokens each sees in its window, `[T, T]`."""
        distance = positions[:, None] - positions
        return (distance >= 0) & (distance < self.window)

    def _core(
        self, q: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, sink: str
    ) -> torch.Tensor:
        """Keys are the values; a head's sink takes part of its attention."""
        scores = torch.einsum("thd,kd->htk", q, keys) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen, float("-inf"))
        sinks = self.weights[sink][:, None, None].expand(-1, len(q), 1)
        shares = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return torch.einsum("htk,kd->thd", shares, keys)

    def _taken(self, layer: int, given: Given | None, count: int) -> torch.Tensor:
        """Which of `count` entries each token attends to, `[T, count]`."""
        topk = self.choice(self._source("index", layer), given)
        if given is not None:
            given.own_topk = topk
            # A wrong engine may name entries that the request does not have.
            topk = topk if given.topk is None else given.topk
        return of_indices(topk, count)

    def entries(self, source: int) -> torch.Tensor:
        """The compressed entries that a KV source writes, `[entries, head_dim]`."""
        latent = self.latent(source)
        return self.forms.entry(self.turned(latent, self._places(source), True))

    def latent(self, source: int) -> torch.Tensor:
        """One of each `ratio` tokens, by a softmax for each channel."""
        name, ratio = f"layers.{source}.attn.compressor", self.ratio(source)
        x = self._inputs[source]
        x = x[: len(x) // ratio * ratio]
        values = x @ self.weights[f"{name}.wkv.weight"].T
        if ratio > 1:
            scores = (x @ self.weights[f"{name}.wgate.weight"].T).unflatten(
                0, (-1, ratio)
            )
            values = (values.unflatten(0, (-1, ratio)) * scores.softmax(1)).sum(1)
        return self._norm(f"{name}.norm", values)

    def _places(self, source: int) -> torch.Tensor:
        """The positions of entries: of the first token of each."""
        ratio = self.ratio(source)
        return torch.arange(len(self._inputs[source]) // ratio) * ratio

    def choice(self, layer: int, given: Given | None = None) -> torch.Tensor:
        """The entries that an index source chooses, `[T, k]`, by score; -1 for none."""
        scores, first = self.scores(layer), self.config["candidate_source_layer_id"]
        wanted = self.config["index_topk"]
        if 0 <= first < layer:
            size = self.config["candidate_block_size"]
            blocks, visible = self.blocks(first), self._visible(first)
            if given is not None and given.blocks is not None:
                several = blocks.sum(1) < (visible + size - 1) // size
                given.own_blocks = blocks & several[:, None]
                # Where all entries are chosen nobody asks for blocks.
                all_ = (visible <= wanted)[:, None]
                blocks = of_indices(given.blocks, blocks.shape[1]) | all_
            kept = blocks.repeat_interleave(size, 1)[:, : scores.shape[1]]
            scores = scores.masked_fill(~kept, float("-inf"))
        best = scores.topk(min(wanted, scores.shape[1]))
        return best.indices.where(best.values > float("-inf"), -1)

    def blocks(self, source: int) -> torch.Tensor:
        """The candidate blocks of entries, those with the best scores, `[T, blocks]`;
        the newest block is always one of them."""
        size, scores = self.config["candidate_block_size"], self.scores(source)
        padded = functional.pad(scores, (0, -scores.shape[1] % size), value=-torch.inf)
        best = padded.unflatten(1, (-1, size)).amax(-1)
        newest = self._newest(source, size)
        rows = (newest >= 0).nonzero()[:, 0]
        best[rows, newest[rows]] = torch.inf
        kept = best.topk(min(self.config["candidate_topk_blocks"], best.shape[1]))
        known = kept.indices.where(kept.values > -torch.inf, -1)
        return of_indices(known, best.shape[1])

    def _newest(self, source: int, size: int) -> torch.Tensor:
        """The last block that each token may see; -1 for none."""
        return (self._visible(source) - 1) // size

    def scores(self, layer: int) -> torch.Tensor:
        """Of each token and each entry that it may see, `[T, entries]`; -inf beyond."""
        name, x = f"layers.{layer}.attn", self._inputs[layer]
        source = self._source("kv", layer)
        keyed, indexer = f"layers.{source}.attn.indexer", f"{name}.indexer"
        k = self._norm(
            f"{keyed}.k_norm", self._dense(f"{keyed}.wk", self.latent(source))
        )
        k = self.forms.index_key(self.turned(k, self._places(source), True))
        latent = self._queries(name, x)
        q = self._heads(f"{indexer}.wq_b", latent, self.config["index_n_heads"])
        q = self.forms.index_query(self.turned(q, torch.arange(len(x)), True))
        weights = self._dense(f"{indexer}.weights_proj", x)
        weights = weights * (q.shape[1] * q.shape[2]) ** -0.5
        scores = torch.einsum("thd,kd->thk", q, k).relu()
        scores = torch.einsum("thk,th->tk", scores, weights)
        seen = torch.arange(len(k)) < self._visible(source)[:, None]
        return scores.masked_fill(~seen, float("-inf"))

    def _visible(self, source: int) -> torch.Tensor:
        """How many entries each token may see."""
        count = len(self._inputs[source])
        return (torch.arange(count) + 1) // self.ratio(source)

    def feed_forward(
        self, layer: int, x: torch.Tensor, tokens: list[int]
    ) -> torch.Tensor:
        """One layer's experts over the inputs `[T, hidden]` of a whole request."""
        name = f"{self._name(layer)}.ffn"
        raw = functional.linear(x, self.weights[f"{name}.gate.weight"])
        scores = functional.softplus(raw).sqrt()
        biased = scores + self.bias(f"{name}.gate", tokens)
        chosen = biased.topk(self._experts_of(layer)).indices
        shares = scores.gather(1, chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        shares = shares * self.config["routed_scaling_factor"]
        exact = Forms()
        total = self._expert(f"{name}.shared_experts", x, self.forms)
        for expert in chosen.unique().tolist():
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            given = self._expert(f"{name}.experts.{expert}", x[rows], exact)
            total = total.index_add(0, rows, given * shares[rows, places, None])
        return self.forms.kept(total)

    def bias(self, router: str, tokens: list[int]) -> torch.Tensor:
        """What is added to the scores that choose experts, `[experts]` or for each
        token."""
        return self.weights[f"{router}.bias"]

    def _expert(self, name: str, x: torch.Tensor, forms: Forms) -> torch.Tensor:
        limit, w = self.config["swiglu_limit"], self.weights
        gate, up = (
            forms.kept(functional.linear(forms.linear(x), w[f"{name}.{part}.weight"]))
            for part in ("w1", "w3")
        )
        gated = functional.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
        inner = forms.linear(gated)
        return forms.kept(functional.linear(inner, w[f"{name}.w2.weight"]))

    def ratio(self, layer: int) -> int:
        """Tokens of a compressed entry; 0 for the window alone."""
        return int(self.config["compress_ratios"][layer])

    def _name(self, layer: int) -> str:
        return f"layers.{layer}"

    def _experts_of(self, layer: int) -> int:
        """How many routed experts a token has."""
        return int(self.config["num_experts_per_tok"])

    def _source(self, kind: str, layer: int) -> int:
        """The layer whose entries ("kv") or choice ("index") a layer reads."""
        known: list[int] = self.config[f"{kind}_source_layer_ids"]
        return max(source for source in known if source <= layer)

    @property
    def _eps(self) -> float:
        return float(self.config["rms_norm_eps"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.forms.kept(_normed(x, self._eps) * self.weights[f"{name}.weight"])

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """A layer in MXFP8."""
        return self._dense(name, self.forms.linear(x))

    def _dense(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return self.forms.kept(functional.linear(x, self.weights[f"{name}.weight"]))

    def _queries(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What the queries of attention and indexer are made of, `[T, q_lora]`."""
        return self._norm(f"{name}.q_norm", self._linear(f"{name}.wq_a", x))

    def _heads(
        self, name: str, latent: torch.Tensor, heads: int | None = None
    ) -> torch.Tensor:
        heads = heads or self.config["num_attention_heads"]
        return self._linear(name, latent).unflatten(-1, (heads, -1))

    def turned(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        compresses: bool,
        back: bool = False,
    ) -> torch.Tensor:
        """RoPE on the last dimensions of `[T, D]` or `[T, heads, D]`."""
        angles = positions[:, None] * self._speeds(compresses)
        turns = torch.polar(torch.ones_like(angles), -angles if back else angles)
        turns = turns if x.ndim == 2 else turns[:, None]
        width = self.config["qk_rope_head_dim"]
        pairs = torch.view_as_complex(
            x[..., -width:].unflatten(-1, (-1, 2)).contiguous()
        )
        return torch.cat(
            (x[..., :-width], torch.view_as_real(pairs * turns).flatten(-2)), -1
        )

    def _speeds(self, compresses: bool) -> torch.Tensor:
        """Radians a position for each pair; slow ones slower by YaRN if compressed."""
        width = self.config["qk_rope_head_dim"]
        theta = self.config["compress_rope_theta" if compresses else "rope_theta"]
        speeds = theta ** (-torch.arange(0, width, 2) / width)
        if not compresses:
            return speeds
        yarn = self.config["rope_scaling"]
        length = yarn["original_max_position_embeddings"] / (2 * torch.pi)

        def pair(turns: float) -> torch.Tensor:
            """The pair that turns so often within the original length."""
            turned = torch.tensor(length / turns)
            return width * turned.log() / (2 * torch.tensor(theta).log())

        low = pair(yarn["beta_fast"]).floor().clamp(min=0)
        high = pair(yarn["beta_slow"]).ceil().clamp(max=width - 1)
        slow = ((torch.arange(width // 2) - low) / (high - low)).clamp(0, 1)
        return speeds / yarn["factor"] * slow + speeds * (1 - slow)


def _padded(indices: torch.Tensor | None, length: int) -> torch.Tensor | None:
    """A row that names nothing for each token that the engine did not read."""
    if indices is None:
        return None
    return functional.pad(indices, (0, 0, 0, length - len(indices)), value=-1)


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
