"""generation_config.json: the stop tokens that it names, or one line."""

import json

import pytest

from isoloss.models.weights.generation_config import stops_of
from isoloss.parallel.runtime.errors import UserError

GENERATION = "generation_config.json"


@pytest.mark.parametrize(
    ("fields", "stops"),
    (({}, ()), ({"eos_token_id": None}, ()), ({"eos_token_id": []}, ()), ({"eos_token_id": 0}, (0,)),
     ({"eos_token_id": [7, 3, 9]}, (7, 3, 9)), ({"eos_token_id": 9, "temperature": 0.6}, (9,))),
)  # fmt: skip
def test_what_it_names(fields, stops, tmp_path):
    (tmp_path / GENERATION).write_text(json.dumps(fields))
    assert stops_of(tmp_path / GENERATION, 9) == stops


@pytest.mark.parametrize(
    ("text", "says"),
    (
        ("{bad", "is not valid JSON"), ("", "is not valid JSON"), ("[" * 100_000, "is not valid JSON"),
        ('{"eos_token_id": 3, "eos_token_id": 4}', "the key 'eos_token_id' stands twice"), ("\0\xff", "not valid JSON"),
        ("[]", "must hold a JSON object, not list"), ("null", "must hold a JSON object, not NoneType"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a pointer of Git LFS, .* git lfs pull"),
        ('{"eos_token_id": "3"}', "eos_token_id='3' must be .* and '3' is none"),
        ('{"eos_token_id": [[1], 2]}', r"eos_token_id=\[\[1\], 2\] must be .* and \[1\] is none"),
        ('{"eos_token_id": [2, null]}', "and None is none"), ('{"eos_token_id": -1}', "and -1 is none"),
        ('{"eos_token_id": true}', "and True is none"), ('{"eos_token_id": 3.0}', "and 3.0 is none"),
        ('{"eos_token_id": {"a": 1}}', "and {'a': 1} is none"),
    ),
    ids=("bad", "empty", "deep", "twice", "binary", "list", "null", "lfs", "text", "nested", "null inside", "negative",
         "true", "fraction", "object"),
)  # fmt: skip
def test_what_is_no_token_is_refused(text, says, tmp_path):
    (tmp_path / GENERATION).write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=rf"^{tmp_path}/{GENERATION}.* ?{says}") as error:
        stops_of(tmp_path / GENERATION)
    assert "\n" not in str(error.value)


def test_what_the_text_model_of_a_multimodal_one_names(tmp_path):
    path = tmp_path / "config.json"
    for said, stops in ((None, (4,)), (3, (3,)), ([], ())):
        path.write_text(json.dumps({"eos_token_id": said, "text_config": {"eos_token_id": 4}}))
        assert stops_of(path, 9) == stops
    path.write_text('{"text_config": {"eos_token_id": "4"}}')
    with pytest.raises(UserError, match="eos_token_id='4' must be"):
        stops_of(path, 9)


def test_a_token_of_another_vocabulary(tmp_path):
    (tmp_path / GENERATION).write_text('{"eos_token_id": [3, 10]}')
    assert stops_of(tmp_path / GENERATION, 10) == stops_of(tmp_path / GENERATION) == (3, 10)
    with pytest.raises(UserError, match=r"and 10 is none of 0 to 9; correct it"):
        stops_of(tmp_path / GENERATION, 9)
