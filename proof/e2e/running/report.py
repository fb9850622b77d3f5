# SPDX-License-Identifier: Apache-2.0
"""What an engine executed, in lines for people."""

from collections.abc import Iterator

from proof.e2e.running.serving import Served

OWN = "vllm.model_executor.kernels.xpu_dsv4."


def lines_about(served: Served) -> Iterator[str]:
    """Layers, XPU ops and Triton kernels with how often each ran."""
    answer = served.answer
    yield (
        f"{served.seconds:.0f} s, of CPU {answer['cpu_seconds']:.0f} s:"
        f" {answer['seconds_to_ready']:.0f} s to start,"
        f" {answer['seconds_to_serve']:.0f} s to serve by {answer['runner']}"
    )
    yield "layers executed:"
    yield from (f"  {count:7d}  {name}" for name, count in _sorted(answer["layers"]))
    yield "XPU ops called:"
    yield from (f"  {count:7d}  {name}" for name, count in _sorted(answer["ops"]))
    yield "Triton kernels launched (ours marked *), programs, CPU s:"
    for name, count in _sorted(answer["launches"]):
        mark = "*" if name.startswith(OWN) else " "
        short = name.removeprefix(OWN).removeprefix("vllm.")
        programs, seconds = answer["programs"][name], answer["seconds"][name]
        yield f"{mark} {count:7d}  {programs:8d} {seconds:7.1f}  {short}"


def _sorted(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
