import json
import subprocess
import sys

import pytest

from torchrec_dreamshard.cli import main
from torchrec_dreamshard.samples import load_measurements

QUICK = ["--max-lookups", "500", "--max-gib", "0.002", "--max-tables", "3", "--repeats", "1", "--warmup", "0"]


def test_measures_resumes_and_reports(tmp_path, capsys):
    store = tmp_path / "s.jsonl"
    command = ["profile", "--out", str(store), *QUICK, "--json", "--seed", "3"]
    assert main([*command, "--num-samples", "2"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["measured"], first["stored"], first["failed"]) == (2, 2, 0)
    assert main([*command, "--num-samples", "4", "--repeat-first", "1"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (second["measured"], second["stored"], second["plan"]) == (3, 5, first["plan"])
    assert second["repeatability"]["total"]["pairs"] == 1
    assert len(load_measurements(store)) == 5


def test_text_report_names_the_store(tmp_path, capsys):
    store = tmp_path / "s.jsonl"
    assert main(["profile", "--out", str(store), *QUICK, "--num-samples", "1"]) == 0
    captured = capsys.readouterr()
    assert f"{store}: 1 measurements, 1 of them new, 0 failed" in captured.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "s.jsonl.gz"], "must be a .jsonl file"),
        (["--out", "s.csv"], ".jsonl"),
        (["--out", "s.jsonl", "--num-samples", "0"], "at least 1"),
        (["--out", "s.jsonl", "--budget-minutes", "-1"], "above 0"),
        (["--out", "s.jsonl", "--hardware", "abacus"], "unknown hardware 'abacus'"),
        (["--out", "s.jsonl", "--tables", "none.csv"], "none.csv"),
        ([], "--out"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert main(["profile", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_foreign_file_is_refused_and_kept(tmp_path, capsys):
    path = tmp_path / "notes.jsonl"
    path.write_text("my notes\n")
    assert main(["profile", "--out", str(path), *QUICK]) == 2
    assert "not a measurement store" in capsys.readouterr().err
    assert path.read_text() == "my notes\n"


@pytest.mark.distributed
def test_ranks_share_a_store_under_torchrun(tmp_path):
    store = tmp_path / "s.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command = ["-m", "torchrec_dreamshard", "profile", "--out", str(store), *QUICK, "--num-samples", "5", "--json"]
    done = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["measured"] == 5
    assert sorted(m.provenance.details["sample"] for m in load_measurements(store)) == [0, 1, 2, 3, 4]


@pytest.mark.distributed
def test_ranks_measure_steps_together_under_torchrun(tmp_path):
    store = tmp_path / "s.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "3"]
    command = ["-m", "torchrec_dreamshard", "profile", "--comms", "--out", str(store), *QUICK, "--json"]
    for num_samples, measured in ((2, 2), (3, 1)):
        run = [*launch, *command, "--num-samples", str(num_samples)]
        done = subprocess.run(run, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["measured"] == measured
    records = load_measurements(store)
    assert [record.task.num_devices for record in records] == [2, 3, 2]
    assert all(record.provenance.details["exchange"] == "measured" and record.cost.step_ms > 0 for record in records)


def test_steps_need_several_ranks(tmp_path, capsys):
    assert main(["profile", "--comms", "--out", str(tmp_path / "s.jsonl")]) == 2
    assert "torchrun" in capsys.readouterr().err
