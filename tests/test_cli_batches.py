import json

import numpy as np
import pytest
import torch
from torchrec import KeyedJaggedTensor

from torchrec_dreamshard.cli import main
from torchrec_dreamshard.profiling.batch_files import save_batch
from torchrec_dreamshard.table_files import load_features, load_tables

TABLES = "name,rows,dim,features,weight_dtype\nuser,100,8,,fp16\nitem,1000,16,clicked viewed,\n"


@pytest.fixture
def files(tmp_path):
    """A tables file and four batches of 50 samples: 1 user, half a clicked and 3 viewed items a sample."""
    rng = np.random.default_rng(0)
    (tmp_path / "tables.csv").write_text(TABLES)
    paths = []
    for index in range(4):
        lengths = np.concatenate([np.ones(50), np.arange(50) % 2, np.full(50, 3)]).astype(np.int64)
        users, items = rng.integers(0, 100, 50), rng.integers(0, 1000, 175)
        batch = KeyedJaggedTensor(
            keys=["user", "clicked", "viewed"],
            values=torch.from_numpy(np.concatenate([users, items])),
            lengths=torch.from_numpy(lengths),
        )
        paths.append(str(tmp_path / f"{index}.safetensors"))
        save_batch(paths[-1], batch)
    return tmp_path, paths


def _command(folder, paths, *extra, out="measured.json"):
    return [
        "profile", "--from-batches", *paths, "--tables", str(folder / "tables.csv"), "--out", str(folder / out), *extra
    ]  # fmt: skip


def test_batches_become_a_tables_file_that_the_commands_take(files, capsys):
    folder, paths = files
    assert main(_command(folder, paths, "--json", "--batches-per-step", "2")) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_batches"], result["num_steps"], result["tables"]["item"]["lookups"]) == (4, 2, 350)
    user, item = load_tables(folder / "measured.json")
    assert (user.pooling_factor, user.batch_size, user.weight_dtype, user.dim) == (1.0, 100, "fp16", 8)
    assert (item.pooling_factor, item.batch_size, item.num_features) == (3.5, 100, 2)
    assert sum(user.reuse_histogram) == pytest.approx(1) and user.reuse_histogram[1] > 0
    assert user.memory_is_default
    assert load_features(folder / "measured.json") == {"user": ("user",), "item": ("clicked", "viewed")}
    again = ["--tables", str(folder / "measured.json")]
    assert main([*_command(folder, paths, out="again.json"), *again]) == 0
    assert "item" in capsys.readouterr().out
    plan = ["plan", *again, "--world-size", "2", "--compute-device", "cpu", "--out", str(folder / "plan.json")]
    assert main([*plan, "--time-budget", "0.1"]) == 0
    store = ["--out", str(folder / "s.jsonl"), "--num-samples", "1", "--max-lookups", "500", "--repeats", "1"]
    assert main(["profile", *again, *store]) == 0


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--out", "measured.csv"], "must end in .json"),
        (["--comms"], "one process"),
        (["--batches-per-step", "5"], "at least 5, one step, got 4"),
        (["--tables", ""], "needs --tables"),
    ],
)
def test_impossible_arguments_are_one_line(files, capsys, extra, message):
    folder, paths = files
    assert main([*_command(folder, paths), *extra]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (folder / "measured.json").exists()


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ("name,rows,dim\nother,5,8\n", "table 'other', step 0 of the batches: a batch lacks the feature 'other'"),
        ("name,rows,dim\nuser,5,8\n", "table 'user', step 0 of the batches: ids must lie in 0 to 4"),
        ("name,rows,dim,features\nuser,100,8,2\n", "reads 2 features: give their names"),
    ],
)
def test_tables_that_do_not_fit_the_batches_are_one_line(files, capsys, tables, message):
    folder, paths = files
    (folder / "tables.csv").write_text(tables)
    assert main(_command(folder, paths)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (folder / "measured.json").exists()
