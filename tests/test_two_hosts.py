"""Launches over several hosts: two launchers on this one, and two that only a virtual cable joins."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from torchrec_dreamshard.samples import load_measurements

pytestmark = pytest.mark.distributed

TWO_HOSTS = Path(__file__).parents[1] / "benchmarks" / "two_hosts.py"
QUICK = ["--max-lookups", "500", "--max-gib", "0.002", "--max-tables", "3", "--repeats", "1", "--warmup", "0"]
PROFILE = ["-m", "torchrec_dreamshard", "profile", *QUICK, "--json"]


def _may_isolate():
    cable = "ip link add name a type veth peer name b && hostname other"
    tried = ["unshare", "--user", "--map-root-user", "--net", "--uts", "sh", "-c", cable]
    try:
        return subprocess.run(tried, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_two_launchers_share_the_samples(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two"]
    stores = [tmp_path / f"{index}.jsonl" for index in range(2)]  # of hosts that share no file system
    launchers = [
        subprocess.Popen(
            [*launch, *PROFILE, "--num-samples", "5", "--out", str(store)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for store in stores
    ]
    outputs = [launcher.communicate(timeout=120) for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], outputs
    (result,) = (json.loads(out) for out, _ in outputs if out)  # of rank 0
    assert result["measured"] == 5
    samples = [m.provenance.details["sample"] for m in load_measurements(*stores)]
    assert sorted(samples) == [0, 1, 2, 3, 4]


@pytest.mark.skipif(
    not _may_isolate(),
    reason="two hosts on one machine need user and network namespaces (unshare, ip), which this one does not allow",
)
def test_hosts_of_an_exchange_are_told_apart(tmp_path):
    store = tmp_path / "s.jsonl"
    command = [sys.executable, TWO_HOSTS, "--", *PROFILE, "--comms", "--num-samples", "2", "--out", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    records = load_measurements(store)
    assert len(records) == 2 == json.loads(done.stdout)["measured"]
    for record in records:
        assert [device.host for device in record.task.devices] == [0, 1]
        assert record.provenance.details["hosts"] == ["host0", "host1"]
        assert record.provenance.details["exchange"] == "measured"
        assert (record.cost.backward_comms_ms > 0).all()
