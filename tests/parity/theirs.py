"""mergekit, run as a process of its own: one merge for each line on stdin, one line on stdout when it is done.

A line on stdin is a JSON object: `document` (the YAML text), `out` (the folder to write), `draws` (null, or a file
of numbers in [0, 1)). With draws, `torch.bernoulli` takes the elements whose draw is below their probability; the
file holds an array for each tensor and agent, called `NAME/0`, `NAME/1`, … in the order of the models without the
base. A line on stdout is a JSON object: `error`, null or what mergekit raised.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import numpy as np
import torch
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
from mergekit.merge_methods import generalized_task_arithmetic as arithmetic

OPTIONS = MergeOptions(copy_tokenizer=False, write_model_card=False, quiet=True)


class Draws:
    """Knows which tensor and which agent mergekit is about, and gives the draws for it."""

    def __init__(self) -> None:
        self.file: Any = None
        self.tensor = ""
        self.agent = -1
        method = arithmetic.GeneralizedTaskArithmeticMerge
        merge_group, sparsify, bernoulli = method.merge_group, arithmetic.sparsify, torch.bernoulli

        def of_group(method: Any, group: Any, /, **parameters: Any) -> torch.Tensor:
            self.tensor, self.agent = group.metadata.name, -1
            return merge_group(method, group, **parameters)

        def of_agent(*values: Any, **options: Any) -> torch.Tensor:
            self.agent += 1
            return sparsify(*values, **options)

        def drawn(share: torch.Tensor) -> torch.Tensor:
            if self.file is None:
                return bernoulli(share)
            draws = torch.from_numpy(self.file[f"{self.tensor}/{self.agent}"]).reshape(share.shape)
            return (draws < share).to(share.dtype)

        method.merge_group, arithmetic.sparsify, torch.bernoulli = of_group, of_agent, drawn


def run(draws: Draws, document: str, out: str, file: str | None) -> str | None:
    """One merge: what it raised, or None."""
    draws.file = np.load(file) if file else None
    try:
        run_merge(MergeConfiguration.model_validate(yaml.safe_load(document)), out, OPTIONS)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what else is printed is no reply
    torch.set_num_threads(1)
    draws = Draws()
    for line in sys.stdin:
        job = json.loads(line)
        error = run(draws, job["document"], job["out"], job["draws"])
        print(json.dumps({"error": error}), file=replies, flush=True)


if __name__ == "__main__":
    main()
