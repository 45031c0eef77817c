"""A model for sessions of agents that is a function of what it reads."""

import queue
import threading
from pathlib import Path
from typing import Any

from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.rl.trajectory import Completion, Prompt, Request

SORT = Path(__file__).parents[2] / "recipes" / "assets" / "sort"
TOKENIZER: Any = load_tokenizer(str(SORT), 100_000)
STOP = TOKENIZER.eos_token_id
ROW = Prompt("train.jsonl:1", (1,), ({"role": "user", "content": "go"},), "42", extra={"table": "7"})


class Model:
    """An owner of sessions: a reply is the number of tokens that were read. "never" is not answered."""

    agents: Any

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.withdrawn: list[str] = []
        self.done: queue.Queue[Any] = queue.Queue()

    def request(self, request, max_new_tokens):
        self.asked.append(request)
        text = TOKENIZER.decode(list(request.prompt_tokens))
        if "never" not in text:
            tokens = [*TOKENIZER(str(len(request.prompt_tokens)))["input_ids"], STOP][:max_new_tokens]
            finish = "stop" if tokens[-1] == STOP else "length"
            completion = Completion(request.id, tokens, [-1.0] * len(tokens), [0] * len(tokens), finish)
            threading.Timer(0.01, self.agents.answered, [completion]).start()

    def withdraw(self, name):
        self.withdrawn.append(name)

    def ended(self, trajectory):
        self.done.put(trajectory)

    def failed(self, error):
        self.done.put(error)
