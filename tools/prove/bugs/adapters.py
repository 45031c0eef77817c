"""Bugs of adapters: what is summed, scaled, divided and switched off wrongly, as trainers have shipped it."""

import math
import types
from collections.abc import Callable

import torch

from isoloss.tools.prove.bugs.bug import AdapterTraits, PlantedBug, RunTraits, Wrong

ADAPTER, LAYER = "isoloss.models.lora.adapter", "isoloss.models.lora.layer.LayerAdapter"
FACTORS, CONFIG = "isoloss.models.lora.factors.Factors", "isoloss.models.lora.config.LoraConfig"


def _nothing_summed(sum_parts):
    del sum_parts
    return lambda adapter: None


def _added_after_the_collective(add):
    """Add the sum over ranks to the part of every rank, which the layer sums: so it counts once a rank."""

    def add_wrongly(layer, out_RO, low, b):
        ranks = layer.factors.a.shape[1] // layer.a.shape[1]
        add(layer, out_RO, low * ranks if layer.factors.row_parallel else low, b)

    return add_wrongly


def _copies_taken_for_shards(has_parts):
    def has_parts_wrongly(adapter, owned):
        factors = adapter._of_weight.get(f"{owned.weight.name.rsplit('.', 1)[0]}.weight")
        return has_parts(adapter, owned) != (factors is not None and factors.replicated)

    return has_parts_wrongly


def _marked(change) -> Wrong:
    """Return a change of what Megatron reads of a factor."""

    def wrong(mark):
        def mark_wrongly(factor, base, *, dim):
            mark(factor, base, dim=dim)
            change(factor)

        return mark_wrongly

    return wrong


def _reduced_as_dense(factor):
    factor.allreduce = True


def _counted_as_shard(factor):
    factor.tensor_model_parallel, factor.shared = True, False


def _rows_one_tensor_after_the_other(part_of_rows):
    return lambda factors, size, rank: part_of_rows(factors, size, rank).sort().values


def _first_a_for_all(add):
    def add_wrongly(layer, out_RO, low, b):
        parts = len(layer.factors.base.parts)
        add(layer, out_RO, low.chunk(parts, 1)[0].repeat(1, parts), b)

    return add_wrongly


def _uniform_by_shard(load):
    def load_wrongly(adapter, source):
        load(adapter, source)
        with torch.no_grad():
            for _, layer in adapter.layers:
                layer.a.mul_(math.sqrt(layer.factors.a.shape[1] / layer.a.shape[1]))

    return load_wrongly


def _without_a_gradient(preprocess):
    """Give the first stage of a pipeline an input without gradient. A model of one stage would fail with an error."""

    def preprocess_wrongly(chunk, *args, **kwargs):
        hidden, *others = preprocess(chunk, *args, **kwargs)
        return (hidden.detach() if chunk.pre_process and not chunk.post_process else hidden, *others)

    return preprocess_wrongly


def _last_layer_left_on(deactivate):
    def deactivate_wrongly(adapter):
        deactivate(adapter)
        for module, layer in adapter.layers[-1:]:
            module.adapter = types.SimpleNamespace(active=layer)

    return deactivate_wrongly


def _where(shows: Callable[[RunTraits, AdapterTraits], bool]) -> Callable[[RunTraits], bool]:
    """Return the condition of a bug that only a run with an adapter shows."""

    def must_fail_on(run: RunTraits) -> bool:
        return run.adapter is not None and shows(run, run.adapter)

    return must_fail_on


def _parts(run: RunTraits, adapter: AdapterTraits) -> bool:
    copies = run.layout.sequence_parallel and adapter.over(run.layout, "copied")
    return adapter.over(run.layout, "rows", "columns") or copies


def _groups_differ(run: RunTraits, adapter: AdapterTraits) -> bool:
    layout = run.layout
    return any(expert for expert, _ in adapter.divisions) and (layout.ep > 1 or layout.tp != layout.etp)


AN_ADAPTER = "an adapter (lora.rank)"
SPLIT = "and a layout with tp, or for adapters of experts etp"
ADAPTERS = (
    PlantedBug(
        "adapter-parts-not-summed",
        {f"{ADAPTER}.Adapter.sum_parts": _nothing_summed},
        _where(_parts),
        f"{AN_ADAPTER}, {SPLIT}",
    ),
    PlantedBug(
        "adapter-after-the-collective",
        {f"{LAYER}.add": _added_after_the_collective},
        _where(lambda run, adapter: adapter.over(run.layout, "rows")),
        f"{AN_ADAPTER} of matrices that write to the residual stream, {SPLIT}",
    ),
    PlantedBug(
        "adapter-of-latents-gathered",
        {f"{ADAPTER}.Adapter._has_parts": _copies_taken_for_shards},
        _where(lambda run, adapter: adapter.over(run.layout, "copied")),
        f"{AN_ADAPTER} of latent attention, and a layout with tp",
    ),
    PlantedBug(
        "expert-adapter-over-dp",
        {f"{ADAPTER}._mark": _marked(_reduced_as_dense)},
        _where(_groups_differ),
        f"{AN_ADAPTER} of experts, and a layout with ep, or another tp than etp",
    ),
    PlantedBug(
        "adapter-rows-not-interleaved",
        {f"{FACTORS}.part_of_rows": _rows_one_tensor_after_the_other},
        _where(lambda run, adapter: adapter.alternates),
        f"{AN_ADAPTER} of attention with several groups of heads",
    ),
    PlantedBug(
        "shared-a",
        {f"{LAYER}.add": _first_a_for_all},
        _where(lambda run, adapter: adapter.merges),
        f"{AN_ADAPTER} of matrices that Megatron-Core multiplies as one",
    ),
    PlantedBug(
        "adapter-scale",
        {f"{CONFIG}.scale": lambda scale: lambda lora, rank: lora.alpha},
        _where(lambda run, adapter: adapter.scaled),
        "an adapter with lora.rank above 1",
    ),
    PlantedBug(
        "adapter-init-by-shard",
        {f"{ADAPTER}.Adapter.load": _uniform_by_shard},
        _where(lambda run, adapter: adapter.over(run.layout, "rows")),
        f"{AN_ADAPTER} of matrices that write to the residual stream, {SPLIT}",
    ),
    PlantedBug(
        "frozen-input",
        {"isoloss.models.mcore.gpt.PackedGPT._preprocess": _without_a_gradient},
        _where(lambda run, adapter: run.layout.pp > 1 and adapter.recomputed),
        f"{AN_ADAPTER}, memory.recompute=full, and a layout with pp",
    ),
    PlantedBug(
        "adapter-norm-of-copies",
        {f"{ADAPTER}._mark": _marked(_counted_as_shard)},
        _where(lambda run, adapter: adapter.over(run.layout, "rows", "columns", "copied")),
        f"{AN_ADAPTER}, {SPLIT}",
    ),
    PlantedBug(
        "adapter-not-off",
        {f"{ADAPTER}.Adapter.deactivate": _last_layer_left_on},
        _where(lambda run, adapter: True),
        AN_ADAPTER,
    ),
)
