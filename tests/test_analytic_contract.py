import pytest
from profiler_contract import ProfilerContract

from torchrec_dreamshard.hardware import HARDWARE
from torchrec_dreamshard.profiling.analytic import AnalyticProfiler


@pytest.mark.parametrize("name", sorted(HARDWARE), scope="class")
class TestAnalyticProfiler(ProfilerContract):
    @pytest.fixture
    def profiler(self, name):
        return AnalyticProfiler(name)

    @pytest.fixture
    def hardware(self, name):
        return HARDWARE[name]
