"""Bugs that only a loss of reinforcement learning can show."""

import torch
import torch.distributed as dist

from isoloss.parallel.collectives import sum_parts
from isoloss.tools.prove.bugs.bug import PlantedBug, RunTraits, means_differ, weights_changed


def _sum_of_its_own_shard(sum_over_documents):
    """The ratio of the part of a sequence that lies on this rank."""
    del sum_over_documents

    def own(values_N, document_N, num_documents, group):
        del group
        return values_N.new_zeros(num_documents).index_add(0, document_N, values_N)

    return own


def _second_term_by_micro_batch_means(samples, plan, mesh):
    """The KL and entropy terms as means over the micro-batch, averaged, while the policy term is weighed rightly."""
    del samples
    share = len(plan.micro_batches[0]) * mesh.dp.size()

    def change(index, weights_AN):
        del index
        tokens = torch.tensor(float(weights_AN.shape[1]), dtype=torch.float64, device=weights_AN.device)
        dist.all_reduce(tokens, group=mesh.context)
        others = torch.full_like(weights_AN[1:], 1 / (max(float(tokens), 1.0) * share))
        return torch.cat([weights_AN[:1], others])

    return change


def _uses_sequence_sums(run: RunTraits) -> bool:
    return run.policy is not None and (run.policy.loss == "gspo" or run.policy.importance == "sequence")


POLICY = (
    PlantedBug(
        "sequence-sum-of-its-own-shard",
        {"isoloss.engine.step.losses.sum_over_documents": _sum_of_its_own_shard},
        lambda run: run.layout.context > 1 and _uses_sequence_sums(run),
        "a layout with ulysses or ring, and --loss gspo or another policy loss with algorithm.importance=sequence",
    ),
    PlantedBug(
        "sequence-gradient-of-its-own-shard",
        # the right ratio, whose gradient forgets what the other ranks' losses made of it
        {"isoloss.parallel.sequence.sum_over_ranks": lambda sum_over_ranks: sum_parts},
        lambda run: run.layout.context > 1 and run.policy is not None and run.policy.loss == "gspo",
        "a layout with ulysses or ring, and --loss gspo",
    ),
    PlantedBug(
        "second-term-by-micro-batch-means",
        weights_changed(_second_term_by_micro_batch_means),
        lambda run: any(means_differ(run.targets, mode) for mode in run.others),
        "a KL or entropy term with an aggregation of its own, such as --loss clip algorithm.kl_coef=0.1 "
        "algorithm.kl_aggregation=seq-mean-token-mean",
    ),
)
