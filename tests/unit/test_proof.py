"""What proofs and verifications conclude from their numbers, worked out by hand."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from isoloss.engine.batching.sample import Sample
from isoloss.engine.config.schema import Config, LossConfig, ModelConfig
from isoloss.engine.rl.config import AlgorithmConfig
from isoloss.models.kinds.mappings import Replicated, Vocabulary
from isoloss.models.kinds.weight import Weight
from isoloss.models.weights.manifest import FileRecord
from isoloss.parallel import Layout, UserError
from isoloss.tools.convert import verify, verify_logits, verify_tensors
from isoloss.tools.convert.verify_logits import CEILING, LogitsEvidence
from isoloss.tools.convert.verify_models import Rounded, Unverified
from isoloss.tools.prove import certificate, proof
from isoloss.tools.prove.bugs import NO_BUG, PLANTED_BUGS, RunTraits
from isoloss.tools.prove.bugs.bug import means_differ
from isoloss.tools.prove.certificate import ProofRun, claims
from isoloss.tools.prove.parity import Case, Measurement, Norms, Tolerance, compare
from isoloss.tools.prove.proof import rollout_fields
from isoloss.tools.prove.routing import (
    Choices,
    LayerRouting,
    as_tensors,
    compare_choices,
    merge_routing,
    routing_faults,
)

WHOLE = Measurement(2.0, 2.0, {"kl": 0.5}, 1.0, 1.0, 1, None, {"a": Norms(1.0, 1.0, 0.0)})
TOLERANCE = Tolerance(loss=1e-12, gradient=1e-10)


@pytest.mark.parametrize("sign", (1, -1))
@pytest.mark.parametrize(
    ("field", "size", "says"), [("loss", 2e-9, "loss off by 1.0e-09"), ("grad_norm", 1e-9, "norm off by 1.0e-09")]
)
def test_what_is_too_small_is_as_wrong_as_what_is_too_large(field, size, says, sign):
    found = dataclasses.replace(WHOLE, **{field: getattr(WHOLE, field) + sign * size})
    assert says in compare(found, WHOLE, TOLERANCE).reason


@pytest.mark.parametrize("value", (math.nan, 0.5 + 1e-9, 0.5 - 1e-9))
def test_a_term_of_the_loss_that_differs_fails(value):
    against = compare(dataclasses.replace(WHOLE, details={"kl": value}), WHOLE, TOLERANCE)
    assert not against.passed and against.reason.startswith("kl is ")


@pytest.mark.parametrize(
    ("errors", "must_fail", "status", "says"),
    [
        ((1e-3, 1e-3, 0.0), (True, True, False), 1, "caught in 2 of 2 runs that must fail; 1 of 1 others pass"),
        ((1e-3, 0.0, 0.0), (True, True, False), 3, "NOT caught as it must be in 1 of 2 runs that must fail"),
        ((1e-3, 1e-3, 1e-3), (True, True, False), 3, "in 2 of 2 runs that must fail; 0 of 1 others pass"),
        ((0.0, 0.0, 0.0), (True, False, True), 3, "NOT caught as it must be in 0 of 2"),
    ],
)
def test_a_bug_that_is_missed_has_a_status_of_its_own(errors, must_fail, status, says, tmp_path, capsys, monkeypatch):
    titles = []
    monkeypatch.setattr(certificate, "draw", lambda rows, tolerance, title, path: titles.append(title))
    rows = []
    for error, must in zip(errors, must_fail, strict=True):
        found = dataclasses.replace(WHOLE, loss=WHOLE.loss * (1 + error))
        case = Case(0, LossConfig("token-mean"))
        rows.append(ProofRun(Layout(dp=2), case, found, compare(found, WHOLE, TOLERANCE), 2, must))
    sample = Sample(torch.arange(4), torch.arange(4) > 0)
    bug = PLANTED_BUGS["rank-local-denominators"]
    given = Config(ModelConfig("anywhere")), TOLERANCE, "fp64", bug
    assert certificate.report(rows, [sample, sample], tmp_path, *given) == status
    assert "anywhere, 2 samples, fp64:\n" in titles[0] and says in titles[0]
    assert f"planted bug {bug.name}: " in (last := capsys.readouterr().out.splitlines()[-1]) and says in last


def test_a_prompt_of_one_sample_with_targets_is_a_sequence():
    """The other sample of the prompt has none, so no mean over two is taken."""
    tokens = torch.arange(4)
    samples = [Sample(tokens, tokens > 0, 0), Sample(tokens, tokens < 0, 0)]
    against = compare(WHOLE, WHOLE, TOLERANCE)
    row = ProofRun(Layout.parse("dp2"), Case(0, LossConfig("prompt-mean-token-mean")), WHOLE, against, 2, False)
    assert claims([row], samples)["prompt-mean-token-mean"] == []


def test_the_same_row_again_is_no_second_row(monkeypatch):
    rows = [Sample(torch.arange(4), torch.arange(4) > 0)] * 3
    data = SimpleNamespace(train=type("Rows", (list,), {"order": 3})(rows))
    monkeypatch.setattr(proof, "read_architecture", lambda path: None)
    monkeypatch.setattr(proof, "load_data", lambda config, arch: data)
    monkeypatch.setattr(proof, "step_indices", lambda *args: np.array([1, 1, 1]))
    with pytest.raises(UserError, match="one row over and over"):
        proof.first_batch(Config(ModelConfig("anywhere")), NO_BUG)


def test_made_up_fields_are_nothing_where_nothing_is_asked():
    mask = torch.arange(9) % 3 > 0
    fields = rollout_fields(np.full(9, -1.0), mask, np.random.default_rng(0))
    assert all((values[~mask] == 0).all() and (values[mask] != 0).all() for values in fields.values())


# ---- where a bug shows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro_batches", "mode", "differ"),
    [
        (((2, 2), (4,)), "token-mean", False),  # as many tokens in each
        (((2, 2), (3,)), "token-mean", True),
        (((5,), (3,)), "seq-mean-token-mean", False),  # a sequence each
        (((5, 1), (3,)), "seq-mean-token-mean", True),
        (((4,), (4,)), "seq-mean-token-sum", True),  # a sum is never a mean
        (((4,),), "token-mean", False),
    ],
)
def test_where_means_of_means_differ(micro_batches, mode, differ):
    assert means_differ(micro_batches, mode) == differ


@pytest.mark.parametrize(
    ("layout", "tokens", "padded"),
    [("1", 7, False), ("ulysses2", 7, True), ("ulysses2", 8, False), ("tp2", 7, True), ("tp2+nosp", 7, False),
     ("tp2+ring2", 6, True), ("dp2", 0, True)],
)  # fmt: skip
def test_where_a_row_is_padded(layout, tokens, padded):
    run = RunTraits(Layout.parse(layout), ((tokens,) if tokens else (),), ((tokens,) if tokens else (),), "token-mean")
    assert run.padded == padded


@pytest.mark.parametrize(
    ("loss", "importance", "shows"), [("gspo", "none", True), ("clip", "sequence", True), ("clip", "token", False)]
)
def test_where_a_sum_of_one_shard_shows(loss, importance, shows):
    policy: Any = dataclasses.replace(AlgorithmConfig(), loss=loss, importance=importance)
    of = {
        text: RunTraits(Layout.parse(text), ((8,),), ((7,),), "token-mean", policy=policy)
        for text in ("ulysses2", "dp2")
    }
    bug = PLANTED_BUGS["sequence-sum-of-its-own-shard"]
    assert bug.must_fail_on(of["ulysses2"]) == shows and not bug.must_fail_on(of["dp2"])


# ---- choices of experts ---------------------------------------------------------------------------------------------


def test_a_token_that_chose_one_other_expert_flipped(tmp_path):
    """Three tokens, two of three experts each; the second exchanges one of its two, the third is another rank's."""
    chosen = torch.tensor([[1, 1, 0], [1, 1, 0], [0, 1, 1]], dtype=torch.bool)
    margins = torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64)
    everything = torch.ones(3, dtype=torch.bool)
    save_file(as_tensors({1: Choices(everything, chosen, margins)}), tmp_path / "reference")
    seen, other = torch.tensor([True, True, False]), chosen.clone()
    other[1], other[2] = torch.tensor([True, False, True]), False
    found = compare_choices({1: Choices(seen, other, margins.where(seen, math.inf))}, str(tmp_path / "reference"))
    assert found == {1: LayerRouting(tokens=2, margin=0.25, flips=1, flip_margin=0.25)}


