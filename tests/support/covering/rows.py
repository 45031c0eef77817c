"""A covering array over everything that must not change a number: which settings stand together in a row of
tests/numerics/test_covering.py.

The rows are in rows.txt, so that their ids stay when a factor gets a value. This file says which rows can be,
what they have to cover, and chooses rows for what is missing:

    .venv/bin/python -m support.covering.rows      (in tests; prints how many rows it has kept and added)
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cache
from pathlib import Path

from isoloss.engine.config import rules
from isoloss.engine.config.schema import Config, ModelConfig
from isoloss.models.architecture import Architecture
from isoloss.parallel import Layout, UserError
from isoloss.parallel.aggregation import MODES
from support.covering.kinds import KINDS, architecture, depth

TABLE = Path(__file__).with_name("rows.txt")
MAX_RANKS = 8
DEGREES = {
    "tp": (1, 2, 4), "pp": (1, 2, 4), "vpp": (1, 2), "ulysses": (1, 2, 4, 8), "ring": (1, 2, 4), "ep": (1, 2, 4),
    "etp": (1, 2), "dp": (1, 2, 4),
}  # fmt: skip
# Of each setting that is not an axis, the values.
SETTINGS = {
    "loss": ("sft", "clip", "cispo", "gspo", "reinforce"),
    "aggregation": MODES,
    "budget": ("single", "several", "all"),  # samples in a micro-batch
    "recompute": ("keep", "full", "first", "parts"),
    "prefixes": ("whole", "shared"),
    "optimizer": ("plain", "distributed", "gathered-late"),
    "reduction": ("after", "overlapped"),
    "messages": ("exact", "bounded", "too-small"),  # between experts: moe.dispatch_bound
}
OF_A_LOSS = ("loss", "aggregation")
PLAIN = {name: values[0] for name, values in SETTINGS.items()} | {"budget": "all"}
EXPERTS_ONE_BY_ONE = ("gpt-oss",)  # which take no bound
RANKS_OF_A_START = 2  # what a row costs besides its ranks, in ranks
SHORTLIST = 12  # layouts whose settings are tried


@dataclass(frozen=True)
class Row:
    """One model on one layout with one value of each setting."""

    kind: str
    layout: str
    loss: str
    aggregation: str
    budget: str
    recompute: str
    prefixes: str
    optimizer: str
    reduction: str
    messages: str

    @classmethod
    def parse(cls, line: str) -> "Row":
        return cls(*line.split())

    def __str__(self) -> str:
        return " ".join(astuple(self))

    @property
    def name(self) -> str:
        """The id of its test."""
        return "-".join(astuple(self))

    def plain(self) -> "Row":
        """What it is compared with: the same model and loss on one rank, all else plain."""
        return replace(self, layout="1", **{name: PLAIN[name] for name in SETTINGS if name not in OF_A_LOSS})

    @property
    def ranks(self) -> int:
        return Layout.parse(self.layout).world_size


Part = tuple[str, str]  # a factor and its value
Covered = frozenset[Part]


@cache
def axes_of(layout: str) -> tuple[Part, ...]:
    """A layout as factors. Sequence parallelism is a value of tp, without which it means nothing."""
    parsed = Layout.parse(layout)
    degrees = {axis: str(getattr(parsed, axis)) for axis in DEGREES}
    if parsed.tp > 1 and not parsed.sequence_parallel:
        degrees["tp"] += "+nosp"
    return tuple(degrees.items())


def settings_of(row: Row) -> tuple[Part, ...]:
    return tuple((name, getattr(row, name)) for name in SETTINGS)


def pairs(row: Row) -> Iterator[Covered]:
    """Every two values that stand together."""
    parts = (("kind", row.kind), *axes_of(row.layout), *settings_of(row))
    return map(frozenset, itertools.combinations(parts, 2))


def triples(row: Row) -> Iterator[Covered]:
    """Those of the kind of model and two axes."""
    return (frozenset((("kind", row.kind), *two)) for two in itertools.combinations(axes_of(row.layout), 2))


# ---- which rows can be ----------------------------------------------------------------------------------------------


def admits(arch: Architecture, layout: Layout) -> bool:
    try:
        rules.check(Config(ModelConfig("anywhere")), arch, layout)
    except UserError:
        return False
    return True


@cache
def layouts_of(kind: str) -> tuple[str, ...]:
    """Of at most eight ranks, that the model admits. Four stages are not interleaved: that takes eight layers."""
    found = []
    for degrees in itertools.product(*DEGREES.values()):
        axes = dict(zip(DEGREES, degrees))
        tp, pp, vpp, ep, etp = (axes[axis] for axis in ("tp", "pp", "vpp", "ep", "etp"))
        of_stage = tp * axes["ulysses"] * axes["ring"] * axes["dp"]
        if pp * of_stage > MAX_RANKS or of_stage % (ep * etp) or (vpp > 1 and pp != 2):
            continue
        arch = architecture(kind, depth(Layout(pp=pp, vpp=vpp)))
        for sequence_parallel in (True, False) if tp > 1 else (False,):
            layout = Layout(**axes, sequence_parallel=sequence_parallel)
            if admits(arch, layout):
                found.append(str(layout))
    return tuple(found)


@cache
def admitted(kind: str, layout: str) -> tuple[bool, bool]:
    """Whether ranks there share the work of a weight, and whether experts' messages can have a bound."""
    parsed = Layout.parse(layout)
    experts = architecture(kind, 2).experts is not None and kind not in EXPERTS_ONE_BY_ONE
    return parsed.context * parsed.dp > 1, parsed.ep > 1 and experts


