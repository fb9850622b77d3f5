# SPDX-License-Identifier: Apache-2.0
"""What a release makes of a checkpoint: it serves it, refuses it, or gets it wrong."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from proof.e2e.checkpoints import dspark, mtp, v41, vision
from proof.e2e.judging.checks import EXPERTS, PLAIN, TIGHT, check_same_tokens
from proof.e2e.judging.drafts import check_drafts, successors
from proof.e2e.judging.endings import Verdict, ended
from proof.e2e.pictures import Picture
from proof.e2e.running.serving import Engines, EngineStopped, Job, Prompt, Served
from proof.e2e.twins.comparison import (
    attention_errors,
    feed_forward_errors,
    logits_by_request,
    relative,
)
from proof.e2e.twins.twin import Reference, Roundings

ACTIVATIONS_IN_FP4 = 0.25
"""How far e2m1 activations, of at most three significant bits, move the experts."""
ACTIVATIONS_IN_FP8 = 0.06
"""How far e4m3 activations, of at most four significant bits, move the experts."""
WAVES = ((Prompt(72, 6, seed=1), Prompt(5, 4, seed=2)),)
FLASH = Job("flash", WAVES)
VISION = Job(
    "format vision",
    ((*WAVES[0], Prompt(9, 4, seed=3, images=(Picture(4, 7, 10),))),),
    vision.ENGINE,
    checkpoint="vision",
)
MTP = {"method": "mtp", "num_speculative_tokens": 1}
DRAFTS = {"method": "dspark", "num_speculative_tokens": dspark.BLOCK}


@dataclass(frozen=True)
class Format:
    """A kind of checkpoint, how it is served, and what is asked of it."""

    what: str
    job: Job
    experts: float = EXPERTS
    judge: Callable[[Engines, str, "Format"], Verdict] | None = None

    @property
    def first(self) -> tuple[Job, ...]:
        """What can be served before anything else is known."""
        if self.judge is None:
            return (self.job,)
        return (FLASH,) if self.job.checkpoint else (FLASH, self.job)


def verdict(engines: Engines, release: str, form: Format) -> Verdict:
    """Serve the format and judge what came out."""
    try:
        return (form.judge or figures)(engines, release, form)
    except EngineStopped as stop:
        return ended(str(stop))


def figures(engines: Engines, release: str, form: Format) -> Verdict:
    """Every layer and the logits against the float32 twin."""
    return of_twin(engines.serve(release, form.job), twin_of(engines, form), form)


def twin_of(engines: Engines, form: Format) -> Reference:
    return engines.twin_of(form.job.checkpoint)


def of_twin(result: Served, twin: Reference, form: Format) -> Verdict:
    """Figures; a rejected draft leaves experts whose token is not in the text, so
    theirs are not compared with drafts."""
    twin.look_at(result)
    roundings = Roundings.of(result.answer)
    attention = attention_errors(result.answer, twin, roundings)
    experts = 0.0
    if form.judge is None:
        experts = max(feed_forward_errors(result.answer, twin, roundings).values())
    core = max(error.core for error in attention)
    output = max(error.output for error in attention)
    ours: list[torch.Tensor] = []
    exact: list[torch.Tensor] = []
    for request, found in logits_by_request(result.answer).items():
        wanted = twin.logits(result.texts[request])
        ours += found.values()
        exact += [wanted[position] for position in found]
    logits = relative(torch.stack(ours), torch.stack(exact))
    shown = {"attention": core, "output": output, "logits": logits}
    if form.judge is None:
        shown["experts"] = experts
    why = ", ".join(f"{name} {100 * value:.2g} %" for name, value in shown.items())
    right = max(core, output) <= TIGHT and experts <= form.experts
    # FP4 activations move whole layers, and the logits with them.
    right &= logits <= (PLAIN if form.experts == EXPERTS else 1.0)
    return Verdict("serves" if right else "wrong", why)


def speculation(engines: Engines, release: str, form: Format) -> Verdict:
    """Drafts are made, and the tokens are those without them."""
    plain = engines.serve(release, FLASH)
    known = successors(plain)
    config = dict(form.job.engine)["speculative_config"]
    writer = mtp.Mtp if config is MTP else dspark.DSpark
    engines.add_checkpoint(form.job.checkpoint, writer(0, known))
    drafted = engines.serve(release, form.job)
    try:
        check_same_tokens(drafted, plain)
        says = mtp.says_after(known) if config is MTP else known.get
        check_drafts(drafted, says, config["num_speculative_tokens"])
    except AssertionError as error:
        return Verdict("wrong", f"other tokens or drafts than expected: {error}")
    found = of_twin(drafted, twin_of(engines, form), form)
    steps, without = (len(steps_of(one)) for one in (drafted, plain))
    if steps >= without:
        return Verdict("wrong", f"no draft was accepted in {steps} steps")
    return Verdict(found.kind, f"{found.why}; {steps} steps, {without} without drafts")


def steps_of(result: Served) -> list[list[int]]:
    """Of each step, how many tokens each request brought to the target."""
    return [
        [count for _, count in record["rows"]]
        for record in result.answer["records"]
        if (record["layer"], record["part"]) == (0, "attn")
    ]


def _packed(name: str, what: str, experts: float = EXPERTS) -> Format:
    return Format(what, Job(f"format {name}", WAVES, checkpoint=name), experts)


def _drafting(name: str, config: dict[str, Any], what: str) -> Format:
    engine = (("speculative_config", config),)
    job = Job(f"format {name}", WAVES, engine, checkpoint=f"{name} drafts")
    return Format(what, job, judge=speculation)


FORMATS: dict[str, Format] = {
    "flash": Format("Flash, FP8 and MXFP4", FLASH),
    "pro": _packed("pro", "Pro, FP8 and MXFP4"),
    "nvfp4-experts": _packed("nvfp4-experts", "experts in NVFP4", ACTIVATIONS_IN_FP4),
    "int4": _packed("int4", "W4A16 by AutoRound"),
    "base": _packed("base", "Base, experts in FP8"),
    "fp8-e8m0": _packed("fp8-e8m0", "FP8 experts, E8M0 scales"),
    "fp32-scales": _packed("fp32-scales", "fp32 scales beside MXFP4"),
    "fp8-rows": _packed("fp8-rows", "FP8 by rows", ACTIVATIONS_IN_FP8),
    "fp8-blocks": _packed("fp8-blocks", "FP8 in blocks", ACTIVATIONS_IN_FP8),
    "gptq": _packed("gptq", "W4A16 by GPTQ"),
    "mxfp4-experts": _packed("mxfp4-experts", "MXFP4 beside BF16"),
    "bf16": _packed("bf16", "BF16"),
    "mtp": _drafting("mtp", MTP, "Flash with MTP"),
    "dspark": _drafting("dspark", DRAFTS, "Flash with DSpark"),
    "v4.1": Format("V4.1", Job("format v4.1", WAVES, v41.SERVER, checkpoint="v4.1")),
    "vision": Format("V4 Vision", VISION),
}
