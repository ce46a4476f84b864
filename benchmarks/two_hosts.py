"""Two hosts on one machine: network namespaces that a virtual cable joins, for trying launches over several hosts.

    python benchmarks/two_hosts.py [--ranks 1] [--mbit 1000] -- benchmarks/exchange_sweep.py
    python benchmarks/two_hosts.py -- -m torchrec_dreamshard profile --comms --out steps.jsonl

Starts one ``torchrun`` per host; what follows ``--`` is what ``torchrun`` runs. The hosts have names and network
interfaces of their own and reach each other by the cable only, whose bandwidth ``--mbit`` limits. They share the
cores and the file system. Needs Linux with user namespaces (``unshare``) and ``ip``; leaves nothing behind.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

INSIDE = "TWO_HOSTS_INSIDE"
ADDRESSES = ("10.0.0.1", "10.0.0.2")
# Says that its namespaces are there, waits for its end of the cable, names the host and becomes the launcher.
START = """set -e
echo >&{ready}
read -r _
hostname host{index}
ip link set lo up
ip address add {address}/24 dev cable{index}
ip link set cable{index} up
{shape}
exec "$@"
"""
SHAPE = "tc qdisc add dev cable{index} root tbf rate {mbit}mbit burst 256kb latency 200ms"


def start(index: int, args: argparse.Namespace) -> subprocess.Popen[str]:
    """A host, ready to get its end of the cable; a line on its standard input then launches the ranks."""
    shape = SHAPE.format(index=index, mbit=args.mbit) if args.mbit else ""
    is_ready, ready = os.pipe()
    script = START.format(index=index, address=ADDRESSES[index], shape=shape, ready=ready)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(index)]
    torchrun += ["--nproc-per-node", str(args.ranks), "--master-addr", ADDRESSES[0], "--master-port", "29500"]
    host = subprocess.Popen(
        ["unshare", "--net", "--uts", "sh", "-c", script, "sh", *torchrun, *args.command],
        stdin=subprocess.PIPE,
        text=True,
        bufsize=1,
        pass_fds=[ready],
        env={**os.environ, "GLOO_SOCKET_IFNAME": f"cable{index}", "NCCL_SOCKET_IFNAME": f"cable{index}"},
    )
    os.close(ready)
    os.read(is_ready, 1)
    return host


def run(args: argparse.Namespace) -> int:
    subprocess.run(["ip", "link", "add", "name", "cable0", "type", "veth", "peer", "name", "cable1"], check=True)
    hosts = [start(index, args) for index in range(2)]
    for index, host in enumerate(hosts):
        subprocess.run(["ip", "link", "set", f"cable{index}", "netns", str(host.pid)], check=True)
    for host in hosts:
        print("go", file=host.stdin)
    if hosts[1].wait():
        hosts[0].terminate()  # it would wait for the other until its rendezvous times out
    return max(abs(host.wait()) for host in hosts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of a host (default: 1)")
    parser.add_argument("--mbit", type=int, help="bandwidth of the cable in Mbit/s (default: what the machine can)")
    parser.add_argument("command", nargs="+", help="script with its arguments, or -m MODULE with its arguments")
    args = parser.parse_args()
    if INSIDE in os.environ:
        return run(args)
    inside = ["unshare", "--user", "--map-root-user", "--net", sys.executable, *sys.argv]
    return subprocess.run(inside, env={**os.environ, INSIDE: "1"}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
