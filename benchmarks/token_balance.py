"""Length balancing: how even the ranks are, and what the plan costs on one CPU core.

    python benchmarks/token_balance.py [--out token_balance.json] [--repeats 5]

Lengths are log-normal (median 256, sigma 0.9, clipped to 64..2048 tokens), as instruction data tends to be; cost is the
forward FLOPs of a 7B decoder. Reported: the costliest rank over the mean rank, and the least CPU milliseconds of the
repeats. "floor" is what no method can beat: one sample is never split, so the longest may exceed the mean by itself.

Karmarkar-Karp is this file's own plain k-way largest differencing, in Python like the rest, not a peer's code: its time
says how the algorithms compare, not how fast anybody's implementation is.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from heapq import heapify, heappop, heappushpop
from pathlib import Path
from typing import TypeVar

import numpy as np

from isoloss.engine.batching.balance import CostModel, assign_ranks, imbalance, make_plan
from isoloss.models.architecture import Architecture
from isoloss.models.kinds.dense import Dense
from isoloss.models.kinds.grouped_query import GroupedQuery
from isoloss.models.kinds.layer import Layer
from isoloss.models.rope import Rope

# A 7B decoder: hidden 3584, 28 layers, 28 heads of 128, 4 kv heads, MLP 18944, vocabulary 152064.
LAYER = Layer(GroupedQuery(heads=28, kv_heads=4, head_dim=128, rope=Rope(1e4), rotary_dim=128), Dense(18944))
COST = CostModel.of(
    Architecture(
        "llama",
        (LAYER,) * 28,
        hidden_size=3584,
        vocab_size=152064,
        norm_eps=1e-6,
        tie_embeddings=False,
        max_positions=4096,
        dtype="bfloat16",
    )
)
MAX_TOKENS = 4096
SIZES = ((512, 8), (4096, 64), (65536, 512))  # (samples, ranks)

Ranks = list[list[int]]
T = TypeVar("T")


def sample_lengths(count: int, seed: int = 0) -> np.ndarray:
    """int64 [count]."""
    lengths = np.random.default_rng(seed).lognormal(np.log(256), 0.9, count)
    return np.clip(lengths, 64, 2048).astype(np.int64)


def greedy(lengths: np.ndarray, parts: int) -> Ranks:
    """Only the first half of `make_plan`, the half that the other methods do."""
    return assign_ranks(np.argsort(-lengths, kind="stable").tolist(), COST.cost(lengths).tolist(), parts)


def round_robin(lengths: np.ndarray, parts: int) -> Ranks:
    return [list(range(rank, len(lengths), parts)) for rank in range(parts)]


def karmarkar_karp(lengths: np.ndarray, parts: int) -> Ranks:
    """Largest differencing (Karmarkar and Karp 1982), k ways.

    A state is a partition of some samples: its non-empty parts as (cost, number, tree of samples), descending; a tree
    is an index or a pair of trees. The two states of largest spread are merged, heavy parts onto light ones, until one
    is left.
    """
    number = iter(range(10**12))  # breaks ties, so that trees are never compared
    heap = [(-cost, next(number), [(cost, next(number), i)]) for i, cost in enumerate(COST.cost(lengths).tolist())]
    heapify(heap)
    state = heappop(heap)[2]
    while heap:
        # The state just made goes in and the widest comes out; then the next widest is merged into it.
        _, _, other = heappop(heap)
        state = _merge(state, other, parts, number)
        if heap:
            spread = state[0][0] - (state[-1][0] if len(state) == parts else 0.0)
            state = heappushpop(heap, (-spread, next(number), state))[2]
    return [_leaves(tree) for _, _, tree in state] + [[] for _ in range(parts - len(state))]


def _merge(a: list, b: list, parts: int, number) -> list:
    """Part j of `a` joins part parts-1-j of `b`; absent parts are empty, so most merges only put two lists together."""
    clash = max(0, len(a) + len(b) - parts)
    keep_a, keep_b = len(a) - clash, len(b) - clash
    joined = [(x[0] + y[0], next(number), (x[2], y[2])) for x, y in zip(a[keep_a:], reversed(b[keep_b:]))]
    return sorted(a[:keep_a] + b[:keep_b] + joined, reverse=True)


def _leaves(tree) -> list[int]:
    stack, leaves = [tree], []
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        else:
            leaves.append(node)
    return leaves


def max_over_mean(ranks: Ranks, lengths: np.ndarray) -> float:
    costs = COST.cost(lengths)
    assert sorted(i for rank in ranks for i in rank) == list(range(len(lengths))), "a sample is missing or doubled"
    return float(max(costs[rank].sum() for rank in ranks) * len(ranks) / costs.sum())


def cpu_ms(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Least CPU milliseconds of the repeats, and the last result."""
    best, results = float("inf"), []
    for _ in range(repeats):
        start = time.process_time()
        results = [work()]
        best = min(best, 1e3 * (time.process_time() - start))
    return best, results[0]


