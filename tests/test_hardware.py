"""Named devices and links."""

import pytest

from torchrec_dreamshard.hardware import HARDWARE, LINKS_GB_S, named_hardware, resolve_hardware
from torchrec_dreamshard.types import HardwareSpec


def test_known_devices():
    assert set(HARDWARE) == {"v100", "a100", "h100", "h200", "cpu"}
    assert all(spec.name == name for name, spec in HARDWARE.items())
    bandwidths = [HARDWARE[name].memory_gb_s for name in ("cpu", "v100", "a100", "h100", "h200")]
    assert bandwidths == sorted(bandwidths)


def test_links_and_precision_can_be_chosen():
    spec = named_hardware("a100", intra_host="pcie", inter_host="network_100g", comms_dtype="fp16")
    assert (spec.intra_host_gb_s, spec.inter_host_gb_s) == (LINKS_GB_S["pcie"], LINKS_GB_S["network_100g"])
    assert spec.comms_dtype == "fp16"
    assert named_hardware("a100") == HARDWARE["a100"]


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown hardware 'b100'; known are a100, cpu, h100, h200, v100"):
        named_hardware("b100")
    with pytest.raises(ValueError, match="unknown link 'string'; known are .*nvlink4"):
        named_hardware("a100", intra_host="string")


def test_records_pass_through():
    spec = HardwareSpec(name="mine", memory_gb_s=1.0)
    assert resolve_hardware(spec) is spec
    assert resolve_hardware("h200") == HARDWARE["h200"]
