"""Reading results: what is found, and one clear line for what cannot be read."""

import json
import os
import zipfile

import made_up
import pytest

from attngap.errors import AttngapError
from attngap.report.results import read
from attngap.storage.runs import Runs


def test_results_are_found_in_a_folder_and_one_below(tmp_path):
    made_up.diagnosis(tmp_path / "diagnosis")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    found = read([tmp_path])
    assert [result.kind for result in found.results] == ["diagnosis"]
    assert found.results[0].model == "tiny"


def test_a_result_given_twice_is_read_once(tmp_path):
    made_up.diagnosis(tmp_path)
    assert len(read([tmp_path, tmp_path / "diagnosis.json"]).results) == 1


def test_a_folder_without_a_result(tmp_path):
    (tmp_path / "notes.json").write_text("[1, 2]")
    with pytest.raises(AttngapError, match=r"No result in '.*'\. Results are written by: attngap diagnose"):
        read([tmp_path])


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(AttngapError, match=r"nothing' does not exist\. Give a folder that attngap wrote"):
        read([tmp_path / "nothing"])


def test_a_newer_schema_is_refused_by_name(tmp_path):
    made_up.diagnosis(tmp_path, schema="attngap.diagnosis/7")
    expected = r"has schema attngap\.diagnosis/7, this attngap reads up to attngap\.diagnosis/1\. Next: pip install"
    with pytest.raises(AttngapError, match=expected):
        read([tmp_path])


def test_a_truncated_file_is_told_from_a_strangers(tmp_path):
    made_up.diagnosis(tmp_path)
    file = tmp_path / "diagnosis.json"
    file.write_text(file.read_text()[:5000])
    with pytest.raises(AttngapError, match=r"diagnosis\.json' is cut off or damaged: .*line 1 column"):
        read([tmp_path])


def test_a_foreign_file_in_a_folder_is_passed_over_and_named(tmp_path):
    made_up.diagnosis(tmp_path)
    (tmp_path / "other.db").write_bytes(b"not a database")
    (tmp_path / "utf16.json").write_text("{}", encoding="utf-16")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    os.mkfifo(tmp_path / "pipe.json")
    found = read([tmp_path])
    assert [result.kind for result in found.results] == ["diagnosis"]
    assert len(found.skipped) == 3
    assert "nested too deeply" in found.skipped[0]
    with pytest.raises(AttngapError, match=r"Cannot read '.*utf16\.json'"):
        read([tmp_path / "utf16.json"])


@pytest.mark.parametrize("change", [{"heads": 3}, {"heads": [1]}, {"options": None}, {"heads": [{"id": "0.0"}]}])
def test_a_result_of_wrong_types_is_one_line(tmp_path, change):
    from attngap.report.build import report_page

    content = made_up.diagnosis(tmp_path)
    (tmp_path / "diagnosis.json").write_text(json.dumps(content | change))
    with pytest.raises(AttngapError, match=r"A result is not as attngap writes it .*diagnosis\.json'"):
        report_page(read([tmp_path]))


def test_a_small_file_that_unpacks_to_gigabytes_is_refused_before_it_does(tmp_path):
    from attngap.report.patterns import read_patterns

    with (
        zipfile.ZipFile(tmp_path / "patterns.npz", "w", zipfile.ZIP_DEFLATED) as archive,
        archive.open("text.npy", "w", force_zip64=True) as member,
    ):
        for _ in range(300):
            member.write(bytes(1_000_000))
    with pytest.raises(AttngapError, match=r"would unpack to 300 MB; pictures of heads take at most 256"):
        read_patterns(tmp_path / "diagnosis.json", 24, 256)


def test_truncated_patterns(tmp_path):
    from attngap.report.build import report_page

    made_up.diagnosis(tmp_path)
    file = tmp_path / "patterns.npz"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(AttngapError, match=r"patterns\.npz' is cut off or damaged"):
        report_page(read([tmp_path]))


def test_runs_are_read_and_other_databases_are_not_ours(tmp_path):
    made_up.runs(tmp_path / "runs.sqlite")
    ((path, records),) = read([tmp_path]).runs
    assert path.name == "runs.sqlite"
    assert len(records) == 6
    (tmp_path / "other.db").write_bytes(b"not a database")
    with pytest.raises(AttngapError, match=r"other\.db cannot be used as a run database"):
        read([tmp_path / "other.db"])


def test_the_made_up_results_follow_the_real_schemas(tmp_path):
    from attngap.diagnosis.result import Diagnosis

    content = made_up.diagnosis(tmp_path)
    assert Diagnosis.load(tmp_path).model_dump(by_alias=True)["heads"][3]["floor"] == content["heads"][3]["floor"]
    json.loads((tmp_path / "diagnosis.json").read_text())
    with Runs(made_up.runs(tmp_path / "runs.sqlite"), readonly=True) as runs:
        assert {record.spec["task"] for record in runs.records()} == {"mqar"}
