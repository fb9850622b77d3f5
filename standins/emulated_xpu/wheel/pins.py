# SPDX-License-Identifier: Apache-2.0
"""Which version of vllm-xpu-kernels the installed vLLM pins, and its op schemas."""

import os
import re
from importlib import metadata
from pathlib import Path

SCHEMAS = Path(__file__).parents[1] / "schemas"
OVERRIDE = "EMULATED_XPU_KERNELS"
"""The environment variable that overrides the version of the installed wheel."""

_REQUIREMENT = re.compile(r"vllm[-_]xpu[-_]kernels\b")
_VERSION = re.compile(r"(?:==|vllm_xpu_kernels-)\s*(\d+(?:\.\d+)+)")


def kernels_version() -> str:
    """The version that the installed vLLM wheel requires, from its own metadata.

    Raises:
        LookupError: no XPU wheel of vLLM is installed, or it names no version.
    """
    if version := os.environ.get(OVERRIDE):
        return version
    try:
        requirements = metadata.requires("vllm") or []
    except metadata.PackageNotFoundError:
        raise LookupError(
            f"vllm is not installed: install an XPU wheel or set {OVERRIDE}"
        ) from None
    for requirement in requirements:
        if _REQUIREMENT.match(requirement) and (match := _VERSION.search(requirement)):
            return match[1]
    raise LookupError(
        f"vllm {metadata.version('vllm')} names no version of vllm_xpu_kernels:"
        f" it is no XPU wheel; set {OVERRIDE}"
    )


def schemas(version: str) -> dict[str, str]:
    """Schema text by qualified op name, `{"_C::silu_and_mul": "silu_and_mul(...)"}`.

    An overload keeps its suffix in the name. A schema that is listed twice counts once.

    Raises:
        LookupError: there is no file of that version's schemas.
    """
    path = SCHEMAS / f"{version}.txt"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in SCHEMAS.glob("*.txt")))
        raise LookupError(f"no schemas of vllm_xpu_kernels {version}; known: {known}")
    by_name: dict[str, str] = {}
    for line in path.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            namespace, schema = line.split("::", 1)
            by_name[f"{namespace}::{schema.partition('(')[0]}"] = schema
    return by_name
