"""Sort the metrics of a run into the groups that TensorBoard shows. Needs no torch.

A key of metrics.jsonl is `<group>/<key>` in TensorBoard: train/loss of earlier releases is loss/loss, and
train/reward_mean is reward/reward_mean. A key of eval.jsonl is eval/<key>, as it always was.
"""

OTHER = "other"  # group of what a user's own functions add

# Literal keys. What is between them and a slash before, such as the name of a data source, changes no group.
GROUPS = {
    "loss": "loss policy_loss kl_loss entropy_term value_loss weight_sum",
    "reward": "reward_mean reward_std pass@1 reward_errors reward_timeouts",
    "length": "response_length_mean response_length_first response_length_competing truncated_fraction",
    "policy": "kl entropy clip_fraction",
    "mismatch": """
        train_rollout_logprob_diff train_rollout_logprob_diff_max train_rollout_kl train_rollout_outliers
        train_rollout_correlation rejected_fraction staleness_mean staleness_max
    """,
    "optim": "grad_norm lr applied critic_grad_norm critic_lr",
    "time": """
        seconds train_seconds generate_seconds sync_seconds critic_seconds tokens_per_second mfu
    """,
    "data": """
        valid_tokens total_tokens computed_tokens sequences micro_batches groups_drawn groups_dropped
        groups_without_variance draw_rounds prompts_drawn prompts_trained prompts_in_flight prompts_left_over
        prompts_dropped_no_variance prompts_dropped_reward_failed prompts_dropped_faulted
    """,
    "agents": """
        turns_mean sessions_faulted sessions_lost tool_calls turns_with_tools
        turns_appended turns_spliced turns_branched
    """,
    "moe": "moe_aux_loss moe_z_loss dispatch_reruns routes_replayed",
    "servers": "servers_lost servers_returned requests_retried completions_lost syncs_retried",
}
GROUP_OF = {key: group for group, keys in GROUPS.items() for key in keys.split()}
PART_OF_REWARD = "reward/"  # begins the key of a part of the reward, by the name of its function


def tag(key: str) -> str:
    """Return the name of a key of metrics.jsonl in TensorBoard."""
    group = GROUP_OF.get(key.rpartition("/")[2])
    if group is None and key.startswith(PART_OF_REWARD):
        return key
    return f"{group or OTHER}/{key}"


def eval_tag(key: str) -> str:
    """Return the name of a key of eval.jsonl in TensorBoard."""
    return f"eval/{key}"
