"""Package metadata; the tools' settings are in pyproject.toml."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

# Versions that belong together. On a host without an NVIDIA GPU, TorchRec itself is installed with --no-deps (see the
# Makefile), because it requires the CUDA build of FBGEMM; its other requirements are therefore named in "cpu".
TORCH = "torch==2.13.0"
EXTRAS = {
    "cpu": [TORCH, "fbgemm-gpu-cpu==1.8.0", "tensordict", "torchmetrics==1.0.3", "pyre-extensions"],
    "cuda": [TORCH, "fbgemm-gpu==1.8.0", "torchrec==1.8.0"],
    "plot": ["matplotlib"],
    "dev": ["mypy==2.4.1", "pre-commit", "pytest", "ruff==0.17.6"],
}


def version() -> str:
    """``__version__`` of the package, read without importing it (its requirements may not be installed yet)."""
    text = (ROOT / "torchrec_dreamshard" / "__init__.py").read_text(encoding="utf-8")
    return re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE).group(1)


setup(
    name="torchrec_dreamshard",
    version=version(),
    description="A learned planner for TorchRec's embedding tables (DreamShard, arXiv 2210.02023)",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="torchrec_dreamshard contributors",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["torchrec_dreamshard", "torchrec_dreamshard.*"]),
    package_data={"torchrec_dreamshard": ["py.typed", "checkpoints/*", "data/*"]},
    install_requires=["torch>=2.13", "numpy", "safetensors", "tqdm"],
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["dreamshard = torchrec_dreamshard.cli:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
