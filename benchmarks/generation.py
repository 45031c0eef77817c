"""Generation in process on one CPU thread, against transformers' generate and against its matrix products alone.

    OMP_NUM_THREADS=1 python benchmarks/generation.py [--out generation.json] [--passes 3] [--rows 0 1]

The model of `sft_step.py` (27.5M), fp32, sampled at temperature 1; 8 completions of each prompt, none of which ends
early. CPU seconds of all of it, prompts included, the least of interleaved passes.

megatron, transformers: rollout.backend, as the trainer calls it. A prompt is read once.
generate, generate static: transformers' own, all rows in one batch, with a cache that grows and with a static one.
products: the floor. The products of matrices that megatron needs, by torch.mm: all of each prompt once, then of all
    rows for each token.

All must choose the same tokens at temperature 0 before a figure is printed.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from rl_step import write_model
from sft_step import M27
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig

from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import Config
from isoloss.engine.rl.backends.local.continuous_batching import ActiveSequence, Decoder, RowScheduler
from isoloss.engine.rl.backends.local.megatron_backend import MegatronDecoder
from isoloss.engine.rl.backends.local.transformers_decoder import TransformersDecoder
from isoloss.engine.rl.trajectory import Request, Sampling
from isoloss.engine.step.engine import Engine

# prompts, completions of each, tokens of a prompt, tokens of a completion
ROWS = [(2, 8, 25, 32), (4, 8, 25, 32), (4, 8, 512, 32), (16, 8, 25, 32)]


def requests_of(prompts: int, group: int, length: int) -> list[Request]:
    tokens = np.random.default_rng(0).integers(1, M27["vocab_size"], (prompts, length)).tolist()
    return [Request(f"{p}/{k}", tuple(tokens[p])) for p in range(prompts) for k in range(group)]


def by_isoloss(decoder: Callable[[], Decoder], requests: Sequence[Request], new: int, temperature: float) -> Tensor:
    """The tokens of each request, [B, new]."""
    sampling = Sampling(new, temperature, stop_token_ids=(), seed=0)
    rows = [ActiveSequence.start(request, sampling) for request in requests]
    scheduler = RowScheduler(decoder(), len(requests), 0, lambda row: None, lambda tokens: "")
    scheduler.add(rows)
    with torch.inference_mode():
        while scheduler.busy:
            scheduler.step()
    return torch.tensor([row.tokens for row in rows])


def by_transformers(model, requests: Sequence[Request], new: int, temperature: float, cache: str | None) -> Tensor:
    prompts_BP = torch.tensor([request.prompt_tokens for request in requests])
    how = GenerationConfig(
        max_new_tokens=new, do_sample=temperature > 0, top_k=0, temperature=temperature or None,
        cache_implementation=cache, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    with torch.inference_mode():
        found = model.generate(prompts_BP, attention_mask=torch.ones_like(prompts_BP), generation_config=how)
    return found[:, prompts_BP.shape[1] :]


def products(prompt_tokens: int, prompts: int, rows: int, new: int) -> Callable[[], None]:
    """The first token comes from the prompts; every other one from a step of all rows."""
    size, wide, vocabulary = M27["hidden_size"], M27["intermediate_size"], M27["vocab_size"]
    queries = M27["num_attention_heads"] * M27["head_dim"]
    keys = M27["num_key_value_heads"] * M27["head_dim"]
    shapes = [(queries + 2 * keys, size), (size, queries), (2 * wide, size), (size, wide)]
    layers = [torch.randn(shape) for _ in range(M27["num_hidden_layers"]) for shape in shapes]
    head = torch.randn(vocabulary, size)
    whole, step, last = (
        {w: torch.randn(count, w) for w in {size, queries, wide}} for count in (prompt_tokens, rows, prompts)
    )

    def multiply() -> None:
        for weight in layers:
            torch.mm(whole[weight.shape[1]], weight.T)
        torch.mm(last[size], head.T)
        for _ in range(new - 1):
            for weight in (*layers, head):
                torch.mm(step[weight.shape[1]], weight.T)

    return multiply


def measure(row: tuple[int, int, int, int], engine: Engine, model, passes: int) -> dict[str, float]:
    """CPU seconds of each side."""
    prompts, group, length, new = row
    requests = requests_of(prompts, group, length)
    sides: dict[str, Callable[[float], Tensor]] = {
        "megatron": lambda t: by_isoloss(lambda: MegatronDecoder(engine.whole_model()), requests, new, t),
        "transformers": lambda t: by_isoloss(lambda: TransformersDecoder(model), requests, new, t),
        "generate": lambda t: by_transformers(model, requests, new, t, None),
        "generate static": lambda t: by_transformers(model, requests, new, t, "static"),
    }
    greedy = {name: side(0.0) for name, side in sides.items()}
    if off := [name for name, tokens in greedy.items() if not torch.equal(tokens, greedy["generate"])]:
        sys.exit(f"{row}: {', '.join(off)} and generate choose other tokens at temperature 0")
    multiply = products(prompts * length, prompts, prompts * group, new)
    timed: dict[str, Callable[[], object]] = {name: lambda side=side: side(1.0) for name, side in sides.items()}
    timed["products"] = multiply
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(passes):
        for name, run in timed.items():
            started = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - started)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rows", type=int, nargs="+", default=range(len(ROWS)), help="by number; default: all")
    args = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this benchmark is about one CPU thread: run it with CUDA_VISIBLE_DEVICES= (empty)")
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        engine = Engine(build(Config, {"model": {"path": folder}, "memory": {"check": False}}))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for row in (ROWS[index] for index in args.rows):
            seconds = measure(row, engine, model, args.passes)
            prompts, group, length, new = row
            ms = {name: 1000 * each / (prompts * group * new) for name, each in seconds.items()}
            print(f"{prompts}x{group} {length}/{new}, CPU ms a token and times the products:", flush=True)
            for name, each in ms.items():
                print(f"  {name:<16}{each:7.3f}  {each / ms['products']:.2f}", flush=True)
            found.append({"row": row, "cpu_seconds": seconds})
    if args.out:
        args.out.write_text(json.dumps({"rows": found, "load_average": os.getloadavg()}, indent=2) + "\n")


if __name__ == "__main__":
    main()
