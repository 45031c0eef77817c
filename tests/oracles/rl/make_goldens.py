"""Let verl and TRL compute advantages and losses of one small batch, and write goldens.json (README.md tells how)."""

import json
from collections import defaultdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import trl.rewards
import verl.trainer.ppo.core_algos as verl
from trl.trainer.grpo_trainer import GRPOTrainer
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights
from verl.workers.config import ActorConfig

# Sequence 5 is fully masked.
LENGTHS = (7, 1, 4, 6, 2, 0, 3, 5, 7)
GROUPS = (0, 0, 0, 1, 1, 1, 1, 2, 2)
WIDTH = 7
NORM_LENGTH = 11


def make_batch() -> dict[str, torch.Tensor]:
    """Padded [sequences, WIDTH] tensors; spread so that ratios fall below, into and above every clipping range."""
    random = torch.Generator().manual_seed(7)
    shape = (len(LENGTHS), WIDTH)
    normal = lambda: torch.randn(shape, generator=random, dtype=torch.float64)
    logprobs = -normal().abs()
    batch = {
        "mask": (torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]).double(),
        "logprobs": logprobs,
        "train_logprobs": logprobs + 0.3 * normal(),
        "rollout_logprobs": logprobs + 0.3 * normal(),
        "ref_logprobs": logprobs + 0.3 * normal(),
        "entropy": normal().abs(),
        "values": normal(),
        "old_values": normal(),
        "returns": normal(),
        "rewards": torch.randn(len(LENGTHS), generator=random, dtype=torch.float64).round(decimals=1),
        "advantages": torch.randn(len(LENGTHS), generator=random, dtype=torch.float64),
    }
    of_targets = lambda values: values.round(decimals=6) * (batch["mask"] if values.ndim == 2 else 1)
    return {name: of_targets(values) for name, values in batch.items()}


def flat(values: torch.Tensor) -> list[float]:
    """The targets' values, one sequence after the other."""
    return values[torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]].tolist()


def with_gradient(loss_of, leaf: torch.Tensor) -> dict[str, object]:
    leaf = leaf.clone().requires_grad_()
    loss = loss_of(leaf)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"loss": loss.item(), "gradient": flat(gradient)}


def of_verl(batch: dict[str, torch.Tensor]) -> dict[str, object]:
    mask, advantages = batch["mask"], batch["advantages"][:, None] * batch["mask"]
    at_the_end = torch.zeros_like(mask)
    for row, length in enumerate(LENGTHS):
        if length:
            at_the_end[row, length - 1] = batch["rewards"][row]
    penalized = at_the_end - 0.2 * verl.kl_penalty(batch["train_logprobs"], batch["ref_logprobs"], "k1") * mask
    index, of_gamma = np.array(GROUPS), SimpleNamespace(gamma=0.9)
    gae, returns = verl.compute_gae_advantage_return(penalized, batch["old_values"], mask, 0.9, 0.8)
    log_ratio = batch["train_logprobs"] - batch["rollout_logprobs"]
    of_groups = {
        "grpo": verl.compute_grpo_outcome_advantage,
        "dr-grpo": partial(verl.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=False),
        "rloo": verl.compute_rloo_outcome_advantage,
        "reinforce++-baseline": verl.compute_reinforce_plus_plus_baseline_outcome_advantage,
    }
    found: dict[str, object] = {name: flat(of(at_the_end, mask, index)[0]) for name, of in of_groups.items()}
    found["reinforce++"] = flat(verl.compute_reinforce_plus_plus_outcome_advantage(penalized, mask, config=of_gamma)[0])
    found["gae"] = {"advantages": flat(gae), "returns": flat(returns)}
    for name in ("k1", "k2", "k3"):
        found[name] = flat(verl.kl_penalty(batch["logprobs"], batch["ref_logprobs"], name))
    corrections = {"none": None} | {
        level: compute_rollout_correction_weights(log_ratio, mask, level, 1.1)[0] for level in ("token", "sequence")
    }
    modes = {
        "token-mean": {},
        "seq-mean-token-mean": {},
        "seq-mean-token-sum": {},
        "seq-mean-token-sum-norm": {"loss_scale_factor": NORM_LENGTH},
    }
    for mode, info in modes.items():
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=0.1, clip_ratio_high=0.25
        )
        object.__setattr__(config, "clip_ratio_c", 1.4)
        object.__setattr__(config, "global_batch_info", info)
        for level, weights in corrections.items():
            for name in ("vanilla", "gspo", "cispo", "reinforce"):
                if name == "reinforce":
                    loss = verl.compute_policy_loss_reinforce
                    old = batch["rollout_logprobs"]
                else:
                    loss, old = verl.get_policy_loss_fn(name), batch["train_logprobs"]
                of = lambda logprobs, loss=loss, old=old, config=config, mode=mode, weights=weights: loss(
                    old, logprobs, advantages, mask, mode, config, weights
                )[0]
                found[f"{name} {level} {mode}"] = with_gradient(of, batch["logprobs"])
        of_values = lambda values, mode=mode, info=info: verl.compute_value_loss(
            values, batch["returns"], batch["old_values"], mask, 0.3, mode, **info
        )[0]
        found[f"value {mode}"] = with_gradient(of_values, batch["values"])
    return found


