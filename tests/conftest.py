import pytest
import torch


def pytest_configure(config):
    # One thread per process: reductions then add in one order, and tests of several processes do not starve.
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
