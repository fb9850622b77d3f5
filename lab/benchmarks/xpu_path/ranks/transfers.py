# SPDX-License-Identifier: Apache-2.0
"""`python -m lab.benchmarks.xpu_path.ranks.transfers ORDER RESULT`: one engine reads
prompts and another answers them from pages that NIXL brings, on two GPUs. With `ranks`,
of both engines, one of two has both GPUs.

RESULT has what `proof.e2e.inside.transfer` finds of each prompt. Exits with 1 if a byte
or an answer is wrong. With `killed`, the process that reads is killed "before" the
transfer of a second prompt, or "within" it; RESULT has what the other does with it and
with a third.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from lab.benchmarks.xpu_path.written import folder_of
from proof.e2e.inside import transfer
from proof.e2e.judging.transfers import check_answer, check_pages
from proof.e2e.running.asked import ENGINE, LONG, Asked, on_ranks

LOOPBACK = "127.0.0.1"
PATIENCE = 60.0
"""Seconds for an answer."""
KILLED = "the sender was killed"
BEFORE, WITHIN = "before", "within"
IN_FLIGHT = "PROC"
"""NIXL's word for a transfer that has begun and not ended."""
TRANSPORTS = {BEFORE: "tcp,cma,self,cuda_copy,cuda_ipc", WITHIN: "tcp,self,cuda_copy"}
"""UCX's. A copy by the receiver alone would end without the sender."""


def order_of(told: dict[str, Any]) -> dict[str, Any]:
    """What `proof.e2e.inside.transfer` reads, of the job that `told` describes."""
    model = folder_of({"checkpoint": LONG}, Path())
    asked = [Asked(**given) for given in told["asked"]]
    reading, answering = map(on_ranks, told.get("ranks", (1, 1)))
    return {
        "model": model,
        "engine": {**ENGINE, **told["engine"]},
        "kv_producer": reading,
        "kv_consumer": answering,
        "transfer": {"kv_connector": "NixlConnector", **told["transfer"]},
        "splits_keys": False,
        "packages": told.get("packages", []),
        "prompts": [one.order(number) for number, one in enumerate(asked)],
    }


def listen_at(gpus: str, killed: str) -> dict[str, str]:
    """The environment of one engine: its GPU is the first of `gpus`."""
    with socket.socket() as opened:
        opened.bind((LOOPBACK, 0))
        port = opened.getsockname()[1]
    return {
        "CUDA_VISIBLE_DEVICES": gpus,
        "UCX_NET_DEVICES": "lo",
        "UCX_TLS": TRANSPORTS[killed],
        "VLLM_NIXL_SIDE_CHANNEL_HOST": LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
    }


def read_prompts(order: dict[str, Any], pipe: Connection) -> None:
    """The first engine, in a process of its own; never returns."""
    status = 1
    try:
        transfer.send(order, pipe)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def kill_at_a_transfer(agent: Any, sender: int, killed: str) -> list[str]:
    """Kill the process `sender` once: after the handshake and before NIXL's `agent`
    begins to read, or as soon as it has. Returns where the state of the transfer will
    be, right before the sender dies within it."""
    begin = agent.transfer
    states: list[str] = []

    def kill_and_begin(*args: Any, **kwargs: Any) -> Any:
        agent.transfer = begin
        if killed == WITHIN:
            states.append(begin(*args, **kwargs))
        os.kill(sender, signal.SIGKILL)
        os.waitpid(sender, 0)
        return states[0] if states else begin(*args, **kwargs)

    agent.transfer = kill_and_begin
    return states


def without_its_sender(
    order: dict[str, Any], pipe: Connection, sender: int, killed: str
) -> list[dict[str, Any]]:
    """Three prompts: fetched; fetched from a sender that dies; and read by this engine
    itself."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    receiver = transfer.Receiver(order)
    states: list[str] = []
    first, second, third = order["prompts"]
    found = []
    for number, prompt in enumerate((first, second)):
        pipe.send(prompt)
        read = pipe.recv()
        if number:
            agent: Any = get_kv_transfer_group().connector_worker.nixl_wrapper
            states = kill_at_a_transfer(agent, sender, killed)
        output = receiver.fetch(prompt, read)
        found.append(ended(output) | {"alone": read["alone"], "states": states})
    output = receiver.ask(third, new=third["new"], alone=False)
    return [*found, ended(output) | {"alone": None}]


def ended(output: Any) -> dict[str, Any]:
    """How a request ended, and its tokens."""
    (given,) = output.outputs
    return {"reason": given.finish_reason, "tokens": list(given.token_ids)}


def check_without_its_sender(
    found: list[dict[str, Any]], policy: str, killed: str
) -> None:
    """The first is right; the second is refused or right, as the policy says, and
    never wrong, and was in flight if the sender died within it; the third is answered.

    Raises:
        AssertionError: one is not so.
    """
    first, second, third = found
    assert first["tokens"] == first["alone"]["tokens"], first
    if second["reason"] == "error":
        assert policy == "fail", "the prompt was to be read again"
    else:
        assert second["tokens"] == second["alone"]["tokens"], second
    assert third["reason"] == "length", third
    wanted = [IN_FLIGHT] if killed == WITHIN else []
    assert second["states"] == wanted, f"the copy was {second['states']}"


def main() -> None:
    """Serve one job by this process and one that it forks."""
    told = json.loads(Path(sys.argv[1]).read_text())
    result = Path(sys.argv[2])
    order = order_of(told)
    transfer.PATIENCE = PATIENCE
    killed = told.get("killed", BEFORE)
    ours, theirs = multiprocessing.Pipe()
    if not (sender := os.fork()):
        ours.close()
        os.environ.update(listen_at("0,1", killed))
        read_prompts(order, theirs)
    theirs.close()
    os.environ.update(listen_at("1,0", killed))
    asked = [Asked(**given) for given in told["asked"]]
    if "killed" in told:
        found = without_its_sender(order, ours, sender, killed)
        result.write_text(json.dumps(found, indent=1))
        policy = told["transfer"].get("kv_load_failure_policy", "fail")
        print(KILLED, found[1]["reason"], found[1]["tokens"])
        check_without_its_sender(found, policy, killed)
    else:
        transfer.receive(order, ours, result)
        os.waitpid(sender, 0)
        served = json.loads(result.read_text())
        for got, one in zip(served, asked, strict=True):
            check_pages(got, one)
            if one.answered:
                check_answer(got, told["bound"])
    # Threads of NIXL may wait for the dead.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
