# SPDX-License-Identifier: Apache-2.0
"""A worker that says what its experts read over the link. Lives inside an installed
vLLM, on the GPU."""

# Registers the loader in each rank's process.
import lab.benchmarks.xpu_path.flash  # noqa: F401
from lab.benchmarks.xpu_path.ranks import rank_counts
from standins.emulated_xpu.on_cuda.worker import XpuPathOnCudaWorker


class CountedWorker(XpuPathOnCudaWorker):
    """Counts hits and misses of the caches of experts."""

    def expert_counts(self) -> dict[str, int]:
        """Experts that were in a slot, and those that were read, of all layers."""
        return rank_counts.counted(self.vllm_config, self.model_runner.model)

    def bytes_of_an_expert(self) -> int:
        """Of its part on this rank, as the kernels read it."""
        sizes = [
            parameter[0].numel() * parameter.element_size()
            for name, parameter in self.model_runner.model.named_parameters()
            if "layers.0." in name and ".experts" in name and parameter.dim() == 3
        ]
        return sum(sizes)
