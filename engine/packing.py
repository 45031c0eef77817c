"""Samples of a micro-batch -> one packed (THD) row -> this rank's slice of it.

Shape suffixes: T tokens of one sample, R of this rank's slice, N labelled positions in it, A aggregations of the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from isoloss.engine.batch import Sample
from isoloss.parallel import Mesh
from isoloss.parallel.ragged import Uploads
from isoloss.parallel.sequence import own_tokens, padded_document, padded_length
from isoloss.parallel.upload import upload


@dataclass(frozen=True)
class PackedBatch:
    """A micro-batch as one rank sees it.

    tokens_R, positions_R: int64; positions restart in every document.
    lengths: tokens of each document of the whole row, with the padding that some attention kernels want behind each;
        padding of the row last. real_lengths: the same without the padding behind documents, for losses.
    document_R: the document of the row that each token belongs to; origin_R: where the token stands in the
        concatenation of all samples of the step. -1 for padding and dummy tokens.
    length_S: real_lengths on the device.
    labelled_N: indices into the slice of the positions that predict a target; targets_N: those targets.
    weights_AN: fp64, from the normalizer. fields: per-target tensors of the samples, [N].
    longest: tokens of the longest whole row that a data-parallel rank has of this micro-batch, with padding.
    uploads: what attention has told the device of the row, for all chunks of the model.
    """

    tokens_R: Tensor
    positions_R: Tensor
    lengths: tuple[int, ...]
    real_lengths: tuple[int, ...]
    document_R: Tensor
    origin_R: Tensor
    length_S: Tensor
    labelled_N: Tensor
    targets_N: Tensor
    weights_AN: Tensor
    fields: Mapping[str, Tensor]
    longest: int = 0
    uploads: Uploads = field(default_factory=Uploads)

    @property
    def document_N(self) -> Tensor:
        """The document of the row that each target belongs to."""
        return self.document_R[self.labelled_N]

    @property
    def origin_N(self) -> Tensor:
        """Where each target stands in the concatenation of all samples of the step."""
        return self.origin_R[self.labelled_N] + 1


def pack(
    samples: Sequence[Sample],
    weights: Sequence[Tensor],
    offsets: Sequence[int],
    mesh: Mesh,
    device: torch.device,
    names: Sequence[str] = (),
    modes: int = 1,
) -> PackedBatch:
    """Pack samples, in order, into one row and take this rank's slice.

    weights: for each sample, weights for every token as a target, [A, T].
    offsets: of each sample, its start in the step.
    names, modes: fields of the step's samples and number of aggregations; a row of dummies has them too.
    Targets are shifted here, on whole rows, before sharding. No samples make a row of dummy tokens without labels,
    through which every parameter still gets a (zero) gradient.
    """
    spans = [padded_document(len(sample), mesh) for sample in samples]
    used = sum(spans)
    total = padded_length(used, mesh)
    tokens = torch.zeros(total, dtype=torch.int64)
    positions = torch.arange(total) - used
    label = torch.zeros(total, dtype=torch.bool)
    target_weights = torch.zeros((weights[0].shape[0] if weights else modes, total), dtype=torch.float64)
    origin = torch.full((total,), -1)
    document = torch.full((total,), -1)
    names = sorted({name for sample in samples for name in sample.fields}) if samples else names
    fields = {name: torch.zeros(total, dtype=torch.float64) for name in names}
    start = 0
    for index, (sample, weight_AT, offset, span) in enumerate(zip(samples, weights, offsets, spans)):
        end = start + len(sample)
        tokens[start:end] = sample.tokens_T
        # Padding of a document goes on in it: no token before it sees it, and it needs no mask of its own.
        positions[start : start + span] = torch.arange(span)
        predicts = slice(start, end - 1)  # position t predicts token t + 1
        label[predicts] = sample.mask_T[1:]
        target_weights[:, predicts] = weight_AT[:, 1:]
        origin[start:end] = torch.arange(offset, offset + len(sample))
        document[start:end] = index
        for name in names:
            fields[name][predicts] = sample.fields[name][1:].to(torch.float64)
        start += span
    targets = tokens.roll(-1)
    rest = (total - used,) if total > used else ()
    all_lengths = (*spans, *rest)
    own_R = own_tokens(all_lengths, mesh)
    labelled_N = label[own_R].nonzero().squeeze(1)
    at_N = own_R[labelled_N]
    real_lengths = (*map(len, samples), *rest)
    tokens_R, positions_R, document_R, origin_R, length_S, labelled_N, targets_N, *floats = _upload(
        [tokens[own_R], positions[own_R], document[own_R], origin[own_R], torch.tensor(real_lengths), labelled_N]
        + [targets[at_N], target_weights[:, at_N], *(row[at_N] for row in fields.values())],
        device,
    )
    return PackedBatch(
        tokens_R=tokens_R,
        positions_R=positions_R,
        lengths=all_lengths,
        real_lengths=real_lengths,
        document_R=document_R,
        origin_R=origin_R,
        length_S=length_S,
        labelled_N=labelled_N,
        targets_N=targets_N,
        weights_AN=floats[0],
        fields=dict(zip(fields, floats[1:])),
    )


def _upload(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of int64 and fp64 on the device, in one copy."""
    words = upload(torch.cat([tensor.flatten().view(torch.int64) for tensor in tensors]), device)
    parts = words.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.dtype).view_as(tensor) for part, tensor in zip(parts, tensors)]
