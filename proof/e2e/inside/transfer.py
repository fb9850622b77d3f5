# SPDX-License-Identifier: Apache-2.0
"""`python -m proof.e2e.inside.transfer ORDER RESULT` serves prompts by
two engines, a process each, with those of its ranks: one reads a prompt, the other
fetches its pages and answers it.

ORDER names the checkpoint, the arguments of the engines, of both and of each, and the
prompts. RESULT holds, by prompt, what `Receiver.answer` gives.
"""

import importlib
import json
import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

engine: Any = importlib.import_module("proof.e2e.inside.engine")
pages: Any = importlib.import_module("proof.e2e.inside.pages")

READ = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a proxy asks of the server that reads prompts."""
OTHERS = [7, 8]
"""Tokens with which another prompt goes on."""
PATIENCE = 600.0
"""Seconds for an answer."""
PAUSE = 0.02
"""Seconds between two looks for pages that are fetched."""
Prompt = dict[str, Any]
"""As `pairs.Asked.order` gives it."""


class Side:
    """One of the two engines."""

    role: str
    """Of vLLM's two."""

    def __init__(self, order: dict[str, Any]) -> None:
        sys.path += order["packages"]
        own = {
            **order["engine"],
            **order.get(self.role, {}),
            "kv_transfer_config": {**order["transfer"], "kv_role": self.role},
            "worker_extension_cls": "proof.e2e.inside.pages.RankPages",
        }
        self._llm = engine.start({**order, "engine": own})
        core = self._llm.llm_engine.engine_core.engine_core
        self._scheduler = core.scheduler
        self._most = self._scheduler.max_num_scheduled_tokens
        self._pages = pages.Pages(core)

    def ask(self, prompt: Prompt, *, new: int, alone: bool, **transfer: Any) -> Any:
        """The output of a prompt that is read in chunks of its `chunk` tokens. If
        `alone`, its last token is computed on its own, and of the prefix cache only
        that is read which the sender knows."""
        from vllm import SamplingParams

        llm_engine = self._llm.llm_engine
        known = prompt["sender_knows"]
        chosen = SamplingParams(
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            logprobs=-1,
            skip_reading_prefix_cache=alone and not transfer and not known,
            max_tokens=new,
            extra_args={"kv_transfer_params": transfer} if transfer else None,
        )
        name = str(next(self._llm.request_counter))
        llm_engine.add_request(name, {"prompt_token_ids": prompt["tokens"]}, chosen)
        limit = time.monotonic() + PATIENCE
        while time.monotonic() < limit:
            *_, request = self._scheduler.requests.values()
            started = request in self._scheduler.running or request.num_preemptions
            computed = request.num_computed_tokens if started else known
            left = len(prompt["tokens"]) - alone - computed
            chunk = min(prompt["chunk"], left) if alone else prompt["chunk"]
            # What was decoded before a pre-emption is decoded again, token by token.
            most = chunk if chunk > 0 else 1 if request.num_preemptions else self._most
            self._scheduler.max_num_scheduled_tokens = most
            for output in llm_engine.step():
                if output.finished:
                    return output
            self.after_step(prompt, request)
            if request not in self._scheduler.running:
                # NIXL's threads come last, and it waits for them.
                time.sleep(PAUSE)
        raise AssertionError(f"no output of request {name} in {PATIENCE} s")

    def after_step(self, prompt: Prompt, request: Any) -> None:
        """Look at what a step left."""

    def learn(self, prompt: Prompt, count: int) -> None:
        """Read a prompt's first `count` tokens, if any, and others behind them."""
        if count:
            tokens = prompt["tokens"][:count] + OTHERS
            known = {**prompt, "tokens": tokens, "sender_knows": 0}
            self.ask(known, new=1, alone=False)


