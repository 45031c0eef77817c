"""A session of Tinker's SDK, run in its own environment: session.py URL KEY OUT STEPS. Writes its numbers to OUT."""

import json
import sys

import numpy as np
import tinker
from tinker import types

NAME = "Qwen/Qwen3-8B"
LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo")


def datum(kind: str, draw: np.random.Generator) -> types.Datum:
    tokens = draw.integers(3, 2000, int(draw.integers(5, 40))).tolist()
    count = len(tokens) - 1
    inputs: dict = {"target_tokens": tokens[1:]}
    if kind == "cross_entropy":
        inputs["weights"] = draw.random(count).astype(np.float32).tolist()
    else:
        inputs["logprobs"] = (-7.6 + 0.1 * draw.standard_normal(count)).astype(np.float32).tolist()
        inputs["advantages"] = draw.standard_normal(count).astype(np.float32).tolist()
        inputs["target_tokens"][: count // 3] = [0] * (count // 3)  # as recipes do on the prompt
        inputs["advantages"][: count // 3] = [0.0] * (count // 3)
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def main(url: str, key: str, out: str, steps: int) -> None:
    service = tinker.ServiceClient(base_url=url, api_key=key)
    client = service.create_lora_training_client(base_model=NAME, rank=4, seed=1).result()
    draw, waiting, numbers = np.random.default_rng(0), [], []
    for step in range(steps):
        kind = LOSSES[step % 4]
        calls = [client.forward_backward([datum(kind, draw) for _ in range(5)], kind) for _ in range(2)]
        adam = types.AdamParams(
            learning_rate=1e-3, beta1=0.8, beta2=0.98, eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0
        )
        waiting.append((calls, client.optim_step(adam)))
    for calls, optim_step in waiting:
        answers = [call.result() for call in calls]
        numbers.append(
            {
                "loss": [answer.metrics["loss:sum"] for answer in answers],
                "norm": optim_step.result().metrics["grad_norm"],
                "logprobs": [[*map(float, of["logprobs"].data)] for answer in answers for of in answer.loss_fn_outputs],
            }
        )
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, rules = types.ModelInput.from_ints([5, 6, 7, 8]), types.SamplingParams(max_tokens=12, seed=3)
    path = client.save_state("one").result().path
    again = service.create_training_client_from_state_with_optimizer(path).result()
    data = [datum("cross_entropy", draw) for _ in range(3)]
    resumed = [each.forward(data, "cross_entropy").result().metrics["loss:sum"] for each in (client, again)]
    client.forward_backward(data, "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=0.1)).result()
    sampled = sampler.sample(prompt, 3, rules, topk_sample_logprobs=400).result()
    for each in sampled.sequences:
        assert len(each.topk_logprobs) == len(each.tokens)
        for token, logprob, top in zip(each.tokens, each.logprobs, each.topk_logprobs):
            assert top[0][1] >= logprob - 1e-4 and abs(dict(top).get(token, logprob) - logprob) < 1e-4, (token, top)
    numbers.append(
        {
            "tokens": [[*map(int, each.tokens)] for each in sampled.sequences],
            "sampled": [[*map(float, each.logprobs or ())] for each in sampled.sequences],
            "prompt": sampler.compute_logprobs(types.ModelInput.from_ints([*range(5, 30)])).result()[1:],
            "resumed": resumed,
        }
    )
    with open(out, "w", encoding="utf-8") as file:
        json.dump(numbers, file)


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
