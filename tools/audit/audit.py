"""Audit the data of a run: load its rows, count, compare and score them."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isoloss.engine.config.schema import Config
from isoloss.engine.data.chat import load_tokenizer
from isoloss.engine.data.dataset import check_files
from isoloss.engine.data.turn_ends import turn_ends
from isoloss.engine.rl.config import RLConfig
from isoloss.engine.rl.reward.rewarder import Rewarder
from isoloss.engine.rl.setup import stop_tokens
from isoloss.engine.run.folder import tokenizer_folder, with_date
from isoloss.engine.sft.loop import check_positions
from isoloss.models.families.registry import hf_folder, read_architecture
from isoloss.models.weights.side_files import declared_stops
from isoloss.parallel import UserError
from isoloss.tools.audit.answers import Answers, score_answers
from isoloss.tools.audit.figures import SplitFigures, Steps, split_figures, steps_of
from isoloss.tools.audit.findings import Finding, findings_of
from isoloss.tools.audit.repeats import find_repeats
from isoloss.tools.audit.rows import Split, load_split, read_again
from isoloss.tools.audit.template_facts import CHECKED, TemplateFacts, template_facts


@dataclass(frozen=True, eq=False)
class Audit:
    """The results of an audit.

    config: configuration of the run.
    splits: data.train, and data.eval if it is given.
    figures: counts of each split, in the same order.
    remarks: oddities of a row, by row, for each split.
    answers: rewards of the rows' own answers, for each split; empty for supervised fine-tuning.
    """

    config: Config
    tokenizer: Any
    splits: Sequence[Split]
    figures: Sequence[SplitFigures]
    remarks: Sequence[Mapping[int, list[str]]]
    answers: Sequence[Answers]
    steps: Steps
    template: TemplateFacts
    findings: Sequence[Finding]


def audit(config: Config, run_name: str) -> Audit:
    """Audit the data of a configuration. Raises UserError for a mistake with which no row can be read."""
    arch = read_architecture(config.model.path)
    check_files(config.data)
    if not isinstance(config, RLConfig):
        check_positions(config, arch)
    config = with_date(config, run_name)
    tokenizer = load_tokenizer(str(tokenizer_folder(config)), arch.vocab_size)
    train = load_split(config, arch, "train", tokenizer)
    splits = [train, load_split(config, arch, "eval", tokenizer)] if config.data.eval else [train]
    for split in splits:
        if not split.used.any():
            raise UserError(
                f"{split.key}: none of {len(split):,} rows is left: all are over {split.limit_key}={split.limit}"
            )
    repeats = find_repeats(splits)
    answers = _score(config, splits, tokenizer) if isinstance(config, RLConfig) else []
    budget = config.batch.max_tokens
    figures = [split_figures(split, budget, found.inside, found.in_train) for split, found in zip(splits, repeats)]
    facts = _template_facts(config, train, tokenizer)
    remarks = [_remarks(*parts) for parts in itertools.zip_longest(splits, (r.remarks for r in repeats), answers)]
    steps, findings = steps_of(config, arch, train), findings_of(figures, answers, facts)
    return Audit(config, tokenizer, splits, figures, remarks, answers, steps, facts, findings)


def _score(config: RLConfig, splits: Sequence[Split], tokenizer: Any) -> list[Answers]:
    """Score the rows' own answers. Raises UserError if a reward function cannot be used."""
    stop = stop_tokens(hf_folder(config.model.path), tokenizer, config.data.template_variables)[0]
    prompts = [prompt for split in splits for prompt in split.prompts]
    with Rewarder(config.reward, tokenizer, prompts, config.rollout.api_key_env) as rewarder:
        return [score_answers(config, split.prompts, rewarder, tokenizer, stop, split.key) for split in splits]


def _template_facts(config: Config, train: Split, tokenizer: Any) -> TemplateFacts:
    variables = config.data.template_variables
    ends = train.turn_ends if not train.prompts else turn_ends(tokenizer, variables)
    origins = [] if train.prompts else train.origins[:CHECKED].tolist()
    rows = read_again(train, {(file, number) for file, number in origins})
    declared = declared_stops(hf_folder(config.model.path))
    return template_facts(list(rows.values()), tokenizer, variables, ends, declared)


def _remarks(split: Split, repeated: Mapping[int, str], answers: Answers | None) -> dict[int, list[str]]:
    """Return the oddities of rows, by row."""
    rows: dict[int, list[str]] = {}
    marks = [
        (split.cut, "cut"),
        (split.dropped, "dropped"),
        (split.refused, "too long"),
        (split.all_targets, "all targets"),
    ]
    for marked, word in marks:
        for row in marked.nonzero()[0].tolist():
            rows.setdefault(row, []).append(word)
    for found in (repeated, answers.unscorable if answers else {}):
        for row, reason in found.items():
            rows.setdefault(row, []).append(reason)
    return rows
