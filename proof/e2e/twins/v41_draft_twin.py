# SPDX-License-Identifier: Apache-2.0
"""The layers of V4.1's draft, DSpark, in float32.

Their keys come from the model: the means of its streams as some layers get them,
projected (the context). Their queries are a block behind the context: a request's
newest token, and noise. Each query sees the last window of the context and the whole
block.
"""

import torch

from proof.e2e.twins.twin import Given
from proof.e2e.twins.v41_twin import Sublayer, V41Twin


class V41DraftTwin(V41Twin):
    """V4.1's twin; behind its `depth` layers come those of the draft."""

    context = 0
    """How many of a draft layer's inputs are context."""

    @property
    def stages(self) -> range:
        """The draft's layers."""
        return range(self.depth, self.depth + self.config["num_nextn_predict_layers"])

    def contexts(self, tokens: list[int], sublayer: Sublayer) -> torch.Tensor:
        """What the keys of a text are made of, `[T, hidden]`, from what the model's
        sublayers give."""
        wanted = self.config["dspark_target_layer_ids"]
        streams = (self.through(range(n), tokens, sublayer)[0] for n in wanted)
        means = torch.cat([self.forms.kept(s.mean(1)) for s in streams], -1)
        return self._norm("mtp.0.main_norm", self._linear("mtp.0.main_proj", means))

    def block(self, tokens: list[int], sublayer: Sublayer) -> torch.Tensor:
        """What the draft's head sees before its norm, `[T, hidden]`."""
        return self._collapsed(*self.through(self.stages, tokens, sublayer))

    def attend(
        self, layer: int, states: torch.Tensor, x: torch.Tensor, given: Given
    ) -> torch.Tensor:
        """One draft layer's attention over a block behind its context."""
        self.context = len(states)
        if given.core is not None:
            before = given.core.new_zeros(len(states), *given.core.shape[1:])
            given.core = torch.cat((before, given.core))
        output = self.attention(layer, torch.cat((states, x)), given)
        assert given.own_core is not None
        given.own_core = given.own_core[len(states) :]
        self.context = 0
        return output[len(states) :]

    def near(self, positions: torch.Tensor) -> torch.Tensor:
        if not self.context:
            return super().near(positions)
        last = positions >= self.context - self.config["sliding_window"]
        return last.expand(len(positions), -1)

    def _name(self, layer: int) -> str:
        own = layer - self.depth
        return super()._name(layer) if own < 0 else f"mtp.{own}"

    def _experts_of(self, layer: int) -> int:
        known = super()._experts_of(layer)
        drafts = self.config["dspark_num_experts_per_tok"]
        return known if layer < self.depth else int(drafts)
