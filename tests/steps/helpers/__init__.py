# SPDX-License-Identifier: Apache-2.0
"""The building blocks of step tests. Each module is imported by its own name, so that a
test depends only on what it uses.

Which vLLM is installed
    `layout`: where this release keeps DeepSeek-V4. Every test asks it, and none looks
    at a version.

Real parts, built by vLLM's own classes
    `model_configs`: configurations, as read from a checkpoint.
    `model_layers`: attention layers, indexers, compressors and models from them.
    `layer_parts`: the parts of such a layer, whichever object owns them.
    `moe_layers`: the mixture of experts and its router.
    `block_fp8`, `packed_formats`, `mxfp4_experts`: weights in a checkpoint's format,
    and what they stand for.

Whole runs, with what must come out
    `batch_metadata`: the metadata of a batch, as the builders make it.
    `attention_batch`: one batch through an attention layer.
    `indexer_batch`: one batch through the sparse indexer.
    `compressor_run`: whole requests through a compressor.
    `decode_layer`, `decoder_layer`: a whole attention layer, a whole decoder layer.
    `common_ops`: test classes for upstream's shared Triton ops; a module that imports
    them runs them.

References in float64
    `reference_attention`, `reference_hyper_connections`, `reference_ops`.

What the code asks of the device
    `kernel_trace`: launches, allocations and host synchronization.
    `e2m1_assembly`: the one instruction of inline assembly, for Triton's interpreter.
"""