def test_flips_of_all_ranks_are_told():
    quiet, flipped = LayerRouting(2, 0.5, 0, math.inf), LayerRouting(3, 0.25, 2, 0.125)
    merged = merge_routing([{1: quiet}, {1: flipped, 2: quiet}])
    assert merged == {1: LayerRouting(5, 0.25, 2, 0.125), 2: quiet}
    assert routing_faults(merged, merged) == ["routing flip: layer 1, 2 tokens, smallest margin 1.2e-01"]
    assert "chose experts for 2 tokens, not 5" in routing_faults({1: quiet}, {1: merged[1]})[0]


# ---- verification of a conversion -----------------------------------------------------------------------------------

EVIDENCE = LogitsEvidence((64,), 0, 100, 1e-6, 1.0, 1e-7, 2e-5, 2, 2)
VISITED = {1: torch.tensor([True, True])}


@pytest.mark.parametrize(
    ("change", "visited", "says"),
    [
        ({"max_difference": math.nan}, VISITED, "differ by nan"),
        ({"max_difference": 3e-5}, VISITED, "isoloss and transformers differ"),
        ({"tolerance": 2 * CEILING}, VISITED, "too much"),
        ({"experts_visited": 1}, {1: torch.tensor([True, False])}, "expert 1 of layer 1"),
    ],
)
def test_logits_are_judged(change, visited, says):
    verify_logits._judge(EVIDENCE, VISITED)
    with pytest.raises(Unverified, match=says):
        verify_logits._judge(dataclasses.replace(EVIDENCE, **change), visited)