def measure(samples: int, ranks: int, repeats: int) -> dict:
    lengths = sample_lengths(samples)
    costs = COST.cost(lengths)
    row: dict = {"samples": samples, "ranks": ranks, "floor": max(1.0, float(costs.max() * ranks / costs.sum()))}
    ms, plan = cpu_ms(lambda: make_plan(lengths, ranks, MAX_TOKENS, COST), repeats)
    row["plan"] = {
        "max_over_mean": imbalance(plan, lengths, COST),
        "cpu_ms": ms,
        "micro_batches": plan.num_micro_batches,
        "fewest_micro_batches": -(-int(lengths.sum()) // (ranks * MAX_TOKENS)),
    }
    for name, method in (("greedy", greedy), ("round_robin", round_robin), ("karmarkar_karp", karmarkar_karp)):
        ms, parts = cpu_ms(lambda method=method: method(lengths, ranks), repeats)
        row[name] = {"max_over_mean": max_over_mean(parts, lengths), "cpu_ms": ms}
    row["karmarkar_karp_ms_over_greedy_ms"] = row["karmarkar_karp"]["cpu_ms"] / row["greedy"]["cpu_ms"]
    return row


def print_table(rows: list[dict]) -> None:
    labels = {
        "plan": "isoloss plan, whole",
        "greedy": "isoloss, ranks only",
        "round_robin": "round robin",
        "karmarkar_karp": "Karmarkar-Karp (own)",
    }
    print(f"{'samples/ranks':<16}{'method':<24}{'max/mean cost':>14}{'CPU ms':>12}")
    for row in rows:
        size = f"{row['samples']}/{row['ranks']}"
        print(f"{size:<16}{'floor':<24}{row['floor']:>14.6f}")
        for key, label in labels.items():
            result = row[key]
            print(f"{size:<16}{label:<24}{result['max_over_mean']:>14.6f}{result['cpu_ms']:>12.2f}")
        print(f"{size:<16}Karmarkar-Karp takes {row['karmarkar_karp_ms_over_greedy_ms']:.0f} times the CPU of greedy")
        print(
            f"{size:<16}{row['plan']['micro_batches']} micro-batches a rank; total tokens need at least "
            f"{row['plan']['fewest_micro_batches']}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON here")
    parser.add_argument("--repeats", type=int, default=5, help="best of this many")
    args = parser.parse_args()
    versions = {"python": platform.python_version(), "numpy": np.__version__, "machine": platform.machine()}
    print(
        f"python {versions['python']}, numpy {versions['numpy']}, {versions['machine']}, one core, "
        f"micro-batches of at most {MAX_TOKENS} tokens"
    )
    rows = [measure(samples, ranks, args.repeats) for samples, ranks in SIZES]
    print_table(rows)
    if args.out:
        args.out.write_text(json.dumps({"versions": versions, "max_tokens": MAX_TOKENS, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
