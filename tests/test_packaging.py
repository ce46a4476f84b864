import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_dreamshard

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files that a wheel would hold, and its metadata, without building one."""
    folder = tmp_path_factory.mktemp("build")
    script = [sys.executable, "setup.py", "-q"]
    commands = (
        ["build", "--build-base", str(folder / "b"), "--build-lib", str(folder / "lib")],
        ["egg_info", "-e", str(folder)],
    )
    for command in commands:
        result = subprocess.run([*script, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
    return folder


def test_every_module_and_data_file_is_packaged(built):
    source = ROOT / "torchrec_dreamshard"
    expected = {p.relative_to(ROOT) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    packaged = {path.relative_to(built / "lib") for path in (built / "lib").rglob("*") if path.is_file()}
    assert not expected - packaged
    assert {"cpu.safetensors", "cuda.safetensors", "dlrm_856_tables.csv.gz", "py.typed"} <= {p.name for p in packaged}


def test_metadata(built):
    (info,) = built.glob("*.egg-info")
    metadata = importlib.metadata.PathDistribution(info)
    assert metadata.metadata["Name"].replace("-", "_") == "torchrec_dreamshard"
    assert metadata.version == torchrec_dreamshard.__version__
    assert metadata.metadata["Requires-Python"] == ">=3.10"
    (script,) = metadata.entry_points
    assert (script.name, script.group, script.value) == (
        "dreamshard",
        "console_scripts",
        "torchrec_dreamshard.cli:main",
    )
    assert script.load() is __import__("torchrec_dreamshard.cli", fromlist=["main"]).main


def test_changelog_names_the_version():
    assert f"## {torchrec_dreamshard.__version__} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
