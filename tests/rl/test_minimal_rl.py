"""The readable loop, and the recipe beside it, take the steps that transformers and torch's AdamW take."""

import re
from collections import defaultdict
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracles.rl import formulas
from support.runs.recipes import minimal_rl_steps, recipe_rl_steps
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from isoloss.engine.step.engine import Engine
from isoloss.parallel import mesh
from isoloss.recipes import minimal_rl

MINIBATCHES = 2  # of a generated batch; rounding may make the next one another


@dataclass(frozen=True)
class Rollout:
    """completions: prompt and completion in tokens, in the order of their ids. parts: those of a step, each in one."""

    completions: list[tuple[tuple[int, ...], tuple[int, ...]]]
    parts: list[list[tuple[int, ...]]]
    told: list[minimal_rl.Step]


@pytest.fixture(scope="module")
def rollout(sorter) -> Rollout:
    """What minimal_rl generated, and which completions it took for which step: all else is worked out again."""
    generated, parts = [], []
    generate, forward_backward = minimal_rl.generate, Engine.forward_backward

    def generating(engine, prompts, ids):
        found = generate(engine, prompts, ids)
        generated.append([(prompt.tokens, tuple(completion.tokens)) for prompt, completion in zip(prompts, found[0])])
        return found

    def stepping(self, samples, loss):
        parts.append([tuple(sample.tokens_T.tolist()) for sample in samples])
        return forward_backward(self, samples, loss)

    with (
        mock.patch.object(minimal_rl, "generate", generating),
        mock.patch.object(Engine, "forward_backward", stepping),
    ):
        told = minimal_rl.main(f"{sorter}/hf", MINIBATCHES, task=sorter)
    mesh.destroy()
    dist.destroy_process_group()
    return Rollout(generated[1], parts, told)  # the first and the last are evaluations


def logprobs(model, tokens: list[tuple[int, ...]], starts: list[int]) -> list[Tensor]:
    """log p of the tokens of each sequence from its start on; sequences of one length in one forward."""
    of_length = defaultdict(list)
    for index, sequence in enumerate(tokens):
        of_length[len(sequence)].append(index)
    found: dict[int, Tensor] = {}
    for indices in of_length.values():
        tokens_BT = torch.tensor([tokens[index] for index in indices])
        logprobs_BTV = model(tokens_BT).logits[:, :-1].double().log_softmax(-1)
        logprobs_BT = logprobs_BTV.gather(2, tokens_BT[:, 1:, None]).squeeze(2)
        found |= {index: of_one[starts[index] - 1 :] for index, of_one in zip(indices, logprobs_BT)}
    return [found[index] for index in range(len(tokens))]


@pytest.fixture(scope="module")
def expected(sorter, rollout) -> list[minimal_rl.Step]:
    """GRPO on those completions: reward from the text, advantages, ratios, clipping, AdamW with a warm-up."""
    tokenizer = AutoTokenizer.from_pretrained(f"{sorter}/hf")
    model = AutoModelForCausalLM.from_pretrained(f"{sorter}/hf", dtype=torch.float64)

    def reward(prompt: tuple[int, ...], completion: tuple[int, ...]) -> float:
        letters = re.search(r"Sort the letters: (\w+)", tokenizer.decode(prompt))
        assert letters is not None
        text = tokenizer.decode(completion[:-1])
        return float(completion[-1] == tokenizer.eos_token_id and text == "".join(sorted(letters[1])))

    rewards = [reward(*each) for each in rollout.completions]
    advantage_of, start_of = {}, {}
    for first in range(0, len(rewards), minimal_rl.NUM_GENERATIONS):
        group = range(first, first + minimal_rl.NUM_GENERATIONS)
        for index, advantage in zip(group, formulas.grpo([rewards[index] for index in group], 1e-6)):
            prompt, completion = rollout.completions[index]
            advantage_of[prompt + completion], start_of[prompt + completion] = advantage, len(prompt)
    with torch.no_grad():
        old = {
            part[index]: of_one
            for part in rollout.parts
            for index, of_one in enumerate(logprobs(model, part, [start_of[each] for each in part]))
        }
    adamw = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    steps = []
    for number, part in enumerate(rollout.parts, start=1):
        terms = []
        for tokens, logp_C in zip(part, logprobs(model, part, [start_of[each] for each in part])):
            ratio_C, advantage = torch.exp(logp_C - old[tokens]), advantage_of[tokens]
            terms.append(-torch.minimum(ratio_C * advantage, ratio_C.clamp(0.8, 1.28) * advantage))
        loss = torch.cat(terms).mean()
        adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.param_groups[0]["lr"] = 2e-4 * number / 5  # the warm-up
        adamw.step()
        steps.append(minimal_rl.Step(sum(rewards) / len(rewards), loss.item(), norm.item()))
    return steps


def check(found: list[minimal_rl.Step], expected: list[minimal_rl.Step]) -> None:
    assert len(found) == len(expected) == MINIBATCHES
    for of_loop, by_hand in zip(found, expected):
        assert of_loop.reward == by_hand.reward
        assert of_loop.grad_norm == pytest.approx(by_hand.grad_norm, rel=1e-4)
        # Advantages of both signs nearly cancel in the loss: 1e-5 of the size of its terms, which is about 1.
        assert of_loop.loss == pytest.approx(by_hand.loss, abs=1e-5)


def test_the_readable_loop_on_one_rank(rollout, expected):
    assert 0.05 < expected[0].reward < 0.95 and all(step.grad_norm > 0.1 for step in expected)
    assert abs(expected[1].loss) > 1e-3  # the ratio is not 1 any more
    check(rollout.told, expected)


def test_the_readable_loop_on_two_ranks(pool, sorter, expected):
    for told in pool.run(2, minimal_rl_steps, f"{sorter}/hf", str(sorter), MINIBATCHES):
        check(told, expected)


def test_the_recipe(pool, sorter, expected, tmp_path):
    check(pool.run(1, recipe_rl_steps, f"{sorter}/hf", str(sorter), str(tmp_path / "run"), MINIBATCHES)[0], expected)
