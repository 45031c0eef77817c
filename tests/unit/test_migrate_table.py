"""Tables of another trainer's keys: what a row means, and mistakes in a file that are errors when it is loaded."""

from pathlib import Path

import pytest

from isoloss.tools.migrate.denominator import Denominator
from isoloss.tools.migrate.releases import Past
from isoloss.tools.migrate.settings import UNSET, Settings
from isoloss.tools.migrate.table import Source, load

HEAD = '[source]\ntrainer = "X"\nrecipe = "always sft"\n'
ROW = '[keys]\na = {to = "optim.lr", as = "number", default = 2}\n'


def doubled(s: Settings, key: str) -> float:
    return 2 * s.number(key)


def source_of(folder: Path, text: str) -> Source:
    (folder / "x.toml").write_text(HEAD + text)
    return load("x", globals(), folder)


def valued(source: Source, ours: str, **given):
    return source.ours[ours](source.settings(given))


@pytest.mark.parametrize(
    ("expression", "given", "value"),
    [
        ("number", {}, 2),
        ("doubled", {"a": 4}, 8),
        ("doubled b", {"b": 5}, 10),
        ("number b a", {}, 2),
        ("number b a", {"b": 3}, 3),
        ("positive or unset", {"a": 0}, UNSET),
        ("positive b or 1", {}, 1),
        ("has b and number or none", {}, "none"),
        ("has b and number or none", {"b": 1}, 2),
        ("has b and number or none", {"b": 1, "a": 0}, 0),
        ("has b and flag", {}, False),
        ("value b or null", {}, None),
        ("not has b", {}, True),
        ("either yes no", {"a": False}, "no"),
    ],
)
def test_an_expression_is_a_function_and_its_arguments(tmp_path, expression, given, value):
    source = source_of(
        tmp_path, f'[keys]\na = {{to = "optim.lr", as = "{expression}", default = 2}}\nb = {{to = "x"}}\n'
    )
    assert valued(source, "optim.lr", **given) == value


def test_what_is_lost_depends_on_the_value_and_on_the_other_keys(tmp_path):
    row = '[keys]\na = {to = "x", keeps = ["null", 1], when = "has b", why = "lost {doubled} of {number b}"}\n'
    source = source_of(tmp_path, row + 'b = {to = "y"}\n')
    row = source.row_of("a")
    assert row is not None
    said = [row.reason(source.settings(given), given.get("a")) for given in (
        {"a": 3, "b": 5}, {"a": 3}, {"a": 1, "b": 5}, {"b": 5})]  # fmt: skip
    assert said == ["lost 6.0 of 5.0", "", "", ""]


def test_the_longest_group_has_a_key_without_a_row_of_its_own(tmp_path):
    source = source_of(tmp_path, ROW + '[without]\nall = ["*"]\ngroup = ["a.*"]\n[changes]\none = ["a.b"]\n')
    rows = {key: source.row_of(key) for key in ("a", "a.b", "a.c", "b")}
    assert {key: row and row.key for key, row in rows.items()} == {"a": "a", "a.b": "a.b", "a.c": "a.*", "b": "*"}
    assert rows["a.b"] and (rows["a.b"].matter, list(rows["a.b"].keeps)) == ("result", [None, False])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[key]\na = {to = "x"}', "x.toml: section 'key' is none of before, changes, give, keys"),
        ('[keys]\na = {to = "x", was = 1}', r"x.toml: \[keys\] a: field 'was' is none of as, default"),
        ("[keys]\na = {default = 1}", r"\[keys\] a: has neither `to` nor `why`"),
        ('[keys]\na = {to = "x", matter = "results"}', "matter 'results' is none of result, give, nothing"),
        ('[keys]\na = {why = "x", as = "number"}', "no key of isoloss has a value"),
        (ROW + '[ours]\n"optim.lr" = "number a"', r"\[ours\] optim.lr: optim.lr has two values"),
        (ROW + '[without]\nx = ["a"]', r"\[without\] x: a has two rows"),
        (ROW + '[without]\nx = ["b.*.c"]', "`\\*` stands for the end of a name"),
        ("[give]\nx = {keeps = [1]}", r"\[give\] x: names no keys"),
        (ROW + '[without]\nx = {keys = ["b"], neutral = [1]}', "field 'neutral' is none of keeps, keys, when"),
        ('[keys]\na = {to = "x", as = "nombre"}', r"\[keys\] a: there is no function 'nombre'"),
        ('[keys]\na = {to = "x", as = "_raw"}', "there is no function '_raw'"),
        ('[keys]\na = {to = "x", why = "it is {nombre}"}', "there is no function 'nombre'"),
        (ROW + '[ours]\n"optim.clip" = "number b"', r"\[ours\] optim.clip: no row has the key 'b'"),
        (ROW + '[ours]\n"optim.clip" = "pair a"', "pair a: missing a required argument: 'second_key'"),
        ('[loss]\nmodes = "always sum"', r"\[loss\] modes: field 'modes' is none of count_fully_masked"),
        (ROW + '[before]\nx = "flag"', r"\[before\] x: flag: missing a required argument: 'key'"),
    ],
)
def test_a_mistake_in_a_table_is_an_error_with_its_place(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        source_of(tmp_path, text)


def test_a_row_of_a_file_that_is_included_is_a_second_row(tmp_path):
    (tmp_path / "common.toml").write_text(ROW)
    source = source_of(tmp_path, 'include = "common"\n')
    assert valued(source, "optim.lr") == 2
    with pytest.raises(ValueError, match=r"x.toml: \[keys\] a: a has two rows"):
        source_of(tmp_path, 'include = "common"\n' + '[keys]\na = {to = "y"}')


def test_a_loss_and_its_history_are_of_the_configuration(tmp_path):
    loss = '[loss]\nmode = "always token-mean"\nlength = "has a and number a or null"\n'
    source = source_of(tmp_path, ROW + loss + '[past]\nshort = "has a"\nlong = "not has a"\n')
    short, long = source.settings({"a": 3}), source.settings({})
    assert [source.loss(s) for s in (short, long)] == [Denominator("token-mean", length=3), Denominator("token-mean")]
    assert [source.past(s)[1] for s in (short, long)] == [["short"], ["long"]]


def test_a_field_that_a_release_has_not_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'factors'"):
        Past("verl", "sft", thread="PR 1", divided="tokens", factors="1")  # pyright: ignore[reportCallIssue]
