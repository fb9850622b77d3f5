# SPDX-License-Identifier: Apache-2.0
"""A worker that says what its experts read over the link. Lives inside an installed
vLLM, on the GPU."""

import gc

# Registers the loader in each rank's process.
import lab.benchmarks.xpu_path.flash  # noqa: F401
from standins.emulated_xpu.on_cuda.worker import XpuPathOnCudaWorker


class CountedWorker(XpuPathOnCudaWorker):
    """Counts hits and misses of the caches of experts."""

    def expert_counts(self) -> dict[str, int]:
        """Experts that were in a slot, and those that were read, of all layers."""
        from vllm.model_executor.kernels.xpu_dsv4.expert_cache import ExpertCache

        caches = [one for one in gc.get_objects() if type(one) is ExpertCache]
        counts = [cache.counts.tolist() for cache in caches]
        own = {p.data_ptr() for p in self.model_runner.model.parameters() if p.is_cpu}
        # A view of another device's memory would be a copy.
        elsewhere = [cache for cache in caches if cache.host[0].data_ptr() not in own]
        return {
            "copies": len(elsewhere),
            "hits": sum(hits for _, hits, _ in counts),
            "misses": sum(misses for _, _, misses in counts),
        }

    def bytes_of_an_expert(self) -> int:
        """Of its part on this rank, as the kernels read it."""
        sizes = [
            parameter[0].numel() * parameter.element_size()
            for name, parameter in self.model_runner.model.named_parameters()
            if "layers.0." in name and ".experts" in name and parameter.dim() == 3
        ]
        return sum(sizes)
