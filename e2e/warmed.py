# SPDX-License-Identifier: Apache-2.0
"""A worker that warms up as vLLM does on a device, and notes for which arguments Triton
would compile a kernel: until the warm-up is over, and for requests after it.

Lives inside an installed vLLM, as `recording.py`. Nothing compiles here: the
interpreter is asked to, or runs the kernel.
"""

from typing import Any

from triton.runtime import interpreter as triton_interpreter

from e2e import recording
from emulated_xpu.worker import EmulatedXpuWorker

Compilation = tuple[Any, ...]


class WarmedWorker(recording.RecordingWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        note_compilations()
        super().load_model(*args, **kwargs)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's own, which the emulated worker leaves out."""
        recording.idle = recording.stopped = True
        times = super(EmulatedXpuWorker, self).compile_or_warm_up_model()
        recording.idle = recording.stopped = False
        recording.warmed.update(recording.compiled)
        return times


def note_compilations() -> None:
    """Note what each launch compiles."""
    run = triton_interpreter.InterpretedFunction.run

    def run_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        recording.compiled.add(compilation(self, values))
        return run(self, *args, **kwargs)

    triton_interpreter.InterpretedFunction.run = run_and_note


def compilation(kernel: Any, values: dict[str, Any]) -> Compilation:
    """What Triton compiles a kernel for: its constants and options, dtypes and
    alignment of tensors, and whether a number is 1 or a multiple of 16."""
    notes = kernel.fn.__annotations__
    any_number = kernel.kwargs.get("do_not_specialize") or ()
    any_place = kernel.kwargs.get("do_not_specialize_on_alignment") or ()
    found: list[Any] = []
    for name, value in sorted(values.items()):
        if name in ("grid", "warmup"):
            continue
        if hasattr(value, "data_ptr"):
            aligned = name in any_place or value.data_ptr() % 16 == 0
            found.append((name, str(value.dtype), aligned))
        elif name not in kernel.arg_names or "constexpr" in str(notes.get(name)):
            found.append((name, str(value)))
        elif isinstance(value, float):
            found.append((name, "float"))
        elif isinstance(value, int) and not isinstance(value, bool):
            kind = 16 if value % 16 == 0 else value == 1
            found.append((name, None if name in any_number else kind, value >= 2**31))
        else:
            found.append((name, str(value)))
    return f"{kernel.fn.__module__}.{kernel.fn.__qualname__}", *found
