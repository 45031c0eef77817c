"""Report a reinforcement learning run: statistics of batches and evaluations, and every completion by its id."""

import itertools
import math
from collections.abc import Mapping, Sequence

import torch

from isoloss.engine.batching.sample import sequence_numbers
from isoloss.engine.data.columns import mapping_lines
from isoloss.engine.data.mixture import told
from isoloss.engine.data.remarks import OWN_SYSTEM, remark_lines, repeat_lines
from isoloss.engine.data.show_rows import rows_to_show, shown_prompt
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.experience import RolloutBatch
from isoloss.engine.rl.group_sampling import SampledGroups
from isoloss.engine.rl.health import FIRST_ERROR
from isoloss.engine.rl.setup import RLData
from isoloss.engine.rl.trajectory import Trajectory
from isoloss.engine.run.metrics import MetricsLog
from isoloss.engine.run.records import EVAL_ROLLOUTS, ROLLOUTS
from isoloss.engine.run.run import Run, RunResult
from isoloss.engine.step.engine import Engine
from isoloss.models.weights.weight_map import num_parameters
from isoloss.parallel.rank0 import is_main

TABLE_ROWS = 8  # completions of a batch that TensorBoard shows


def completion_stats(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return mean and standard deviation of the valid rewards; pass@1: share of valid rewards of at least 1;
    reward_errors: completions without a valid reward; reward_timeouts: completions whose verification ran out of time,
    which gives 0; response_length_mean: tokens; truncated_fraction: share that reached max_new_tokens."""
    rewards = [t.reward for t in trajectories if t.valid]
    count, all_of = max(len(rewards), 1), max(len(trajectories), 1)
    mean = sum(rewards) / count
    return {
        "reward_mean": mean,
        "reward_std": (sum((r - mean) ** 2 for r in rewards) / count) ** 0.5,
        "pass@1": sum(r >= 1 for r in rewards) / count,
        "reward_errors": len(trajectories) - len(rewards),
        "reward_timeouts": sum(t.timed_out for t in trajectories),
        "response_length_mean": sum(t.length for t in trajectories) / all_of,
        "truncated_fraction": sum(t.truncated for t in trajectories) / all_of,
    }


def rollout_stats(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return completion_stats of all, and of each data source if there are several, means of the reward's parts, and
    agent_stats."""
    stats = completion_stats(trajectories)
    sources = sorted({t.prompt.source for t in trajectories})
    for source in sources if len(sources) > 1 else ():
        source_stats = completion_stats([t for t in trajectories if t.prompt.source == source])
        stats |= {f"{source}/{key}": value for key, value in source_stats.items()}
    names = sorted({name for t in trajectories for name in t.parts})
    for name in names if len(names) > 1 else ():
        parts = [t.parts[name] for t in trajectories if t.valid and name in t.parts]
        stats[f"reward/{name}"] = sum(parts) / max(len(parts), 1)
    return stats | agent_stats(trajectories)


# Keys of agent_stats.
AGENT_STATS = ("turns_mean", "sessions_faulted", "sessions_lost")
AGENT_COUNTS = ("tool_calls", "turns_with_tools", "turns_appended", "turns_spliced", "turns_branched")


def agent_stats(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return turns_mean: turns of a session; sessions_faulted: those with a fault; sessions_lost: those whose tries all
    had one; and AGENT_COUNTS. Nothing without an environment."""
    sessions = [trajectory for trajectory in trajectories if "tries" in trajectory.events]
    if not sessions:
        return {}
    return {
        "turns_mean": sum(len(t.completions) for t in sessions) / len(sessions),
        "sessions_faulted": sum(t.events["tries"] > 1 or t.error is not None for t in sessions),
        "sessions_lost": sum(t.error is not None for t in sessions),
        **{name: sum(t.events.get(name, 0) for t in sessions) for name in AGENT_COUNTS},
    }


def batch_stats(groups: SampledGroups) -> dict[str, float]:
    """Return statistics of all groups drawn for a batch, dropped ones included: the policy's own performance."""
    sampled = [*groups.kept, *groups.dropped]
    stats = rollout_stats([trajectory for group in sampled for trajectory in group.trajectories])
    return stats | {
        "groups_drawn": len(sampled),
        "groups_dropped": len(groups.dropped),
        "groups_without_variance": sum(not group.varied for group in sampled),
        "draw_rounds": groups.rounds,
        **groups.counts,
    }


class RolloutLog:
    """The log of completions: output_dir/rollouts.jsonl has a line for every completion generated for training, kept or
    dropped, and eval_rollouts.jsonl for every one of an evaluation; TensorBoard has a table of some of them.

    log: log of the run's metrics; its rank writes these files as well, and a resumed run continues them likewise.
    Keeps the first reward error of the last batch, which warnings quote. Enters no collective.
    """

    def __init__(self, log: MetricsLog):
        self._log = log
        self.told: Mapping[str, str] = {}
        if log.enabled:
            self._train = log.file(ROLLOUTS)
            self._eval = log.file(EVAL_ROLLOUTS, of_evaluations=True)

    def batch(self, step: int, groups: SampledGroups, batch: RolloutBatch) -> None:
        """Log a batch. step: the first optimizer step that the batch feeds."""
        if not self._log.enabled:
            return
        drawn = (t for group in (*groups.kept, *groups.dropped) for t in group.trajectories)
        errors = [f"{t.id}: {t.error}" for t in drawn if t.error]
        self.told = {FIRST_ERROR: errors[0]} if errors else {}
        numbers, lines = sequence_numbers(batch.samples), []
        pairs = itertools.groupby(zip(numbers, batch.samples), key=lambda pair: pair[0])
        for group in groups.kept:
            for trajectory in group.trajectories:
                samples = [sample for _, sample in next(pairs)[1]]
                advantages = torch.cat([sample.fields["advantages"][sample.mask_T] for sample in samples])
                values = {"advantage": float(advantages.mean()) if len(advantages) else 0.0}
                lines.append(_line(step, trajectory, {"kept": True, "masked": len(advantages) == 0} | values))
        for group in groups.dropped:
            lines += [_line(step, t, {"kept": False}) for t in group.trajectories]
        self._train.write(lines)
        self._log.text("rollouts", table(lines[:TABLE_ROWS]), step)

    def evaluation(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Log an evaluation. step: number of optimizer steps done."""
        if not self._log.enabled:
            return
        lines = [_line(step, trajectory, {}) for trajectory in trajectories]
        self._eval.write(lines)
        self._log.text("evaluation", table(lines[:TABLE_ROWS]), step)


def _line(step: int, trajectory: Trajectory, more: Mapping[str, object]) -> dict[str, object]:
    completions = trajectory.completions
    # JSON has no nan: the part of a function that failed is null.
    parts = {name: part if math.isfinite(part) else None for name, part in trajectory.parts.items()}
    return {
        "step": step,
        "id": trajectory.id,
        "prompt": trajectory.prompt.prompt,
        "completion": trajectory.text,
        "answer": trajectory.prompt.answer,
        "reward": trajectory.reward if trajectory.valid else None,
        **({"parts": parts} if len(parts) > 1 else {}),
        **({"error": trajectory.error} if trajectory.error else {}),
        "finish": completions[-1].finish if completions else None,
        "tokens": trajectory.length,
        "logprob": sum(sum(completion.logprobs) for completion in completions),
        "weight_versions": sorted({version for completion in completions for version in completion.versions}),
        **trajectory.events,
        **more,
    }


def table(lines: Sequence[Mapping[str, object]]) -> str:
    """Return a Markdown table of completions."""
    columns = [key for key in ("id", "completion", "answer", "reward", "advantage", "finish") if key in lines[0]]
    rows = [" | ".join(columns), " | ".join("---" for _ in columns)]
    for line in lines:
        rows.append(" | ".join(_cell(line.get(column)) for column in columns))
    return "\n".join(f"| {row} |" for row in rows)


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", "<br>")


def banner(config: RLConfig, data: RLData, run: Run) -> list[str]:
    """Return lines about the data, the algorithm and the output of the run that is about to start."""
    algorithm, rollout = config.algorithm, config.rollout
    batch = config.batch.global_size * rollout.num_generations
    dropped = f", {data.train.dropped:,} dropped for their length" if data.train.dropped else ""
    dropped += f", {data.train.repeated:,} rows that repeat one dropped" if data.train.repeated else ""
    held_out = "no data.eval"
    if data.eval:
        held_out = f"evaluated on {len(data.eval.prompts):,} of {', '.join(config.data.eval)}"
    prompts = f"prompts: {len(data.train.prompts):,} of {', '.join(config.data.paths('train'))}{dropped}; {held_out}"
    work = (
        f"algorithm: {algorithm.advantage} advantages, {algorithm.loss} loss, {config.loss.aggregation}; "
        f"{config.batch.global_size} prompts x {rollout.num_generations} completions -> {algorithm.minibatches} "
        f"mini-batch{'es' * (algorithm.minibatches > 1)} of {batch // algorithm.minibatches} x {algorithm.epochs} "
        f"epoch{'s' * (algorithm.epochs > 1)}"
    )
    drawn = run.total_steps // config.steps_per_batch * config.batch.global_size
    mixture = told(data.train.mixture, drawn, "prompt", "at least " if algorithm.dynamic_sampling else "")
    lines = [prompts, *mixture, *data.rejects(config.data).lines(run.output_dir)]
    if is_main():
        for key, rows in (("data.train", data.train), ("data.eval", data.eval)):
            lines += mapping_lines(key, rows.forms, config.data, prompts=True) if rows else []
            lines += remark_lines(key, {}, {OWN_SYSTEM: rows.keep_system}) if rows else []
        held_out_digests = data.eval.digests() if data.eval else ()
        taken, mixed = config.batch.global_size, data.train.mixture
        lines += repeat_lines(data.train.digests(), held_out_digests, taken, "prompt", "batch", mixed)
    lines.append(work)
    return run.banner("", lines, f"optimizer steps, rollouts by {rollout.backend}")


def first_prompts(config: RLConfig, data: RLData) -> list[str]:
    """Return lines that show the first data.show_rows prompts."""
    shown = data.train.prompts[: rows_to_show(config.data)]
    return [line for prompt in shown for line in shown_prompt(prompt.id, prompt.tokens, data.tokenizer)]


def copy_of_the_model(config: RLConfig, engine: Engine) -> list[str]:
    """Return a line about the GPU memory that generation inside the training processes takes, where it does."""
    if config.rollout.backend != "transformers" or engine.device.type == "cpu":
        return []
    gib = num_parameters(engine.arch) * engine.model.dtype.itemsize / 2**30
    return [
        f"memory: rollout.backend=transformers keeps a whole copy of the model on every GPU, {gib:.1f} GiB beside the "
        "trainer's; for a large model set rollout.backend=sglang"
    ]


def summary(result: RunResult) -> list[str]:
    """Return the closing lines of a finished run; the last says where its files are and what to do next."""
    lines = []
    if result.last_eval:
        first, last = result.first_eval, result.last_eval
        lines.append(
            f"eval: reward {last['reward_mean']:.3f} (before training {first['reward_mean']:.3f}), pass@1 "
            f"{last['pass@1']:.3f} (before {first['pass@1']:.3f})"
        )
    return [*lines, *result.idle, *result.adapter_lines(), result.closing_line("completions", "rollouts.jsonl")]