def of_trl(batch: dict[str, torch.Tensor]) -> dict[str, object]:
    """GRPOTrainer._compute_loss, given a stand-in for the trainer whose model returns the batch's log-probabilities."""

    def loss_of(loss_type, logprobs, level="token", delta=None, epsilon_high=0.25, weights=None):
        trainer = SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, batch["entropy"], None),
            aux_loss_enabled=False,
            top_entropy_quantile=1.0,
            off_policy_mask_threshold=None,
            importance_sampling_level=level,
            beta=0.15,
            args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
            loss_type=loss_type,
            epsilon_low=0.1,
            epsilon_high=epsilon_high,
            use_vllm=weights is not None,
            vllm_importance_sampling_correction=True,
            model=SimpleNamespace(training=True),
            current_gradient_accumulation_steps=1,
            max_completion_length=NORM_LENGTH,
            accelerator=SimpleNamespace(
                num_processes=1, sync_gradients=True, gather=lambda x: x, reduce=lambda x, reduction: x
            ),
            _entropy_bonus_enabled=True,
            use_adaptive_entropy=False,
            entropy_coef=0.05,
            _metrics=defaultdict(lambda: defaultdict(list)),
        )
        mask = batch["mask"]
        inputs = {
            "prompt_ids": mask.long(),
            "prompt_mask": mask,
            "completion_ids": mask.long(),
            "completion_mask": mask,
            "advantages": batch["advantages"],
            "old_per_token_logps": batch["train_logprobs"],
            "ref_per_token_logps": batch["ref_logprobs"],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": weights,
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    token_weights = (batch["train_logprobs"] - batch["rollout_logprobs"]).exp().clamp(max=1.1)
    cases = {
        **{loss_type: {"loss_type": loss_type} for loss_type in ("grpo", "bnpo", "dr_grpo", "dapo")},
        "dapo delta": {"loss_type": "dapo", "delta": 1.4},
        "dapo importance": {"loss_type": "dapo", "weights": token_weights},
        "cispo": {"loss_type": "cispo", "epsilon_high": 1.25},  # the bound itself, not its distance from 1
        "gspo": {"loss_type": "grpo", "level": "sequence"},
        "gspo importance": {"loss_type": "grpo", "level": "sequence", "weights": token_weights},
    }
    found: dict[str, object] = {
        name: with_gradient(lambda logprobs, case=case: loss_of(logprobs=logprobs, **case), batch["logprobs"])
        for name, case in cases.items()
    }
    punishment = trl.rewards.get_soft_overlong_punishment(max_completion_len=7, soft_punish_cache=4)
    found["overlong"] = punishment([[0] * length for length in LENGTHS])
    return found


def main() -> None:
    batch = make_batch()
    goldens = {
        "versions": {name: version(name) for name in ("verl", "trl", "torch")},
        "lengths": LENGTHS,
        "groups": GROUPS,
        "norm_length": NORM_LENGTH,
        "batch": {name: flat(v) if v.ndim == 2 else v.tolist() for name, v in batch.items() if name != "mask"},
        "verl": of_verl(batch),
        "trl": of_trl(batch),
    }
    Path(__file__).with_name("goldens.json").write_text(json.dumps(rounded(goldens)) + "\n", encoding="utf-8")


def rounded(value):
    """Twelve digits: what a comparison to 1e-10 needs."""
    if isinstance(value, float):
        return float(f"{value:.12g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


if __name__ == "__main__":
    main()
