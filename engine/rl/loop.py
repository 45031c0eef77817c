"""The reinforcement learning loop: prompts -> rollout -> reward -> advantage -> optimizer steps -> weights."""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from isoloss.engine.engine import Engine, check_model
from isoloss.engine.metrics import MetricsLog, flops_per_step, mfu, peak_flops
from isoloss.engine.optimizer import learning_rate
from isoloss.engine.output import Fingerprint, check_fingerprints, check_output, open_output, record
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.critic import Critic
from isoloss.engine.rl.draw import draw
from isoloss.engine.rl.experience import Experience, Models, prepare
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.rl.prompts import prompt_order
from isoloss.engine.rl.reference import Reference, fingerprint
from isoloss.engine.rl.report import RolloutLog, batch_stats, opening, rollout_stats
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.setup import RLData, load_data, open_rewarder, open_rollout
from isoloss.engine.run import BadStepGuard, due, export, is_main, report, resume, save, step_folder
from isoloss.parallel import device


@dataclass(frozen=True)
class RLResult:
    """Where a run ended. first_eval, last_eval: metrics of the evaluations; empty without data.eval."""

    output_dir: Path
    checkpoint: Path
    export: Path | None
    first_eval: dict[str, float]
    last_eval: dict[str, float]


def train_rl(config: RLConfig, run_name: str) -> RLResult:
    """Reinforcement learning, from files of prompts to an exported model.

    run_name: names the default output folder, `runs/<run_name>`. Every rank of the world calls it.
    Raises UserError for what the user can mend; nothing has been written by then unless training had started.
    """
    device.check_fallback(config.train.device)
    check_model(config)
    check_output(config, run_name)
    data = load_data(config)
    fingerprints = data.fingerprints()
    check_fingerprints(config, run_name, fingerprints)
    with contextlib.ExitStack() as stack:
        score = stack.enter_context(open_rewarder(config, data))
        engine = Engine(config)
        reference = None
        if config.algorithm.uses_reference:
            fingerprints.append(fingerprint(config))
            check_fingerprints(config, run_name, fingerprints[-1:])
            reference = Reference(engine, offload=config.algorithm.reference_offload)
        critic = Critic(config, engine) if config.algorithm.uses_critic else None
        output_dir = stack.enter_context(open_output(config, run_name))
        rollout = stack.enter_context(open_rollout(config, engine, data, score, output_dir))
        return _train(config, data, fingerprints, engine, reference, critic, rollout, output_dir)


def _train(
    config: RLConfig,
    data: RLData,
    fingerprints: Sequence[Fingerprint],
    engine: Engine,
    reference: Reference | None,
    critic: Critic | None,
    rollout: Rollout,
    output_dir: Path,
) -> RLResult:
    temperature, seed = config.rollout.temperature, config.train.seed
    models = Models(
        policy=partial(engine.logprobs, temperature=temperature),
        reference=reference and partial(reference.logprobs, temperature=temperature),
        critic=critic and critic.values,
    )
    loss = policy_loss(config)
    step, cursor, experience = restore(engine, critic, config, output_dir)
    guard = BadStepGuard(config.train.max_bad_steps)
    if is_main():
        print(*opening(engine, config, data, output_dir, step), sep="\n", flush=True)

    def groups(first_draw: int, count: int):
        prompts = [data.train[index] for index in prompt_order(len(data.train), first_draw, count, seed)]
        return rollout.groups(prompts, first_draw, config.rollout.num_generations)

    with (
        MetricsLog(output_dir, enabled=is_main(), total_steps=data.total_steps, start_step=step) as log,
        RolloutLog(output_dir, log, enabled=is_main(), start_step=step) as rollout_log,
    ):
        peak = peak_flops(engine.device)
        first_eval = last_eval = evaluate(rollout, data, config, rollout_log, step)
        while step < data.total_steps:
            started = time.perf_counter()
            if experience is None or experience.used_up:
                rollout.sync(step)
                draws = draw(groups, cursor, config)
                cursor = draws.cursor
                experience = prepare(draws.kept, models, config, step, batch_stats(draws))
                rollout_log.batch(step + 1, draws, experience)
            samples, experience = experience.take()
            lr = learning_rate(step, config.optim, data.total_steps)

            training = time.perf_counter()
            learned = critic.train_step(samples) if critic else {}
            metrics, result = engine.train_step(samples, loss, lr)

            step += 1
            now = time.perf_counter()
            flops = flops_per_step(engine.cost_model, [len(sample) for sample in samples])
            row = report(metrics, result, now - started, mfu(flops, now - started, peak, dist.get_world_size()))
            row |= {**metrics.terms, **metrics.observed, **learned, **experience.stats, **rollout.take_seconds()}
            log.log(step, row | {"train_seconds": now - training})
            guard.check(step, metrics, result)
            if due(step, config.train.eval_every, data.total_steps):
                last_eval = evaluate(rollout, data, config, rollout_log, step)
            if due(step, config.checkpoint.every, data.total_steps):
                store(engine, critic, config, output_dir, step, cursor, experience, fingerprints)
    exported = export(engine, config, output_dir)
    return RLResult(output_dir, step_folder(output_dir, step), exported, first_eval, last_eval)


def evaluate(rollout: Rollout, data: RLData, config: RLConfig, rollout_log: RolloutLog, step: int) -> dict[str, float]:
    """One completion of every prompt of data.eval, by the present weights."""
    if data.eval is None:
        return {}
    rollout.sync(step)
    trajectories = rollout.evaluate(data.eval)
    rollout.take_seconds()
    stats = rollout_stats(trajectories)
    rollout_log.evaluation(step, trajectories, stats)
    return stats


def store(
    engine: Engine,
    critic: Critic | None,
    config: RLConfig,
    output_dir: Path,
    step: int,
    cursor: int,
    experience: Experience,
    fingerprints: Sequence[Fingerprint],
) -> None:
    """A checkpoint, in the middle of a generated batch if need be: then the rest of the batch goes with it."""
    left = None if experience.used_up else experience.state()
    if critic is not None:  # first: where there is a checkpoint of the policy, there is one of its critic
        critic.save(output_dir, step)
    state = {"cursor": cursor, "experience": left, **record(fingerprints)}
    save(engine, config, output_dir, step, state)
    if critic is not None:
        critic.prune(output_dir)


def restore(
    engine: Engine, critic: Critic | None, config: RLConfig, output_dir: Path
) -> tuple[int, int, Experience | None]:
    """Steps done, prompts drawn, and the generated batch whose steps are not all done."""
    state: Any = resume(engine, config, output_dir)
    if state is None:
        return 0, 0, None
    step, cursor, left = state["step"], state["cursor"], state["experience"]
    if critic is not None:
        critic.load(output_dir, step)
    return step, cursor, None if left is None else Experience.of_state(left)


def summary(result: RLResult) -> list[str]:
    """What a finished run tells its user; the last line says where everything is and what to do next."""
    lines = []
    if result.last_eval:
        first, last = result.first_eval, result.last_eval
        lines.append(
            f"eval: reward {last['reward_mean']:.3f} (before training {first['reward_mean']:.3f}), pass@1 "
            f"{last['pass@1']:.3f} (before {first['pass@1']:.3f})"
        )
    model = f"model for transformers in {result.export}; " if result.export else ""
    lines.append(
        f"done: {model}checkpoint in {result.checkpoint}; completions in {result.output_dir}/rollouts.jsonl; "
        f"next: tensorboard --logdir {result.output_dir}/tensorboard"
    )
    return lines
