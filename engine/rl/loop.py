"""The reinforcement learning loop: prompts -> rollout -> reward -> advantage -> optimizer steps -> weights."""

import contextlib

from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.rl.algorithms import check_functions
from isoloss.engine.rl.backends.servers.api_key import api_key_of
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.critic import Critic
from isoloss.engine.rl.experience import RolloutBatch, minibatches, with_advantages, with_logprobs
from isoloss.engine.rl.health import watched
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.rl.reference import Reference, fingerprint
from isoloss.engine.rl.report import (
    RolloutLog,
    banner,
    batch_stats,
    copy_of_the_model,
    first_prompts,
    rollout_stats,
    summary,
)
from isoloss.engine.rl.rollout import Rollout, SampledGroups, sample_groups
from isoloss.engine.rl.setup import RLData, load_data, open_rewarder, open_rollout
from isoloss.engine.run.folder import check_fingerprints, check_folder, open_folder, with_date
from isoloss.engine.run.rank_agreement import check_ranks_agree, of_functions
from isoloss.engine.run.run import Run, RunResult
from isoloss.engine.step.engine import Engine
from isoloss.engine.step.model_source import resolve
from isoloss.parallel.rank0 import is_main
from isoloss.parallel.runtime import device


def train_rl(config: RLConfig, run_name: str) -> RunResult:
    """Reinforcement learning, from files of prompts to an exported model.

    run_name: names the default output folder, `runs/<run_name>`. Every rank of the world calls it.
    Raises UserError for what the user can fix; nothing has been written by then unless training had started.
    """
    device.check_fallback(config.train.device)
    api_key_of(config.rollout)
    check_functions(config.algorithm.advantage, config.algorithm.loss)
    source = resolve(config)
    check_folder(config, run_name, source.arch)
    config = with_date(config, run_name)
    data = load_data(config, source.arch)
    config.train.profiled(data.total_steps)
    fingerprints = data.fingerprints()
    check_fingerprints(config, run_name, fingerprints)
    with contextlib.ExitStack() as stack:
        rewarder = stack.enter_context(open_rewarder(config, data))
        same = [*fingerprints, *data.of_evaluation(), *of_functions(config.functions)]
        check_ranks_agree(config, run_name, source, same)
        policy = Engine(config, source)
        policy.stop_token_ids = data.stop_token_ids
        reference = None
        if config.algorithm.uses_reference:
            fingerprints.append(fingerprint(source))
            check_fingerprints(config, run_name, fingerprints[-1:])
            reference = Reference(policy, offload=config.algorithm.reference_offload)
        critic = Critic(config, policy) if config.algorithm.uses_critic else None
        folder = stack.enter_context(open_folder(config, run_name))
        beside = [each for each in (reference, critic) if each is not None]
        scatter = stack.enter_context(contextlib.closing(Scatter(policy.mesh)))
        rollout = stack.enter_context(open_rollout(config, policy, data, rewarder, folder, beside))
        run = stack.enter_context(Run(policy, config, folder, data.total_steps, fingerprints, watched(config)))
        return _train(config, data, policy, reference, critic, scatter, rollout, run, RolloutLog(run.metrics))


def _train(
    config: RLConfig,
    data: RLData,
    policy: Engine,
    reference: Reference | None,
    critic: Critic | None,
    scatter: Scatter,
    rollout: Rollout,
    run: Run,
    log: RolloutLog,
) -> RunResult:
    loss = policy_loss(config)
    batch = restore(run, critic, scatter, rollout)
    run.print([*banner(config, data, run), *copy_of_the_model(config, policy)])
    if is_main():
        data.rejects(config.data).write(run.output_dir)
        run.print(first_prompts(config, data))

    def save_now() -> None:
        save(run, critic, batch, rollout)

    for step in run.steps(lambda step: evaluate(rollout, data, log, step), save_now):
        if batch.exhausted:
            rollout.sync_weights(step)
            groups = SampledGroups()
            samples = [
                sample
                for wave in sample_groups(rollout, groups, config)  # generates and rewards
                for sample in with_logprobs(wave, scatter, policy, reference, critic, config)
            ]
            samples = scatter.make(lambda made=samples, kept=groups.kept: with_advantages(made, kept, config))
            steps = minibatches([sample.group for sample in samples], step, config)
            batch = RolloutBatch(tuple(samples), steps, batch_stats(groups))
            log.batch(step + 1, groups, batch)
            del groups  # the steps need the samples alone
        samples, batch = batch.next()
        samples = scatter.hold(samples)
        values = critic.train_step(samples) if critic else {}
        metrics, result = policy.train_step(samples, loss, run.lr(), run.limits())
        of_rollout = {**batch.stats, **rollout.take_seconds(), **rollout.take_counts()}
        run.log(samples, metrics, result, {**values, **of_rollout}, log.told)

    ended = run.finish()
    run.print(summary(ended))
    return ended


def evaluate(rollout: Rollout, data: RLData, log: RolloutLog, step: int) -> dict[str, float]:
    """One completion of every prompt of data.eval, by the present weights."""
    if data.eval is None:
        return {}
    rollout.sync_weights(step)
    trajectories = rollout.evaluate(data.eval.prompts)
    log.evaluation(step, trajectories)
    return {**rollout_stats(trajectories), **rollout.take_counts()}


def save(run: Run, critic: Critic | None, batch: RolloutBatch, rollout: Rollout) -> None:
    """A checkpoint. The critic's comes first: where there is one of the policy, there is one of its critic."""
    run.save({**batch.state(), "rollout": rollout.state()}, critic.stage if critic else None)


def restore(run: Run, critic: Critic | None, scatter: Scatter, rollout: Rollout) -> RolloutBatch:
    """Where the checkpoint was taken that the run goes on from."""
    state = run.pop_resume_state()
    if state is None:
        return RolloutBatch()
    if critic is not None:
        critic.load(run.output_dir, run.done)
    rollout.restore(state["rollout"])
    return RolloutBatch.from_state(state, scatter)
