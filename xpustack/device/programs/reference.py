# SPDX-License-Identifier: Apache-2.0
"""`reference.py TWIN JOB FILE`: Hugging Face's float32 model, on the CPU.

JOB is a list of texts; of each, what the model would add after every token, and by how
much its best logit leads.
"""

import json
import sys
from pathlib import Path


def main(twin: str, job: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        twin, dtype=torch.float32, attn_implementation="eager"
    )
    model.train(False)
    answers = []
    for text in json.loads(job.read_text()):
        with torch.no_grad():
            logits = model(torch.tensor([text])).logits[0]
        best = logits.topk(2)
        lead = best.values[:, 0] - best.values[:, 1]
        answers.append({"next": best.indices[:, 0].tolist(), "lead": lead.tolist()})
        print("one text compared", flush=True)
    target.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
