"""The command line's root; each command has its own test file."""

import argparse
import json
import os
import subprocess
import sys
import types

import pytest

from torchrec_dreamshard import InfeasiblePlacementError, MeasurementError, __version__
from torchrec_dreamshard.cli import COMMANDS, common, main


@pytest.fixture
def command(monkeypatch):
    """Puts a command of our own in the place of ``compare``; returns a setter of what it does."""
    fake = types.ModuleType("torchrec_dreamshard.cli.compare")

    def add_parser(subparsers):
        parser = subparsers.add_parser("compare")
        parser.add_argument("--store", default="rows.jsonl")
        parser.add_argument("--num", type=common.positive_int, default=1)
        common.add_common_arguments(parser, kept="finished rows stay in {store}")

    fake.add_parser = add_parser
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    return lambda run: setattr(fake, "run", run)


def raising(error):
    def run(args):
        raise error

    return run


def one_line(capsys) -> str:
    out, err = capsys.readouterr()
    assert out == "" and err.endswith("\n") and err.count("\n") == 1 and "Traceback" not in err, (out, err)
    return err.rstrip("\n")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("rows must be\nat least 1"), 2, "error: rows must be at least 1"),
        (FileNotFoundError(2, "No such file or directory", "x.json"), 2, "error: x.json: No such file or directory"),
        (ImportError("needs TorchRec"), 2, "error: needs TorchRec"),
        (InfeasiblePlacementError("shard a needs 5 bytes more"), 2, "error: shard a needs 5 bytes more"),
        (MeasurementError("out of memory"), 1, "error: out of memory"),
        (KeyboardInterrupt(), 130, "interrupted; finished rows stay in s.jsonl"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(command, capsys, error, code, message):
    command(raising(error))
    assert main(["compare", "--store", "s.jsonl"]) == code
    assert one_line(capsys) == f"dreamshard compare: {message}"


def test_a_bug_keeps_its_traceback(command):
    command(raising(KeyError("bug")))
    with pytest.raises(KeyError):
        main(["compare"])


def test_verbose_shows_the_traceback_of_an_input_error(command, caplog):
    command(raising(ValueError("bad")))
    assert main(["compare", "--verbose"]) == 2
    assert caplog.records[-1].exc_info is not None


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["compare", "--num", "0"],
        ["compare", "--num", "many"],
        ["compare", "--seed", "-1"],
        ["compare", "--wrong"],
        ["compare", "stray"],
    ],
)
def test_usage_errors_are_one_line_and_exit_code_2(command, capsys, arguments):
    command(lambda args: 0)
    assert main(arguments) == 2
    assert one_line(capsys).startswith("dreamshard")


def test_result_as_text_or_json(command, capsys):
    command(lambda args: common.emit(args, {"seed": args.seed}, "text") or 0)
    assert main(["compare"]) == 0
    assert capsys.readouterr().out == "text\n"
    assert main(["compare", "--json", "--seed", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 3}


def test_help_and_version_need_no_command_module(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text and summary in text for name, summary in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"dreamshard {__version__}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_the_common_options(name, capsys):
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "--json" in text and "--seed" in text
    assert main([name, "--seed", "x"]) == 2
    assert one_line(capsys).startswith(f"dreamshard {name}: error: argument --seed: must be an integer")


def test_module_and_console_script_are_the_same_command():
    outputs = []
    for start in ([sys.executable, "-m", "torchrec_dreamshard"], [os.path.join(sys.prefix, "bin", "dreamshard")]):
        if start[0] == sys.executable or os.path.exists(start[0]):
            outputs.append(subprocess.run([*start, "--help"], capture_output=True, text=True, check=True).stdout)
    assert len(set(outputs)) == 1 and outputs[0].startswith("usage: dreamshard")


def test_a_closed_pipe_ends_quietly():
    code = (
        "import sys, types; fake = types.ModuleType('c');"
        "fake.add_parser = lambda s: s.add_parser('compare');"
        "fake.run = lambda a: print('x' * 10**6) or 0;"
        "sys.modules['torchrec_dreamshard.cli.compare'] = fake;"
        "from torchrec_dreamshard.cli import main; sys.exit(main(['compare']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_argument_types():
    assert (common.int_range("5"), common.int_range("2-7")) == ((5, 5), (2, 7))
    assert common.positive_float("0.5") == 0.5
    for parse, texts in (
        (common.int_range, ("0", "7-2", "a", "-3")),
        (common.positive_float, ("0", "nan", "inf", "x")),
    ):
        for text in texts:
            with pytest.raises(argparse.ArgumentTypeError, match=f"got '{text}'"):
                parse(text)


def test_tables_are_aligned():
    assert common.format_table(("name", "ms"), [("a", "1.0"), ("long name", "10.25")]) == (
        "name          ms\n---------  -----\na            1.0\nlong name  10.25"
    )


def test_progress_is_silent_off_a_terminal(capsys):
    with common.progress_bar(3, "work") as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")
