"""Report of a dry run of a rank: plain numbers, which travel between processes as JSON."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from isoloss.tools.plan.recorder import Phase

# Kinds of memory that is live at a peak, by the files that allocate it. All other files allocate activations.
KINDS = {
    "loss head": ("isoloss/parallel/loss_head.py", "isoloss/models/model.py",
                  "isoloss/models/mcore/layers/value_head.py"),
    "exchange": ("isoloss/parallel/collectives.py", "isoloss/parallel/ring.py",
                 "megatron/core/tensor_parallel/mappings.py", "megatron/core/pipeline_parallel/p2p_communication.py",
                 "megatron/core/utils.py"),
}  # fmt: skip
# Phases whose allocations are all of one kind.
KEPT = {"build reference": "reference", "build critic": "critic", "weight sync": "weight sync"}
TOLD_SITES = 20


@dataclass(frozen=True)
class Exchange:
    """Collectives of one kind in a phase. nbytes: size of the inputs or of the outputs, whichever is larger."""

    op: str
    group: str
    ranks: int
    nodes: int
    dtype: str
    site: str
    calls: int
    nbytes: int


@dataclass(frozen=True)
class PhaseReport:
    """A phase of a step on one rank. Bytes, FLOPs and counts are of the whole phase.

    peak: largest number of live bytes; peak_site: file:line that allocates the last of them.
    peak_kinds: live bytes at the peak by kind. peak_sites: the largest of them by file:line.
    flops, launches, traffic: numbers by op; traffic is bytes that ops without FLOPs read and write.
    launch_sites: the launches by file:line.
    waits: (kind, file:line, count) of the times that the host waits for the device.
    """

    name: str
    peak: int
    after: int
    peak_site: str
    peak_kinds: Mapping[str, int]
    peak_sites: Mapping[str, int]
    flops: Mapping[str, int]
    launches: Mapping[str, int]
    launch_sites: Mapping[str, int]
    traffic: Mapping[str, int]
    waits: Sequence[tuple[str, str, int]]
    exchanges: Sequence[Exchange]

    @classmethod
    def of(cls, phase: Phase, resident: Mapping[str, int]) -> "PhaseReport":
        """Report a phase. resident: bytes that stay from the first phase on, by kind."""
        kinds, sites = Counter(resident), Counter()
        for (allocated_in, site), nbytes in phase.at_peak.items():
            if allocated_in != "build":
                kinds[KEPT.get(allocated_in) or kind_of(site)] += nbytes
            sites[site] += nbytes
        exchanges = [Exchange(**asdict(key), calls=phase.calls[key], nbytes=phase.sent[key]) for key in phase.calls]
        return cls(
            phase.name, phase.peak, phase.after, phase.peak_site, dict(kinds), dict(sites.most_common(TOLD_SITES)),
            dict(phase.flops), dict(phase.launches), dict(phase.launch_sites), dict(phase.traffic),
            [(*key, count) for key, count in phase.waits.most_common()], exchanges,
        )  # fmt: skip

    def less(self, nbytes: int) -> "PhaseReport":
        """Return the report for the case that `nbytes` of these bytes are never on the device."""
        return replace(self, peak=self.peak - nbytes, after=self.after - nbytes)


@dataclass(frozen=True)
class RankReport:
    """parameters: their number on this rank. micro_batches: their number in a step. tokens: their number in a
    micro-batch, over all ranks that share it. faults: (op, file:line, count) of ops that a device would refuse.
    """

    rank: int
    stage: int
    parameters: int
    micro_batches: int
    tokens: int
    phases: Sequence[PhaseReport]
    faults: Sequence[tuple[str, str, int]] = ()

    @property
    def peak(self) -> PhaseReport:
        """Return the phase with the highest peak. While the engine is built whole weights have no values, and seem to
        be on the device; in a run they are on the host."""
        return max((phase for phase in self.phases if phase.name != "build"), key=lambda phase: phase.peak)

    def phase(self, name: str) -> PhaseReport:
        return next(phase for phase in self.phases if phase.name == name)

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> "RankReport":
        values = json.loads(text)
        phases = [
            PhaseReport(**phase | {"exchanges": [Exchange(**e) for e in phase["exchanges"]]})
            for phase in values.pop("phases")
        ]
        return cls(**values, phases=phases)


def kind_of(site: str) -> str:
    return next((kind for kind, files in KINDS.items() if site.startswith(files)), "activations")
