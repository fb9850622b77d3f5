# SPDX-License-Identifier: Apache-2.0
"""A worker that compares the bytes of pages which come back from the host with those
that the prompt's own steps wrote. For one request at a time."""

import io
from typing import Any

import torch

from proof.e2e.inside.recording import RecordingWorker

Rows = dict[str, dict[int, torch.Tensor]]
"""By layer, the bytes of a prompt's blocks, by their places in the prompt."""


class PagesWorker(RecordingWorker):
    """Adds `pages` to what is recorded: for each prompt that began behind pages, by
    layer, how many blocks were `compared`, how many of those that its own steps wrote
    others `took` since, how many bytes are `wrong`, and whether blocks are `missing`.
    """

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._cache = kv_cache_config
        self._written: dict[tuple[int, ...], Rows] = {}
        self._tables: dict[tuple[int, ...], list[list[int]]] = {}
        self._taken: dict[tuple[int, ...], set[int]] = {}
        self._begun: Any = None
        self._compared: list[dict[str, dict[str, int]]] = []
        super().initialize_from_config(kv_cache_config)

    def execute_model(self, scheduler_output: Any) -> Any:
        """A step finds pages as the step before left them, a draft's too."""
        if self._begun is not None:
            rows = self._rows(self._begun, len(self._begun.prompt_token_ids))
            self._written.setdefault(tuple(self._begun.prompt_token_ids), rows)
            self._begun = None
        for request in scheduler_output.scheduled_new_reqs:
            if request.num_computed_tokens:
                self._compare(request)
            else:
                self._note(request)
        return super().execute_model(scheduler_output)

    def recorded(self) -> bytes:
        found = torch.load(io.BytesIO(super().recorded()), weights_only=False)
        file = io.BytesIO()
        torch.save({**found, "pages": self._compared}, file)
        return file.getvalue()

    def _note(self, request: Any) -> None:
        """Keep where a prompt's steps write, and that they overwrite others' blocks."""
        self._begun = request
        table = [list(blocks) for blocks in request.block_ids]
        for taken in self._taken.values():
            taken.update(block for blocks in table for block in blocks)
        known = tuple(request.prompt_token_ids)
        self._tables[known], self._taken[known] = table, set()

    def _compare(self, request: Any) -> None:
        prompt = tuple(request.prompt_token_ids)
        written, taken = self._written[prompt], self._taken[prompt]
        tables = {
            name: table
            for group, table in zip(
                self._cache.kv_cache_groups, self._tables[prompt], strict=True
            )
            for name in group.layer_names
        }
        entry = {}
        for layer, rows in self._rows(request, request.num_computed_tokens).items():
            known = written[layer]
            entry[layer] = {
                "compared": len(rows),
                "took": sum(tables[layer][place] in taken for place in rows),
                "wrong": sum(int((row != known[n]).sum()) for n, row in rows.items()),
                "missing": int(not rows),
            }
        self._compared.append(entry)

    def _rows(self, request: Any, tokens: int) -> Rows:
        """The bytes of the blocks that the first `tokens` of a request fill."""
        layers = self.vllm_config.compilation_config.static_forward_context
        found: Rows = {}
        groups = self._cache.kv_cache_groups
        for group, blocks in zip(groups, request.block_ids, strict=True):
            whole = tokens // group.kv_cache_spec.block_size
            for name in group.layer_names:
                cache = layers[name].kv_cache
                if isinstance(cache, list | tuple):
                    (cache,) = cache
                parts = len(cache) // self._cache.num_blocks
                found[name] = {
                    place: _bytes_of(cache[block * parts : (block + 1) * parts])
                    for place, block in enumerate(blocks[:whole])
                    if block
                }
        return found


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.contiguous().view(torch.uint8).flatten().clone()
