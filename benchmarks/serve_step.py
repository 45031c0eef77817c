"""What isoloss-serve adds to the engine: a step, many completions at once, and the memory of requests that wait.

    python benchmarks/serve_step.py [--out serve_step.json] [--passes 5] [key=value ...]

One rank of the shipped small model (2M parameters) by default; the words are keys of the server. Server and engine take
turns, each in processes of its own, with one thread a rank; the least seconds of each count.

step: forward_backward of 32 sequences of 256 tokens and optim_step, sent together, until both are answered. The engine
    computes the same samples by forward_backward and optim_step of an adapter of the same shape.
completions: 256 requests for one completion each, of one prompt length, against one batch of 256 on the engine.
waiting: resident memory of the front before and after 10,000 requests that cannot begin.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import torch

from isoloss.engine.rl.backends.local.megatron_backend import MegatronBackend
from isoloss.engine.rl.backends.protocol import all_done
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.engine.step.engine import Engine
from isoloss.models.lora.config import LoraConfig
from isoloss.recipes import launch
from isoloss.tools.prove.serve import wire
from isoloss.tools.prove.serve.connection import Connection
from isoloss.tools.prove.serve.server import Server
from isoloss.tools.prove.serve.session import Call, Datum
from isoloss.tools.serve.config import ServeConfig
from isoloss.tools.serve.ranks.losses import loss_of
from isoloss.tools.serve.ranks.samples import to_sample
from isoloss.tools.serve.wire import Datum as SentDatum

SEQUENCES, LENGTH = 32, 256
COMPLETIONS, PROMPT, NEW = 256, 32, 64
WAITING = 10_000
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
SHAPE = {"rank": 32, "seed": 0, "train_unembed": False}
TARGETS = ("attention", "mlp")


class Client:
    """A training client of the server, by the server's own bytes."""

    def __init__(self, server: Server, name: str):
        self.connection, self._seq, self._samples = Connection(server.url, server.key), 0, 0
        self.session = self.connection.post("create_session", {})["session_id"]
        asked = {"session_id": self.session, "model_seq_id": 0, "base_model": name, "lora_config": SHAPE}
        self.model = self._result("create_model", asked)["model_id"]

    def step(self, call: Call) -> float:
        """Return the loss of a step."""
        passed = self.connection.post("forward_backward", wire.call_body(call, self.model, self._next()))
        stepped = self.connection.post("optim_step", {**self._numbered(), "adam_params": ADAM})
        found = wire.call_numbers([self.connection.result(passed["request_id"])])
        self.connection.result(stepped["request_id"])
        return float(found["loss"])

    def sampler(self) -> str:
        return self._result("save_weights_for_sampler", {**self._numbered(), "sampling_session_seq_id": 0})[
            "sampling_session_id"
        ]

    def complete(self, sampler: str, prompts: Sequence[Sequence[int]]) -> int:
        """Return the number of tokens of completions that are asked for at once."""
        first = self._samples
        self._samples += len(prompts)

        def one(k: int) -> int:
            body = {
                "sampling_session_id": sampler,
                "seq_id": first + k,
                "prompt": {"chunks": [{"tokens": list(prompts[k])}]},
                "sampling_params": {"max_tokens": NEW, "stop": []},
            }
            future = self.connection.post("asample", body)["request_id"]
            answer = wire.messages.new("SampleResponse")
            answer.ParseFromString(self.connection.result(future))
            return sum(len(each.tokens) // 4 for each in answer.sequences)

        with ThreadPoolExecutor(COMPLETIONS) as threads:
            return sum(threads.map(one, range(len(prompts))))

    def wait_behind(self, call: Call, count: int) -> None:
        """Let requests wait for one that never comes."""
        self._next()
        with ThreadPoolExecutor(4) as threads:
            bodies = (wire.call_body(call, self.model, self._next()) for _ in range(count))
            for _ in threads.map(lambda body: self.connection.post("forward_backward", body), bodies):
                pass

    def _result(self, path: str, body: dict) -> dict:
        return json.loads(self.connection.result(self.connection.post(path, body)["request_id"]))

    def _numbered(self) -> dict:
        return {"model_id": self.model, "seq_id": self._next()}

    def _next(self) -> int:
        self._seq += 1
        return self._seq


def seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def data(vocab_size: int) -> Call:
    draw, rows = np.random.default_rng(0), []
    for _ in range(SEQUENCES):
        tokens = draw.integers(3, vocab_size, LENGTH + 1)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(LENGTH, np.float32)}
        rows.append(Datum(tokens[:-1].tolist(), inputs))
    return Call(rows, "cross_entropy")


def measure(words: Sequence[str], passes: int, folder: Path) -> dict[str, float]:
    config, *_ = launch.compose_config("serve", ServeConfig, words)
    base = Engine(config.of_engine())
    engine = base.adapter(LoraConfig(rank=SHAPE["rank"], seed=SHAPE["seed"], targets=TARGETS))
    call = data(engine.arch.vocab_size)
    samples = [
        to_sample(SentDatum(np.array(each.tokens), each.inputs), ("weights",), str(k))
        for k, each in enumerate(call.data)
    ]
    draw = np.random.default_rng(1)
    prompts = draw.integers(3, engine.arch.vocab_size, (COMPLETIONS, PROMPT)).tolist()
    backend = MegatronBackend(engine, COMPLETIONS)

    def step() -> float:
        loss = engine.forward_backward(samples, loss_of("cross_entropy", {})).loss
        engine.optim_step(ADAM["learning_rate"], betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, clip=0.0)
        return loss

    def complete() -> None:
        backend.update_weights((), 0)
        rules = Sampling(NEW)
        futures = [backend.submit(Request(str(k), tuple(prompt)), rules) for k, prompt in enumerate(prompts)]
        backend.serve(all_done(futures))

    with Server(words, folder / "serve") as server:
        server.wait_ready()
        client = Client(server, config.name)
        assert client.step(call) == step(), "server and engine compute another loss"
        times: dict[str, list[float]] = {"engine step": [], "server step": [], "engine 256": [], "server 256": []}
        for _ in range(passes):
            times["engine step"].append(seconds(step))
            times["server step"].append(seconds(lambda: client.step(call)))
        sampler = client.sampler()
        assert client.complete(sampler, prompts[:2]) == 2 * NEW
        for _ in range(passes):
            times["engine 256"].append(seconds(complete))
            times["server 256"].append(seconds(lambda: client.complete(sampler, prompts)))
        front = next(
            each
            for each in psutil.Process(server.pid).children()
            if "isoloss.tools.serve.front" in " ".join(each.cmdline())
        )
        small = Call(call.data[:4], "cross_entropy")
        client.wait_behind(small, 100)
        before = front.memory_info().rss
        client.wait_behind(small, WAITING)
        grown = front.memory_info().rss - before
    found = {name: min(of) for name, of in times.items()}
    return {
        **found,
        "step: server / engine": found["server step"] / found["engine step"],
        "256 completions: server / engine": found["server 256"] / found["engine 256"],
        "front, MB before": before / 1e6,
        "front, MB more with 10,000 waiting": grown / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("words", nargs="*", metavar="key=value", default=["preset=tiny"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(arguments.words, arguments.passes, Path(folder))
    for name, value in found.items():
        print(f"{name:40} {value:10.3f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps({"torch": torch.__version__, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