def test_bits_are_compared_and_not_numbers():
    weight = Weight("w", (2,), (), Replicated())
    nan = torch.tensor([math.nan, 0.0])
    verify_tensors._compare(weight, nan, nan.clone())
    with pytest.raises(Unverified, match=r"w .* differs in 1 bytes"):
        verify_tensors._compare(weight, nan, torch.tensor([math.nan, -0.0]))


@pytest.mark.parametrize("row", (3, 4))
def test_rows_that_pad_the_vocabulary_are_zero(row):
    weight, stored = Weight("w", (3, 2), (), Vocabulary(3)), torch.ones(5, 2)
    stored[3:] = 0
    verify_tensors._check_padding(weight, stored)
    stored[row, 1] = 1e-30
    with pytest.raises(Unverified, match="pads the vocabulary"):
        verify_tensors._check_padding(weight, stored)


def test_weights_are_rounded_to_the_type_of_the_other_format():
    source: Any = SimpleNamespace(whole=lambda weight: torch.tensor([1 + 2**-12]))
    found = Rounded(source, {"w": torch.bfloat16}).whole(Weight("w", (1,), (), Replicated()))
    assert found.dtype == torch.bfloat16 and found.float().tolist() == [1.0]


def test_a_certified_folder_holds_what_was_written_and_nothing_else(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    written = {"a": FileRecord(3, "884863d2")}  # the CRC-32 of b"123"
    (tmp_path / "conversion.json").write_text("{}")
    verify.check_files(tmp_path, written)
    (tmp_path / "b").write_bytes(b"")
    with pytest.raises(Unverified, match="b was not written"):
        verify.check_files(tmp_path, written)
    with pytest.raises(Unverified, match="c is missing"):
        verify.check_files(tmp_path, {**written, "b": FileRecord(0, "00000000"), "c": FileRecord(1, "0")})
