# SPDX-License-Identifier: Apache-2.0
"""A V4.1 of four layers whose checkpoint has DSpark's stages."""

DRAFT = {
    "dspark_block_size": 3,
    "dspark_markov_rank": 64,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
    "num_nextn_predict_layers": 2,
    "compress_ratios": [0, 2, 1, 1, 0, 0],
}
"""Fields of its configuration."""
METHOD = {"method": "dspark", "num_speculative_tokens": 3}
