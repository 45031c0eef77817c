"""A campaign of faults of reward functions, drawn by a seed. Called by tests, and by whoever wants more of them."""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from isoloss.engine.rl.config import RewardConfig
from isoloss.engine.rl.reward.rewarder import Rewarder
from isoloss.engine.rl.trajectory import Completion, Prompt

# Faults by the words of a completion; "quarter N" earns N / 4. A fork that comes back would answer for its parent.
REWARDS = """
import os, signal, sys, time

class Odd:
    def __float__(self):
        raise RuntimeError("no number")

def stay():
    if os.fork() == 0:
        time.sleep(600)
    return 0.25

def onload():
    os.fork()
    return 0.25

FAULTS = {
    "raise": lambda: 1 / 0,
    "raise without words": lambda: (_ for _ in ()).throw(AssertionError),
    "hang": lambda: time.sleep(600),
    "hang in a child": lambda: os.system("sleep 600"),
    "exit": lambda: sys.exit(0),
    "exit with a status": lambda: os._exit(7),
    "interrupt": lambda: (_ for _ in ()).throw(KeyboardInterrupt),
    "segfault": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "nan": lambda: float("nan"),
    "infinite": lambda: -float("inf"),
    "huge": lambda: 10 ** 400,
    "none": lambda: None,
    "text": lambda: "0.5",
    "a list": lambda: [0.5],
    "a mapping": lambda: {"points": 0.5},
    "complex": lambda: 1j,
    "odd": lambda: Odd(),
}
HARMLESS = {"fork that stays": stay, "fork that comes back": onload}

def reward(completion):
    kind, _, quarters = completion.partition(" #")
    if kind == "quarter":
        return int(quarters) / 4
    return {**FAULTS, **HARMLESS}[kind]()
"""
NAMES: dict[str, Any] = {}
exec(REWARDS.partition("def reward")[0], NAMES)
FAULTS, HARMLESS = tuple(NAMES["FAULTS"]), tuple(NAMES["HARMLESS"])


class Words:
    """A tokenizer whose texts are these, by the number of a token."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def completion(self, text: str) -> Completion:
        self.texts.append(text)
        return Completion(f"t:1/0/{len(self.texts)}", (len(self.texts) - 1,), (-1.0,), (0,), "length")

    def decode(self, tokens: Sequence[int], **_: Any) -> str:
        return self.texts[tokens[0]]


@dataclass
class Found:
    """faults: injected, by kind. errors: completions whose reward failed. wrong: rewards that are not what they should
    be, one line each. slowest: seconds of a batch for each second that its faults may take. left: processes."""

    faults: Counter[str] = field(default_factory=Counter)
    errors: int = 0
    expected: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest: float = 0.0
    left: list[psutil.Process] = field(default_factory=list)


def campaign(seed: int, faults: int, folder: Path, timeout: float = 1.0) -> Found:
    """So many faults among rewards that can be had, in batches; each completion's reward is known."""
    chance, found, words = random.Random(seed), Found(), Words()
    (folder / "rewards_with_faults.py").write_text(REWARDS)
    config = RewardConfig(function=(f"{folder}/rewards_with_faults.py:reward",), timeout=timeout, workers=2)
    prompt, before = Prompt("t:1", (1,), "?"), set(psutil.Process().children(recursive=True))
    with Rewarder(config, words, [prompt]) as rewarder:
        left = faults
        while left > 0:
            count = min(left, chance.randrange(1, 9))
            left -= count
            kinds = [chance.choice((*FAULTS, *HARMLESS)) for _ in range(count)]
            texts = kinds + [f"quarter #{chance.randrange(5)}" for _ in range(8)]
            chance.shuffle(texts)
            began = time.monotonic()
            scored = rewarder.score([prompt] * len(texts), [words.completion(text) for text in texts])
            slow = sum(kind.startswith("hang") for kind in kinds)
            found.slowest = max(found.slowest, (time.monotonic() - began) / (1 + slow * timeout))
            found.faults.update(kinds)
            found.errors += sum(each.error is not None for each in scored)
            found.expected += sum(kind in FAULTS for kind in kinds)
            for text, each in zip(texts, scored, strict=True):
                kind, _, quarters = text.partition(" #")
                should = int(quarters) / 4 if quarters else 0.25 if kind in HARMLESS else None
                is_right = each.error is not None and each.reward != each.reward if should is None else (
                    each.error is None and each.reward == should
                )  # fmt: skip
                if not is_right or each.text != text:
                    found.wrong.append(f"{text}: {each}")
        started = set(psutil.Process().children(recursive=True)) - before
    psutil.wait_procs(started, timeout=30)
    found.left = [process for process in started if process.is_running()]
    return found
