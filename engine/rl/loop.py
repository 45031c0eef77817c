"""Run the reinforcement learning loop: prompts -> rollout -> reward -> advantage -> optimizer steps -> weights."""

from contextlib import closing

from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.batching.sample import sequence_numbers
from isoloss.engine.rl.algorithms import check_functions
from isoloss.engine.rl.backends.servers.api_key import api_key_of
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.critic import Critic
from isoloss.engine.rl.experience import Models, RolloutBatch, minibatches, with_advantages, with_logprobs
from isoloss.engine.rl.group_sampling import SampledGroups, sample_groups
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
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.setup import RLData, load_data, open_rewarder, open_rollout
from isoloss.engine.run.run import Run, RunResult
from isoloss.engine.run.session import Session
from isoloss.parallel.rank0 import is_main


def train_rl(config: RLConfig, run_name: str) -> RunResult:
    """Run reinforcement learning, from files of prompts to an exported model. Every rank of the world calls it.

    run_name: name of the default output folder, `runs/<run_name>`.
    Raises UserError for what the user can fix; nothing has been written by then unless training had started.
    """
    with Session(config, run_name, load_data, check) as session:
        config, data = session.config, session.data
        rewarder = session.enter_context(open_rewarder(config, data))
        policy = session.open_engine()
        reference = None
        if config.algorithm.uses_reference:
            session.pin(fingerprint(session.source))
            reference = Reference(policy, offload=config.algorithm.reference_offload)
        critic = Critic(config, policy) if config.algorithm.uses_critic else None
        folder = session.open_folder()
        models = Models(session.enter_context(closing(Scatter(policy.mesh))), policy, reference, critic)
        others = [model for model in (reference, critic) if model is not None]
        rollout = session.enter_context(open_rollout(config, policy, data, rewarder, folder, others))
        return _train(config, data, models, rollout, session.open_run(policy, folder, watched(config)))


def check(config: RLConfig) -> None:
    """Refuse a missing key of the servers, and functions that cannot be imported or called."""
    api_key_of(config.rollout)
    check_functions(config.algorithm.advantage, config.algorithm.loss)


def _train(config: RLConfig, data: RLData, models: Models, rollout: Rollout, run: Run) -> RunResult:
    policy, critic = models.policy, models.critic
    log, loss = RolloutLog(run.metrics), policy_loss(config)
    batch = restore(run, models, rollout)
    run.print([*banner(config, data, run), *copy_of_the_model(config, policy)])
    if is_main():
        data.rejects(config.data).write(run.output_dir)
        run.print(first_prompts(config, data))

    def save_now() -> None:
        save(run, critic, batch, rollout)

    for step in run.steps(lambda step: evaluate(rollout, data, log, step), save_now):
        if batch.exhausted:
            rollout.sync_weights(step)
            groups = sample_groups(rollout, config)  # generated and rewarded as their waves are taken
            batch = make_batch(groups, models, step, config)
            log.batch(step + 1, groups, batch)
            del groups  # the steps need the samples alone
        samples, batch = batch.next()
        samples = models.scatter.hold(samples)
        values = critic.train_step(samples) if critic else {}
        metrics, result = policy.train_step(samples, loss, run.lr(), run.limits())
        of_rollout = {**batch.stats, **rollout.take_seconds(), **rollout.take_counts()}
        run.log(samples, metrics, result, {**values, **of_rollout}, log.told)

    ended = run.finish()
    run.print(summary(ended))
    return ended


def make_batch(groups: SampledGroups, models: Models, step: int, config: RLConfig) -> RolloutBatch:
    """Return the batch whose first optimizer step is `step`. The models pass over a wave of completions while the next
    one is generated, if the backend can do both. Collective over the world."""
    asked = [sample for wave in groups.waves for sample in with_logprobs(wave, models, config)]
    samples = models.scatter.make(lambda: with_advantages(asked, groups.kept, config))
    steps = minibatches([sample.group for sample in samples], step, config, sequence_numbers(samples))
    return RolloutBatch(tuple(samples), steps, batch_stats(groups))


def evaluate(rollout: Rollout, data: RLData, log: RolloutLog, step: int) -> dict[str, float]:
    """Return metrics of one completion of every prompt of data.eval, generated with the present weights."""
    if data.eval is None:
        return {}
    rollout.sync_weights(step)
    trajectories = rollout.evaluate(data.eval.prompts)
    log.evaluation(step, trajectories)
    return {**rollout_stats(trajectories), **rollout.take_counts()}


def save(run: Run, critic: Critic | None, batch: RolloutBatch, rollout: Rollout) -> None:
    """Save a checkpoint. The critic's comes first: where the policy has a checkpoint, its critic has one too."""
    run.save({**batch.state(), "rollout": rollout.state()}, critic.stage if critic else None)


def restore(run: Run, models: Models, rollout: Rollout) -> RolloutBatch:
    """Load critic and rollout of the checkpoint that the run resumes from, and return the rest of its batch."""
    state = run.pop_resume_state()
    if state is None:
        return RolloutBatch()
    if models.critic is not None:
        models.critic.load(run.output_dir, run.done)
    rollout.restore(state["rollout"])
    return RolloutBatch.from_state(state, models.scatter)
