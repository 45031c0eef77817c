"""Bugs that only a loss of reinforcement learning can show."""

from unittest import mock

import torch
import torch.distributed as dist

from isoloss.engine import losses as losses_module
from isoloss.parallel import sequence as sequence_module
from isoloss.parallel.collectives import sum_parts
from isoloss.tools.plants.plant import Plant, Run, means_differ, patch_prepare, with_weights


def _sequence_sum_of_its_own_shard():
    """The ratio of the part of a sequence that lies on this rank."""

    def own(values_N, document_N, num_documents, group):
        del group
        return values_N.new_zeros(num_documents).index_add(0, document_N, values_N)

    return mock.patch.object(losses_module, "sum_over_documents", own)


def _sequence_gradient_of_its_own_shard():
    """The right ratio, whose gradient forgets what the other ranks' losses made of it."""

    def forgetful(x, group):
        return sum_parts(x, group)

    return mock.patch.object(sequence_module, "sum_over_ranks", forgetful)


def _second_term_by_micro_batch_means():
    """The KL and entropy terms as means over the micro-batch, averaged, while the policy term is weighed rightly."""

    def change(batch, samples, plan, mesh):
        del samples
        share = len(plan.micro_batches[0]) * mesh.dp.size()

        def scale(index, weights_AN):
            del index
            tokens = torch.tensor(float(weights_AN.shape[1]), dtype=torch.float64, device=weights_AN.device)
            dist.all_reduce(tokens, group=mesh.context)
            others = torch.full_like(weights_AN[1:], 1 / (max(float(tokens), 1.0) * share))
            return torch.cat([weights_AN[:1], others])

        return with_weights(batch, scale)

    return patch_prepare(change)


def _uses_sequence_sums(run: Run) -> bool:
    return run.policy is not None and (run.policy.loss == "gspo" or run.policy.importance == "sequence")


RL = (
    Plant(
        "sequence-sum-of-its-own-shard",
        _sequence_sum_of_its_own_shard,
        lambda run: run.layout.context > 1 and _uses_sequence_sums(run),
        "a layout with ulysses or ring, and --loss gspo or another policy loss with algorithm.importance=sequence",
    ),
    Plant(
        "sequence-gradient-of-its-own-shard",
        _sequence_gradient_of_its_own_shard,
        lambda run: run.layout.context > 1 and run.policy is not None and run.policy.loss == "gspo",
        "a layout with ulysses or ring, and --loss gspo",
    ),
    Plant(
        "second-term-by-micro-batch-means",
        _second_term_by_micro_batch_means,
        lambda run: any(means_differ(run.targets, mode) for mode in run.others),
        "a KL or entropy term with an aggregation of its own, such as --loss clip algorithm.kl_coef=0.1 "
        "algorithm.kl_aggregation=seq-mean-token-mean",
    ),
)
