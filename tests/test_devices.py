import os
import socket
import subprocess
import types

import pytest
import torch

from torchrec_dreamshard.profiling import devices
from torchrec_dreamshard.profiling.devices import device_name, device_state, host_name, installed_versions, named_device

GPU = torch.device("cuda", 0)


def test_a_cpu_is_named_and_its_load_known():
    assert device_name(torch.device("cpu"))
    assert named_device(torch.device("cpu")) == "cpu"
    assert device_state(torch.device("cpu"))["load"] >= 0


@pytest.mark.parametrize(("model", "name"), [("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100")])
def test_a_gpu_gets_the_name_that_its_model_contains(monkeypatch, model, name):
    monkeypatch.setattr(devices, "device_name", lambda device: model)
    assert named_device(GPU) == name


def test_an_unknown_gpu_asks_for_a_name(monkeypatch):
    monkeypatch.setattr(devices, "device_name", lambda device: "GeForce 9")
    with pytest.raises(ValueError, match="'GeForce 9': name the closest of v100"):
        named_device(GPU)


def test_clocks_and_throttling_of_a_gpu(monkeypatch):
    asked = []

    def run(command, **_):
        asked.append(command)
        return types.SimpleNamespace(stdout="1980, 3201, 41, 0x0000000000000000\n")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(subprocess, "run", run)
    assert device_state(GPU) == {
        "clocks.sm": "1980",
        "clocks.mem": "3201",
        "temperature.gpu": "41",
        "clocks_throttle_reasons.active": "0x0000000000000000",
    }
    assert "--id=GPU-1-2" in asked[0]


def test_clocks_that_cannot_be_read_are_left_out_with_a_warning(monkeypatch, caplog):
    def run(command, **_):
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: types.SimpleNamespace(uuid="1-2"))
    monkeypatch.setattr(subprocess, "run", run)
    assert device_state(GPU) == {}
    assert "nvidia-smi" in caplog.text


def test_versions_name_torch_and_fbgemm():
    versions = installed_versions()
    assert versions["torch"] == torch.__version__
    assert any(name.startswith("fbgemm") for name in versions)


def test_a_network_namespace_is_a_host_of_its_own(monkeypatch):
    inodes = {"/proc/self/ns/net": 3, "/proc/1/ns/net": 3}
    monkeypatch.setattr(os, "stat", lambda path: types.SimpleNamespace(st_ino=inodes[path]))
    assert host_name() == socket.gethostname()
    inodes["/proc/self/ns/net"] = 7
    assert host_name() == f"{socket.gethostname()}/net:7"
