# SPDX-License-Identifier: Apache-2.0
"""`reference TWIN JOB FILE`: Hugging Face's model on the CPU, the twin of `e2e`.

JOB is a list of texts. FILE gets, for each text, the token that the model would add
after every token, or -1 where the roundings of the releases change it, and the least
lead of its logit.
"""

import json
import sys
from pathlib import Path

from proof.e2e.twins.twin import Roundings, Twin


def main(folder: Path, job: Path, target: Path) -> None:
    twin = Twin(folder)
    made = [
        Roundings(activations=a, output_fp8=o)
        for a, o in ((True, True), (True, False), (False, True), (False, False))
    ]
    answers = []
    for text in json.loads(job.read_text()):
        found = []
        for roundings in made:
            with twin.rounded(roundings):
                found.append(twin.logits(text).topk(2))
        first = [best.indices[:, 0].tolist() for best in found]
        leads = [(best.values[:, 0] - best.values[:, 1]).tolist() for best in found]
        answers.append(
            {
                "next": [
                    tokens[0] if len(set(tokens)) == 1 else -1
                    for tokens in zip(*first, strict=True)
                ],
                "lead": [min(lead) for lead in zip(*leads, strict=True)],
            }
        )
        print("one text compared", flush=True)
    target.write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
