# SPDX-License-Identifier: Apache-2.0
"""A KV connector that reports every prompt as computed, except for its last token.

The engine then decodes at any context length at once, over pages that other code
filled. It computes all of a prompt of `FRESH` tokens.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

FRESH = 8192


class FilledPages(KVConnectorBase_V1, SupportsHMA):
    """Scheduler's and worker's part: neither moves anything."""

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """How many tokens lie in pages already."""
        if request.num_tokens == FRESH:
            return 0, False
        return max(request.num_tokens - 1 - num_computed_tokens, 0), False

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
