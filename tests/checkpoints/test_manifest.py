"""The manifest of a checkpoint folder: written and read back; what is damaged is named."""

import json
import zlib

import pytest

from isoloss.models.weights.checkpoint_names import Style
from isoloss.models.weights.manifest import NAME, FileRecord, Manifest, check_checksums, check_sizes, crc32, read
from isoloss.parallel.runtime.errors import UserError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "huggingface").mkdir()
    for name in ("a.distcp", "huggingface/config.json"):
        (tmp_path / name).write_text(name)
    files = {name: FileRecord(len(name), crc32(tmp_path / name)) for name in ("a.distcp", "huggingface/config.json")}
    manifest = Manifest("converted", "llama", 131, Style.STACKED, ("bfloat16", "float32"), 12, files)
    (tmp_path / NAME).write_text(manifest.to_json())
    assert read(tmp_path) == manifest
    return tmp_path


def test_whole(folder):
    check_sizes(folder, read(folder))
    check_checksums(folder, read(folder))


def test_a_flipped_bit_is_named(folder):
    (folder / "a.distcp").write_text("a.distcq")
    check_sizes(folder, read(folder))
    check_checksums(folder, read(folder), ["huggingface/config.json"])
    with pytest.raises(UserError, match=r"a\.distcp is damaged \(its CRC-32 differs\); copy or convert"):
        check_checksums(folder, read(folder))


def test_a_file_cut_short_or_missing_is_named(folder):
    (folder / "a.distcp").write_text("a.dist")
    with pytest.raises(UserError, match=r"a\.distcp has 6 bytes instead of 8; copy or convert"):
        check_sizes(folder, read(folder))
    (folder / "a.distcp").unlink()
    with pytest.raises(UserError, match=r"lacks a\.distcp, which its isoloss.json names; copy or convert"):
        check_checksums(folder, read(folder))


def test_a_manifest_that_is_none_is_named(folder):
    fields = json.loads((folder / NAME).read_text())

    def refused(text, match):
        (folder / NAME).write_text(text)
        with pytest.raises(UserError, match=match) as caught:
            read(folder)
        assert NAME in str(caught.value) and "\n" not in str(caught.value)

    refused(json.dumps({**fields, "family": "llamb"}), r"is damaged \(its CRC-32 differs\)")
    del fields["crc32"]  # as of earlier versions
    (folder / NAME).write_text(json.dumps(fields))
    assert read(folder).family == "llama"
    refused("{", "is not valid JSON")
    refused("[]", "must hold a JSON object, not list")
    refused(json.dumps({**fields, "format": 2}), "format=2 is not 1; use the isoloss that wrote it")
    refused(json.dumps({**fields, "kind": "found"}), "kind='found' is not one of converted, trained")
    refused(json.dumps({**fields, "key_style": "other"}), "is damaged .*other")
    refused(json.dumps({**fields, "files": {"x": {"bytes": 1}}}), "is damaged .*crc32")
    refused(json.dumps({**fields, "files": 3}), "is damaged")
    refused(json.dumps({name: fields[name] for name in fields if name != "family"}), "is damaged .*family")
    (folder / NAME).unlink()
    with pytest.raises(UserError, match=r"isoloss.json is missing; the checkpoint is not complete"):
        read(folder)


def test_the_checksum_of_several_blocks_is_that_of_the_file(tmp_path):
    data = bytes(range(251)) * 40_000  # three blocks of 4 MiB
    (tmp_path / "large").write_bytes(data)
    assert crc32(tmp_path / "large") == f"{zlib.crc32(data):08x}"


def test_a_file_with_something_appended_is_named(folder):
    with (folder / "a.distcp").open("a") as file:
        file.write("x")
    with pytest.raises(UserError, match=r"a\.distcp has 9 bytes instead of 8"):
        check_sizes(folder, read(folder))
