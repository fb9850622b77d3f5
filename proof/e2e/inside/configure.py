# SPDX-License-Identifier: Apache-2.0
"""`python -m proof.e2e.inside.configure JOB ANSWER` configures servers.

JOB has the arguments of `vllm serve` by name. The release's own parser reads them, and
its engine's configuration is built of them, up to the platform's checks; no worker
starts and no weight is read. ANSWER has how each ended: "" or the message.
"""

import standins.emulated_xpu.pytest_plugin  # noqa: F401, I001 (before torch and vllm)

import contextlib
import importlib
import io
import json
import os
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any


def ends(commands: dict[str, list[str]]) -> dict[str, str]:
    """How each command ended, in a process of its own: a configuration changes the
    environment, and the first imports what all of them need."""
    registry: Any = importlib.import_module("vllm.model_executor.models.registry")
    registry._run_in_subprocess = lambda look: look()
    before = dict(os.environ)
    for given in commands.values():
        if not end(given):
            break
    os.environ.clear()
    os.environ.update(before)
    return {name: forked(given) for name, given in commands.items()}


def forked(given: list[str]) -> str:
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if not child:
            pickle.dump(end(given), file)
            file.flush()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        file.seek(0)
        return str(pickle.load(file)) if not status else f"exit status {status}"


def end(given: list[str]) -> str:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            configure(given)
    except SystemExit:
        return said.getvalue()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def configure(given: list[str]) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.common.cli_args import (
        make_arg_parser,
        validate_parsed_serve_args,
    )
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    validate_parsed_serve_args(parsed)
    parsed.model = parsed.model_tag
    engine = AsyncEngineArgs.from_cli_args(parsed)
    engine.create_engine_config(UsageContext.OPENAI_API_SERVER)


if __name__ == "__main__":
    job, answer = map(Path, sys.argv[1:])
    answer.write_text(json.dumps(ends(json.loads(job.read_text()))))
