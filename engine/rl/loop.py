"""Run the reinforcement learning loop: prompts -> rollout -> reward -> advantage -> optimizer steps -> weights."""

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from torch import Tensor

from isoloss.engine.batching.distribute import Scatter
from isoloss.engine.batching.sample import sequence_numbers
from isoloss.engine.data.in_memory import GivenRows
from isoloss.engine.rl.algorithms import check_functions
from isoloss.engine.rl.backends.servers.api_key import api_key_of
from isoloss.engine.rl.config import AlgorithmConfig, RLConfig
from isoloss.engine.rl.critic import Critic
from isoloss.engine.rl.experience import (
    Models,
    RolloutBatch,
    minibatches,
    removed_fraction,
    with_advantages,
    with_logprobs,
    without_routes,
)
from isoloss.engine.rl.group_sampling import SampledGroups, sample_groups
from isoloss.engine.rl.health import watched
from isoloss.engine.rl.losses import policy_loss
from isoloss.engine.rl.reference import Reference, fingerprints
from isoloss.engine.rl.report import (
    RolloutLog,
    banner,
    batch_stats,
    copy_of_the_model,
    first_prompts,
    rollout_stats,
    summary,
)
from isoloss.engine.rl.reward.in_process import Reward, name_of, named
from isoloss.engine.rl.rollout import Rollout
from isoloss.engine.rl.setup import RLData, load_data, open_agents, open_rewarder, open_rollout
from isoloss.engine.run.callbacks import NO_CALLBACKS, Callbacks
from isoloss.engine.run.result import RunResult
from isoloss.engine.run.run import Run
from isoloss.engine.run.session import Session
from isoloss.engine.step.losses import Loss, TokenInputs
from isoloss.parallel.rank0 import is_main


def train_rl(
    config: RLConfig,
    run_name: str = "grpo",
    *,
    train: GivenRows | None = None,
    eval: GivenRows | None = None,
    reward: Reward | str | Sequence[Reward | str] | None = None,
    loss: Callable[[TokenInputs, AlgorithmConfig], Tensor] | None = None,
    callbacks: Callbacks = NO_CALLBACKS,
) -> RunResult:
    """Run reinforcement learning, from rows of prompts to an exported model. Every rank of the world calls this, with
    the same arguments; without torchrun this process is the world. It may be called again.

    run_name: name of the default output folder, `runs/<run_name>`.
    train, eval: rows of prompts in place of data.train and data.eval, as for `train_sft`.
    reward: function or functions in place of reward.function, with parameters by name as docs/rewards.md lists them. A
        function runs in this process, on rank 0, without reward.timeout; a name, such as "math", in worker processes.
    loss: function in place of algorithm.loss, which returns one number per target, [N].
    callbacks: functions that are called after steps, evaluations and checkpoints.
    Raises UserError for what the user can fix, and PreemptedError, after a checkpoint, where a signal ends the run.
    Before training only the cache of rows is written.

        def reward(completion, answer):
            return float(completion.strip() == answer)

        result = train_rl(RLConfig(ModelConfig("DIR")), train=[{"prompt": "2 + 2 =", "answer": "4"}], reward=reward)
    """
    config, rewards = with_functions(config, reward, loss)
    with Session(config, run_name, load_data, partial(check, loss=loss), {"train": train, "eval": eval}) as session:
        config, data = session.config, session.data
        rewarder = session.enter_context(open_rewarder(config, data, rewards))
        agents = session.enter_context(open_agents(config, data, session.source.arch))
        policy = session.open_engine()
        reference = None
        if config.algorithm.uses_reference:
            session.pin(*fingerprints(session.source, config.lora))
            reference = Reference(policy, offload=config.algorithm.reference_offload)
        critic = Critic(config, policy) if config.algorithm.uses_critic else None
        folder = session.open_folder()
        models = Models(session.enter_context(closing(Scatter(policy.mesh))), policy, reference, critic)
        others = [model for model in (reference, critic) if model is not None]
        rollout = session.enter_context(open_rollout(config, policy, data, rewarder, folder, others, agents))
        run = session.open_run(policy, folder, watched(config), callbacks)
        return _train(config, data, models, rollout, run, policy_loss(config, loss))


def with_functions(
    config: RLConfig, reward: Reward | str | Sequence[Reward | str] | None, loss: Callable[..., Tensor] | None
) -> tuple[RLConfig, dict[str, Reward]]:
    """Return the configuration with the names of these functions, and by name those that run in this process."""
    given = {} if reward is None else named(reward)
    if given:
        config = replace(config, reward=replace(config.reward, function=tuple(given)))
    if loss is not None:
        config = replace(config, algorithm=replace(config.algorithm, loss=name_of(loss)))
    return config, {name: function for name, function in given.items() if function is not None}


def check(config: RLConfig, loss: Callable[..., Tensor] | None = None) -> None:
    """Refuse a missing key of the servers, and functions that cannot be imported or called."""
    api_key_of(config.rollout)
    check_functions(config.algorithm.advantage, config.algorithm.loss, loss)


def _train(config: RLConfig, data: RLData, models: Models, rollout: Rollout, run: Run, loss: Loss) -> RunResult:
    policy, critic = models.policy, models.critic
    log = RolloutLog(run.metrics)
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
        values = critic.train_step(models.scatter.hold(without_routes(samples))) if critic else {}
        samples = models.scatter.hold(samples)
        metrics, result = policy.train_step(samples, loss, run.lr(), run.limits())
        of_rollout = {**batch.stats, **rollout.take_seconds(), **rollout.take_counts()}
        run.log(samples, metrics, result, {**values, **of_rollout}, log.told)

    ended = run.finish()
    lines = summary(ended)
    run.print(lines)
    return replace(ended, summary=lines)


def make_batch(groups: SampledGroups, models: Models, step: int, config: RLConfig) -> RolloutBatch:
    """Return the batch whose first optimizer step is `step`. The models pass over a wave of completions while the next
    one is generated, if the backend can do both. Collective over the world."""
    asked = [sample for wave in groups.waves for sample in with_logprobs(wave, models, config)]
    samples = models.scatter.make(lambda: with_advantages(asked, groups.kept, config))
    stats = batch_stats(groups)
    if config.algorithm.rejected == "removed":  # else the loss counts them
        stats = {**stats, "rejected_fraction": removed_fraction(asked, samples) if models.scatter.here else 0.0}
    steps = minibatches([sample.group for sample in samples], step, config, sequence_numbers(samples))
    return RolloutBatch(tuple(samples), steps, stats)


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