def possible(row: Row) -> bool:
    """Whether the settings go with each other, and with a layout that is one of the kind's."""
    shared, bounded = admitted(row.kind, row.layout)
    return (
        (row.loss != "gspo" or row.aggregation == "seq-mean-token-mean")  # others are refused
        and (shared or row.optimizer == "plain")  # else nothing is dealt out
        and (shared or row.reduction == "after")
        and (bounded or row.messages == "exact")
    )


# ---- the choice ------------------------------------------------------------------------------------------------------


def plainest(kind: str, layout: str) -> Row:
    return Row(kind, layout, *(values[0] for values in SETTINGS.values()))


def completed(kind: str, layout: str, gain: Callable[[Row], float]) -> Row:
    """A row of this kind and layout: one setting after the other as `gain` likes it best, then again with all known."""
    row = plainest(kind, layout)
    for name in (*SETTINGS, *SETTINGS):
        changes = [{name: value} for value in SETTINGS[name]]
        if name == "loss":  # of its one aggregation
            changes.append({"loss": "gspo", "aggregation": "seq-mean-token-mean"})
        row = max(filter(possible, (replace(row, **change) for change in changes)), key=gain)
    return row


def every_pair() -> set[Covered]:
    """All that stand together in some possible row."""
    found: set[Covered] = set()
    for kind, layout in candidates():
        parts = (("kind", kind), *axes_of(layout))
        of_settings = pairs_of_settings(*admitted(kind, layout))
        values = frozenset().union(*of_settings)
        found.update(map(frozenset, itertools.combinations(parts, 2)), of_settings)
        found.update(frozenset((part, value)) for part in parts for value in values)
    return found


def every_triple() -> set[Covered]:
    return {triple for kind, layout in candidates() for triple in triples(plainest(kind, layout))}


@cache
def candidates() -> tuple[tuple[str, str], ...]:
    return tuple((kind, layout) for kind in KINDS for layout in layouts_of(kind))


@cache
def pairs_of_settings(shared: bool, bounded: bool) -> frozenset[Covered]:
    """Of layouts that are alike in what they admit: every two values that go together, all others plain, or those of
    the loss with one aggregation."""
    place, found = next(each for each in candidates() if admitted(*each) == (shared, bounded)), set()
    bases = (plainest(*place), replace(plainest(*place), loss="gspo", aggregation="seq-mean-token-mean"))
    for (one, values), (other, others) in itertools.combinations(SETTINGS.items(), 2):
        for base, value, another in itertools.product(bases, values, others):
            row = replace(base, **{one: value, other: another})
            if possible(row):
                found.add(frozenset(((one, value), (other, another))))
    return frozenset(found)


def chosen(missing: set[Covered], of: Callable[[Row], Iterable[Covered]]) -> list[Row]:
    """Rows that cover what is missing, greedily: first the most of it for the work of its ranks."""
    found = []

    def worth(row: Row) -> float:
        return len(missing.intersection(of(row))) / (RANKS_OF_A_START + row.ranks)

    while missing:
        best = sorted(candidates(), key=lambda each: worth(plainest(*each)), reverse=True)[:SHORTLIST]
        row = max((completed(*each, gain=worth) for each in best), key=worth)
        if not worth(row):
            row = max((completed(*each, gain=worth) for each in candidates()), key=worth)
        found.append(row)
        missing = missing.difference(of(row))
    return found


def varied(rows: Sequence[Row]) -> list[Row]:
    """The same kinds and layouts, whose settings are free, with every value of each in turn; with steps in fp32, which
    cost as much as everything else, in every fourth."""
    found = []
    for index, row in enumerate(rows):
        for place, (name, values) in enumerate(SETTINGS.items()):
            turn = index // 4 if name == "optimizer" else index + index // len(values) + place
            changed = replace(row, **{name: values[turn % len(values)]})
            if changed.loss == "gspo" != row.loss:
                changed = replace(changed, aggregation="seq-mean-token-mean")
            if possible(changed) and (name != "optimizer" or index % 4 == 0):
                row = changed
        found.append(row)
    return found


# ---- the table -------------------------------------------------------------------------------------------------------


def read() -> tuple[list[Row], list[Row]]:
    """The rows that hold all pairs, and those besides that hold the triples of a kind and two axes as well."""
    first, _, others = TABLE.read_text().partition("\n\n")
    return [Row.parse(line) for line in first.splitlines()], [Row.parse(line) for line in others.splitlines()]


def still_possible(rows: Sequence[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if row.kind in KINDS
        and row.layout in layouts_of(row.kind)
        and all(getattr(row, name) in SETTINGS[name] for name in SETTINGS)
        and possible(row)
    ]


def main() -> None:
    kept = [still_possible(rows) for rows in read()] if TABLE.exists() else [[], []]
    seen = {pair for row in kept[0] for pair in pairs(row)}
    first = kept[0] + chosen(every_pair() - seen, pairs)
    seen = {triple for row in (*first, *kept[1]) for triple in triples(row)}
    others = kept[1] + varied(chosen(every_triple() - seen, triples))
    order = [row for kind in KINDS for row in others if row.kind == kind]
    first = [row for kind in KINDS for row in first if row.kind == kind]
    TABLE.write_text("\n".join(map(str, first)) + "\n\n" + "\n".join(map(str, order)) + "\n")
    print(f"{len(first)} rows of pairs, {len(others)} more of triples; kept {len(kept[0])} and {len(kept[1])}")


if __name__ == "__main__":
    main()
