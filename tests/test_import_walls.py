"""Who may import what: the walls between measuring, learning and TorchRec."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_dreamshard

PACKAGE = Path(torchrec_dreamshard.__file__).parent


def imports_of(path: Path) -> set[str]:
    """Full names of everything that the file imports at any level, names taken from modules included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names.update(arg.value for arg in node.args if isinstance(arg, ast.Constant))
    return names


IMPORTS = {path.relative_to(PACKAGE): imports_of(path) for path in sorted(PACKAGE.rglob("*.py"))}


def importers(module: str) -> set[str]:
    """Top-level parts of the package (a folder, or a file of the root) with an import of ``module``."""
    return {
        path.parts[0]
        for path, names in IMPORTS.items()
        if any(name == module or name.startswith(f"{module}.") for name in names)
    }


@pytest.mark.parametrize(
    ("module", "allowed"),
    [
        ("fbgemm_gpu", {"profiling"}),
        ("torchrec", {"planner"}),
        # Measuring exchanges is profiling's; the planner only spreads rank 0's plan, or its error, over the ranks.
        ("torch.distributed", {"profiling", "planner"}),
        ("torchrec_dreamshard.planner", {"planner", "cli", "__init__.py"}),
        ("torchrec_dreamshard.profiling", {"profiling", "cli"}),
    ],
)
def test_only_its_own_part_imports(module, allowed):
    found = importers(module)
    assert found <= allowed, f"{module} is imported by {sorted(found - allowed)}"


def test_the_walk_sees_imports(tmp_path):
    source = "import a.b\ndef f():\n    from c.d import e\n    importlib.import_module('g.h')\n"
    (tmp_path / "x.py").write_text(source)
    assert imports_of(tmp_path / "x.py") == {"a.b", "c.d.e", "g.h"}
    assert importers("torch"), "no module imports torch: the walk is broken"


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import torchrec_dreamshard", ("torch", "torchrec", "fbgemm_gpu")),
        ("from torchrec_dreamshard import Agent, TrainConfig, train", ("torchrec", "fbgemm_gpu")),
        ("import torchrec_dreamshard.profiling.analytic", ("torchrec", "fbgemm_gpu")),
        ("from torchrec_dreamshard.cli import main; main(['--help'])", ("torch", "torchrec", "fbgemm_gpu")),
    ],
)
def test_imports_are_light(statement, absent):
    loaded = run_python(f"{statement}\nimport sys\nprint('MODULES', *sys.modules)").rpartition("MODULES")[2].split()
    assert "torchrec_dreamshard" in loaded
    assert not set(absent) & set(loaded)


def test_every_public_name_resolves():
    for name in torchrec_dreamshard.__all__:
        assert getattr(torchrec_dreamshard, name) is not None
    assert set(torchrec_dreamshard.__all__) <= set(dir(torchrec_dreamshard))
    with pytest.raises(AttributeError, match="no attribute 'Plannner'"):
        torchrec_dreamshard.Plannner  # noqa: B018


def test_without_torchrec_the_error_says_what_to_install():
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] == 'torchrec':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from torchrec_dreamshard import Agent\n"
        "try:\n"
        "    from torchrec_dreamshard import DreamShardPlanner\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    message = run_python(code)
    assert message.startswith("DreamShardPlanner needs TorchRec") and "pip install" in message
