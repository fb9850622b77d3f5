# SPDX-License-Identifier: Apache-2.0
"""The server of builds and step tests: what it has imported before one runs in a fork
of it."""

from stack.core.process import Runner
from stack.forks.server import Server
from stack.steptest.environment import NO_DEVICE, OFFLINE

_QUICK_TO_COMPILE = {
    "TORCHINDUCTOR_VEC_ISA_OK": "0",
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
}
"""torch.compile's code for a CPU runs once here: without vector instructions, for which
six programs would ask the machine, and without a header that is compiled ahead. A first
compilation takes 6 s instead of 20."""
ENVIRONMENT = {
    **OFFLINE,
    **NO_DEVICE,
    **_QUICK_TO_COMPILE,
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
}
"""Variables that torch and the like read on import; each run has them too."""
PRELOADED = (
    "numpy",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.lowering",
    "torch.utils.cpp_extension",
    "triton",
    "triton.language",
    "triton.experimental.gluon",
    "triton.runtime.interpreter",
    "transformers",
    "transformers.modeling_utils",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.whisper.tokenization_whisper",
    "transformers.video_processing_utils",
    "pytest",
    "_pytest._argcomplete",
    "_pytest.debugging",
    "_pytest.faulthandler",
    "_pytest.helpconfig",
    "_pytest.junitxml",
    "_pytest.pastebin",
    "_pytest.setuponly",
    "_pytest.setupplan",
    "_pytest.skipping",
    "_pytest.threadexception",
    "_pytest.tracemalloc",
    "_pytest.unittest",
    "_pytest.unraisableexception",
    "_pytest.warnings",
    "aiohttp",
    "cbor2",
    "compressed_tensors",
    "cpuinfo",
    "einops",
    "fastapi",
    "llguidance",
    "msgspec",
    "openai",
    "openai.types.responses",
    "openai_harmony",
    "partial_json_parser",
    "prometheus_client",
    "psutil",
    "pydantic",
    "pydantic.dataclasses",
    "regex",
    "requests",
    "safetensors.torch",
    "setuptools.build_meta",
    "uvloop",
    "xgrammar",
    "zmq",
)
"""Modules that vLLM, or its build, would import in each run. If one cannot be imported
here, the runs meet the same error themselves."""


def warm_server(runner: Runner) -> Server:
    """One warm process for a whole run of checks."""
    return Server(runner, PRELOADED, ENVIRONMENT)
