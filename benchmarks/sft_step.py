"""One SFT optimizer step of isoloss on one CPU thread, against the fastest loop that is easily written by hand.

    python benchmarks/sft_step.py [--out sft_step.json] [--passes 3] [--max-tokens 2048] [--padded]

The model is a Qwen3 of 27.5M parameters with random weights; 16 sequences of log-normal length (median 256, sigma 0.9,
clipped to 64..2048), the second half of each labeled; fp32; AdamW, clipping at 1.

limit: plain PyTorch with everything unnecessary left out: flat documents, causal attention document by document, logits
    at labeled positions only, no framework around it. It does nothing else: no parallelism, no invariance.
isoloss: `Engine`, as a recipe drives it, on a mesh of one rank.
padded (--padded): transformers' model as its Trainer feeds it: four padded sequences at a time, logits everywhere.

All start from the same weights and get the same samples. The first step of each is not timed: there the losses must
agree to 1e-6 and the gradient norms to 1e-5, or no ratio is printed. Then they take turns, so that noise of the machine
meets all of them, and the least CPU seconds (of the process, all threads) of each count.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, embedding, linear, rms_norm, scaled_dot_product_attention, silu

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.parse import build
from isoloss.engine.config.schema import Config, LossConfig
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.losses import cross_entropy as sft_loss

M27 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 384, "num_hidden_layers": 8,
       "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1280,
       "vocab_size": 32768, "tie_word_embeddings": True, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
       "max_position_embeddings": 4096, "hidden_act": "silu"}  # fmt: skip
LR, BETAS, EPS, CLIP = 1e-5, (0.9, 0.95), 1e-8, 1.0
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-6, 1e-5


def make_samples(count: int, vocab_size: int, seed: int) -> list[Sample]:
    """Random tokens, the second half of each sequence labeled."""
    random = np.random.default_rng(seed)
    lengths = np.clip(random.lognormal(np.log(256), 0.9, count), 64, 2048).astype(int).tolist()
    return [Sample(torch.from_numpy(random.integers(0, vocab_size, n)), torch.arange(n) >= n // 2) for n in lengths]


class Isoloss:
    def __init__(self, folder: str, max_tokens: int):
        self.engine = Engine(
            build(
                Config,
                {
                    "model": {"path": folder, "from_scratch": True},
                    "batch": {"max_tokens": max_tokens},
                    "optim": {"lr": LR, "betas": list(BETAS), "eps": EPS, "clip": CLIP},
                    "train": {"precision": "fp32"},
                },
            )
        )
        self.loss = sft_loss(LossConfig())

    def weights(self) -> dict[str, Tensor]:
        return {n: t.clone() for n, t, _ in self.engine.model.hf_tensors(torch.float32)}

    def step(self, samples: list[Sample]) -> tuple[float, float]:
        metrics, result = self.engine.train_step(samples, self.loss)
        return metrics.loss, result.grad_norm


class Torch:
    """What the two plain loops share: AdamW, the norm of the gradient, clipping."""

    parameters: list[Tensor]

    def start(self) -> None:
        self.optimizer = torch.optim.AdamW(self.parameters, LR, BETAS, EPS, weight_decay=0.0, fused=True)

    @torch.no_grad()
    def finish(self) -> float:
        """In fp64, like isoloss: fp32 norms are off by up to 5e-4 on a CPU, on whichever side they are taken."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        norm = sum(torch.linalg.vector_norm(g, dtype=torch.float64).item() ** 2 for g in grads) ** 0.5
        if norm > CLIP:
            torch._foreach_mul_(grads, CLIP / norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


class Limit(Torch):
    """The hand-written loop. `order` gives the samples of each micro-batch."""

    def __init__(self, weights: dict[str, Tensor], order: list[list[int]]):
        self.w = {name: t.requires_grad_() for name, t in weights.items()}
        self.parameters = list(self.w.values())
        self.order = order
        self.inv_freq = 1.0 / M27["rope_theta"] ** (torch.arange(0, M27["head_dim"], 2).float() / M27["head_dim"])
        self.start()

    def step(self, samples: list[Sample]) -> tuple[float, float]:
        labels = sum(int(s.mask_T.sum()) for s in samples)
        total = 0.0
        for indices in self.order:
            loss = self.nll([samples[i] for i in indices]) / labels
            loss.backward()
            total += loss.item()
        return total, self.finish()

    def nll(self, samples: list[Sample]) -> Tensor:
        lengths = [len(s) for s in samples]
        hidden = self.model(torch.cat([s.tokens_T for s in samples]), lengths)
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        at = torch.cat([start + s.mask_T[1:].nonzero().squeeze(1) for start, s in zip(starts, samples)])
        targets = torch.cat([s.tokens_T[s.mask_T] for s in samples])
        return cross_entropy(linear(hidden[at], self.w["model.embed_tokens.weight"]), targets, reduction="sum")

    def model(self, tokens: Tensor, lengths: list[int]) -> Tensor:
        w, eps, head, heads = self.w, M27["rms_norm_eps"], M27["head_dim"], M27["num_attention_heads"]
        angles = torch.outer(torch.cat([torch.arange(n) for n in lengths]).float(), self.inv_freq).repeat(1, 2)[:, None]
        cos, sin = angles.cos(), angles.sin()

        def rotated(x: Tensor, norm: str) -> Tensor:
            x = rms_norm(x.unflatten(-1, (-1, head)), (head,), w[norm], eps)
            low, high = x.chunk(2, -1)
            return x * cos + torch.cat((-high, low), -1) * sin

        x = embedding(tokens, w["model.embed_tokens.weight"])
        for layer in range(M27["num_hidden_layers"]):
            a, m = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
            y = rms_norm(x, x.shape[-1:], w[f"model.layers.{layer}.input_layernorm.weight"], eps)
            q = rotated(linear(y, w[a + "q_proj.weight"]), a + "q_norm.weight")
            k = rotated(linear(y, w[a + "k_proj.weight"]), a + "k_norm.weight")
            v = linear(y, w[a + "v_proj.weight"]).unflatten(-1, (-1, head))
            qkv = [t.transpose(0, 1).split(lengths, 1) for t in (q, k, v)]
            out = [
                scaled_dot_product_attention(*(t[None] for t in document), is_causal=True, enable_gqa=True)[0]
                for document in zip(*qkv)
            ]
            x = x + linear(torch.cat(out, 1).transpose(0, 1).reshape(-1, heads * head), w[a + "o_proj.weight"])
            y = rms_norm(x, x.shape[-1:], w[f"model.layers.{layer}.post_attention_layernorm.weight"], eps)
            wide = silu(linear(y, w[m + "gate_proj.weight"])) * linear(y, w[m + "up_proj.weight"])
            x = x + linear(wide, w[m + "down_proj.weight"])
        return rms_norm(x, x.shape[-1:], w["model.norm.weight"], eps)


class Padded(Torch):
    """transformers' model and loss, four sequences at a time in their given order, padded to the longest."""

    def __init__(self, weights: dict[str, Tensor]):
        from transformers import Qwen3Config, Qwen3ForCausalLM

        names = {k: v for k, v in M27.items() if k != "architectures"}
        self.model = Qwen3ForCausalLM(Qwen3Config(**names, attn_implementation="sdpa"))  # pyright: ignore[reportCallIssue]
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert missing == ["lm_head.weight"] and not unknown, (missing, unknown)
        self.model.train()
        self.parameters = list(self.model.parameters())
        self.start()

    def step(self, samples: list[Sample]) -> tuple[float, float]:
        labels = sum(int(s.mask_T.sum()) for s in samples)
        total = 0.0
        pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
        for four in (samples[i : i + 4] for i in range(0, len(samples), 4)):
            loss = self.model(
                input_ids=pad([s.tokens_T for s in four], 0),
                attention_mask=pad([torch.ones_like(s.tokens_T) for s in four], 0),
                labels=pad([s.tokens_T.masked_fill(~s.mask_T, -100) for s in four], -100),
                num_items_in_batch=labels,
                use_cache=False,
            ).loss
            loss.backward()
            total += loss.item()
        return total, self.finish()


def cpu_seconds(loop, samples: list[Sample]) -> float:
    start = time.process_time()
    loop.step(samples)
    return time.process_time() - start


def versions() -> dict:
    import megatron.core
    import transformers

    return {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine(),
            "megatron-core": megatron.core.__version__, "transformers": transformers.__version__,
            "threads": torch.get_num_threads()}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--passes", type=int, default=3, help="timed steps of each; the least counts")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a micro-batch of isoloss and limit")
    parser.add_argument("--padded", action="store_true", help="add transformers with padding")
    args = parser.parse_args()
    if torch.cuda.is_available():
        sys.exit("this benchmark is about one CPU thread: run it with CUDA_VISIBLE_DEVICES= (empty)")
    torch.set_num_threads(1)
    samples = make_samples(args.sequences, M27["vocab_size"], seed=0)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(M27))
        ours = Isoloss(folder, args.max_tokens)
    plan = ours.engine.plan(samples)
    order = [list(m) for m in plan.micro_batches[0] if m]
    loops = {"limit": Limit(ours.weights(), order), "isoloss": ours}
    if args.padded:
        loops["padded"] = Padded(ours.weights())
    first = {name: loop.step(samples) for name, loop in loops.items()}
    for name, (loss, norm) in first.items():
        off = abs(loss / first["limit"][0] - 1), abs(norm / first["limit"][1] - 1)
        print(f"{name:<9} loss {loss:.9f} (off {off[0]:.1e})  gradient norm {norm:.9f} (off {off[1]:.1e})")
        if not (off[0] <= LOSS_TOLERANCE and off[1] <= NORM_TOLERANCE):
            sys.exit(f"{name} and limit disagree: they do not compute the same step, so no ratio is printed")
    seconds = {name: [] for name in loops}
    for _ in range(args.passes):
        for name, loop in loops.items():
            seconds[name].append(cpu_seconds(loop, samples))
    tokens, best = sum(map(len, samples)), {name: min(s) for name, s in seconds.items()}
    labels = sum(int(s.mask_T.sum()) for s in samples)
    print(f"{len(samples)} sequences, {tokens} tokens, {labels} labels, {len(order)} micro-batches; {versions()}")
    for name, least in best.items():
        passes = " ".join(f"{s:.2f}" for s in seconds[name])
        speed = f"{tokens / least:7.0f} tokens/CPU-s   speed {best['limit'] / least:.3f} x limit"
        print(f"{name:<9}{least:8.2f} CPU-s a step {speed}   passes {passes}")
    if args.out:
        rows = {n: {"loss": first[n][0], "grad_norm": first[n][1], "cpu_seconds": s, "least": best[n],
                    "speed_over_limit": best["limit"] / best[n]} for n, s in seconds.items()}  # fmt: skip
        args.out.write_text(
            json.dumps(
                {
                    "versions": versions(),
                    "load_average": os.getloadavg(),
                    "tokens": tokens,
                    "labels": labels,
                    "micro_batches": len(order),
                    "rows": rows,
                },
                indent=2,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