class Sender(Side):
    """Reads prompts."""

    role = "kv_producer"

    def read(self, prompt: Prompt) -> dict[str, Any]:
        """Where a prompt's blocks are, their bytes, and this engine's own answer, for
        which it computes the prompt's last token as a receiver does."""
        self.learn(prompt, prompt["sender_knows"])
        self._pages.poison(pages.SENT)
        read = self.ask(prompt, new=1, alone=False, **READ)
        where = read.kv_transfer_params
        rows = self._pages.rows(where["remote_block_ids"])
        if prompt["overwritten"]:
            self._pages.overwrite(where["remote_block_ids"])
        if not prompt["answered"]:
            return {"where": where, "rows": rows, "alone": None}
        whole = self.ask(prompt, new=prompt["new"], alone=True)
        return {"where": where, "rows": rows, "alone": answer_of(whole)}


class Receiver(Side):
    """Answers prompts from blocks that it fetches."""

    role = "kv_consumer"
    _seen: Any = None
    _taken: tuple[Any, ...] = ()
    _preemptions = 0

    def fetch(self, prompt: Prompt, read: dict[str, Any]) -> Any:
        """The output of a prompt whose blocks come into poisoned memory."""
        self.learn(prompt, prompt["receiver_knows"])
        self._pages.poison(pages.RECEIVED)
        return self.ask(prompt, new=prompt["new"], alone=True, **read["where"])

    def after_step(self, prompt: Prompt, request: Any) -> None:
        """Keep what is there before the next step computes the prompt's last token. If
        a prompt is to be `preempted`, take all blocks that are free, until the request
        is out of its own."""
        for arrived in self._scheduler.finished_recving_kv_req_ids:
            self._seen = self._pages.seen(arrived)
        self._preemptions = request.num_preemptions
        if request.num_preemptions:
            self._pages.give_back(self._taken)
            self._taken = ()
        elif prompt["preempted"] and request in self._scheduler.running:
            self._taken += self._pages.take_free()

    def answer(self, prompt: Prompt, read: dict[str, Any]) -> dict[str, Any]:
        """What came of a prompt: `pages` as `Pages.compared` gives it, tokens and
        log-probabilities, and those of the sender alone."""
        output = self.fetch(prompt, read)
        where = read["where"]
        length = len(prompt["tokens"])
        return {
            "length": length,
            "pages": self._pages.compared(
                self._seen, where["remote_block_ids"], read["rows"], length
            ),
            "cached": output.num_cached_tokens,
            "preemptions": self._preemptions,
            "answer": answer_of(output),
            "alone": read["alone"],
        }


def answer_of(output: Any) -> dict[str, Any]:
    """The new tokens, and for each log-probabilities by token id."""
    (given,) = output.outputs
    return {
        "tokens": list(given.token_ids),
        "logprobs": [
            [place[token].logprob for token in sorted(place)]
            for place in given.logprobs
        ],
    }


def send(order: dict[str, Any], pipe: Connection) -> None:
    """Read what the pipe asks for, until it asks for nothing."""
    sender = Sender(order)
    while prompt := pipe.recv():
        pipe.send(sender.read(prompt))


def receive(order: dict[str, Any], pipe: Connection, answer: Path) -> None:
    """Have each prompt read by the other side of the pipe, and answer it."""
    receiver = Receiver(order)
    found = []
    for prompt in order["prompts"]:
        pipe.send(prompt)
        found.append(receiver.answer(prompt, pipe.recv()))
        answer.write_text(json.dumps(found))
    pipe.send(None)


def main() -> None:
    """Serve the order by this process and one that it forks."""
    order = json.loads(Path(sys.argv[1]).read_text())
    ours, theirs = multiprocessing.Pipe()
    if not (process := os.fork()):
        ours.close()
        # The sender has a port of its own for its side channel.
        os.environ.update(order["sender_environment"])
        status = 1
        try:
            send(order, theirs)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    theirs.close()
    os.environ.update(order["receiver_environment"])
    receive(order, ours, Path(sys.argv[2]))
    os.waitpid(process, 0)


if __name__ == "__main__":
    main()
