import numpy as np
import pytest
import torch

from torchrec_dreamshard import CostBreakdown, Measurement, PlacementTask, ShardSpec
from torchrec_dreamshard.compute_fitting import folds
from torchrec_dreamshard.config import CostConfig
from torchrec_dreamshard.cost_network import make_cost_model
from torchrec_dreamshard.features import Normalizer, batch_tasks, placement_latents
from torchrec_dreamshard.fitting import TermReport, doubts, fit_cost_model
from torchrec_dreamshard.loads import collect_loads
from torchrec_dreamshard.physics import fit_nonnegative

CONFIG = CostConfig(num_members=2, num_steps=100, hidden=16)


def shards(rng, count):
    return [
        ShardSpec(
            rows=int(10 ** rng.uniform(3, 7)),
            dim=int(rng.choice([8, 16, 64])),
            pooling_factor=float(rng.choice([0, 1, 5, 20, 60])),
        )
        for _ in range(count)
    ]


def true_kernel_ms(some):
    work = sum(0.05 + s.pooling_factor * (0.02 + s.dim * 1e-3) for s in some)
    return 0.2 + work**0.9 if some else 0.0


def simulate(rng, *, num_devices=4, count=12, **only):
    task = PlacementTask.uniform(shards(rng, count), num_devices)
    placement = rng.integers(num_devices, size=count).tolist()
    parts = [[s for s, d in zip(task.shards, placement, strict=True) if d == k] for k in range(num_devices)]
    forward = np.array([true_kernel_ms(part) for part in parts])
    columns = np.array([sum(s.dim for s in part) for part in parts])
    exchange = np.full(num_devices, 0.1 + 0.01 * columns.max()) if num_devices > 1 else np.zeros(1)
    terms = {
        "forward_compute_ms": forward,
        "backward_compute_ms": 2 * forward,
        "forward_comms_ms": exchange + forward.max() - forward,
        "backward_comms_ms": exchange,
    }
    full = CostBreakdown(**terms)
    keep = only.get("only")
    cost = full if keep is None else CostBreakdown(**{name: getattr(full, name) for name in keep})
    return Measurement(task=task, placement=tuple(placement), cost=cost)


def samples(seed, number, **kwargs):
    rng = np.random.default_rng(seed)
    return [simulate(rng, **kwargs) for _ in range(number)]


def predict(model, measurement):
    tasks = batch_tasks([measurement.task])
    latents = placement_latents(
        model.encode(tasks), torch.tensor([measurement.placement]), measurement.task.num_devices
    )
    return model.predict(latents, tasks), latents


@pytest.fixture(scope="module")
def fitted():
    return fit_cost_model(samples(0, 60), CONFIG, seed=0)


def step_mape(model, measurements):
    return np.mean([abs(float(predict(model, m)[0].step_ms) / m.cost.step_ms - 1) for m in measurements])


def test_learns_and_beats_its_prior(fitted):
    model, report = fitted
    assert report.ready, report.reason
    assert report.terms["compute_ms"].mape < 0.05
    assert report.terms["compute_ms"].rank_correlation > 0.97
    assert step_mape(model, samples(1, 20)) < 0.05


def test_device_counts_never_seen(fitted):
    assert step_mape(fitted[0], samples(2, 10, num_devices=8, count=24)) < 0.12
    assert step_mape(fitted[0], samples(3, 10, num_devices=2, count=6)) < 0.12
    alone = samples(3, 1, num_devices=1, count=5)[0]
    assert float(predict(fitted[0], alone)[0].forward_comms_ms) == 0


def test_order_of_shards_and_devices_does_not_matter(fitted):
    m = samples(4, 1)[0]
    out, _ = predict(fitted[0], m)
    order = np.random.default_rng(0).permutation(m.task.num_shards)
    swapped = [3, 0, 2, 1]
    task = PlacementTask(tuple(m.task.shards[i] for i in order), m.task.devices, m.task.hardware)
    again, _ = predict(
        fitted[0], Measurement(task=task, placement=[swapped[m.placement[i]] for i in order], cost=m.cost)
    )
    assert torch.allclose(out.step_ms, again.step_ms, rtol=1e-5)
    assert torch.allclose(out.forward_comms_ms, again.forward_comms_ms[:, swapped], rtol=1e-4, atol=1e-5)


def test_adding_a_shard_never_makes_a_device_cheaper(fitted):
    model = fitted[0]
    tasks = batch_tasks([PlacementTask.uniform(shards(np.random.default_rng(5), 60), 2)])
    with torch.no_grad():
        running = model.encode(tasks)[0].cumsum(dim=0)
        costs = model.device_compute(running, tasks.hardware)
    assert (costs[0] > 0).all()
    assert (costs.diff(dim=0) >= -1e-5 * costs[1:]).all()


def test_an_empty_device_costs_nothing_and_an_empty_task_is_legal(fitted):
    model = fitted[0]
    empty = torch.zeros(3, model.latent_dim)
    assert model.device_compute(empty, torch.zeros(3, 7)).abs().max() == 0
    assert model.compute_std(empty, torch.zeros(3, 7)).abs().max() == 0
    tasks = batch_tasks([PlacementTask.uniform([], 2, background_ms=3.0)])
    out = model.predict(placement_latents(model.encode(tasks), torch.zeros(1, 0, dtype=torch.int64), 2), tasks)
    assert float(out.step_ms) == pytest.approx(3.0)


def test_padding_changes_nothing(fitted):
    model = fitted[0]
    small, large = samples(6, 1)[0], samples(7, 1, num_devices=9, count=30)[0]
    tasks = batch_tasks([small.task, large.task])
    placements = torch.zeros(2, 30, dtype=torch.int64)
    placements[0, :12], placements[1] = torch.tensor(small.placement), torch.tensor(large.placement)
    out = model.predict(placement_latents(model.encode(tasks), placements, 9), tasks)
    for row, m in enumerate((small, large)):
        assert torch.allclose(out.step_ms[row], predict(model, m)[0].step_ms[0], rtol=1e-5)


@pytest.mark.parametrize("form", ["physical", "paper"])
def test_two_fits_give_equal_tensors_and_survive_a_state_dict(form):
    config = CostConfig(form=form, num_members=2, num_steps=30, hidden=8)
    first, second = (fit_cost_model(samples(0, 10), config, seed=3)[0] for _ in range(2))
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )
    restored = make_cost_model(config)
    restored.load_state_dict(first.state_dict())
    m = samples(8, 1)[0]
    assert torch.equal(predict(first, m)[0].step_ms, predict(restored, m)[0].step_ms)


def test_a_fit_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    fit_cost_model(samples(0, 6), CONFIG, seed=1)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "only",
    [("compute_ms",), ("step_ms",), ("compute_ms", "step_ms"), ("forward_compute_ms", "backward_compute_ms")],
)
def test_partial_costs_are_used_for_what_they_know(only):
    rows = samples(0, 60, only=only)
    model, report = fit_cost_model(rows, CONFIG, seed=0)
    full = samples(1, 20)
    if "step_ms" in only:
        assert step_mape(model, full) < 0.12
    else:
        predicted = np.array([predict(model, m)[0].step_ms.item() for m in full])
        assert np.abs(predicted / [m.cost.compute_ms.max() for m in full] - 1).mean() < 0.08
    assert report.terms


def test_one_row_is_enough_to_fit_but_not_to_be_ready():
    model, report = fit_cost_model(samples(0, 1), CONFIG, seed=0)
    assert not report.ready and report.reason
    assert torch.isfinite(predict(model, samples(1, 1)[0])[0].step_ms).all()


def law_of(kernel, seed, number):
    """Measurements of one device each, whose compute is a function of the shards on it."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(number):
        some = shards(rng, int(rng.integers(2, 20)))
        cost = CostBreakdown(compute_ms=[kernel(some)])
        rows.append(Measurement(task=PlacementTask.uniform(some, 1), placement=(0,) * len(some), cost=cost))
    return rows


def work(some):
    return sum(0.1 + 0.01 * s.pooling_factor * s.dim for s in some)


def weight_cliff(some):
    """Costs rise where the tables outgrow a cache of 1 GB, whatever a batch reads."""
    gigabytes = sum(s.rows * s.dim * 4e-9 for s in some)
    return work(some) * (1 + 2 / (1 + gigabytes**-6))


def roofline(some):
    """Bound by bytes or by lookups, whichever takes longer."""
    return 0.1 + max(0.01 * sum(s.pooling_factor * s.dim for s in some), 0.25 * sum(s.pooling_factor for s in some))


@pytest.mark.parametrize(("kernel", "bound"), [(weight_cliff, 0.09), (roofline, 0.07)])
def test_caches_and_rooflines_are_learned_from_few_measurements(kernel, bound):
    model, report = fit_cost_model(law_of(kernel, 0, 300), CostConfig(num_members=2, num_steps=250), seed=0)
    test = law_of(kernel, 1, 100)
    predicted = np.array([predict(model, m)[0].step_ms.item() for m in test])
    assert np.abs(predicted / [m.cost.compute_ms[0] for m in test] - 1).mean() < bound
    assert report.ready


def test_fusion_holds_for_loads_never_seen():
    def kernel(some):
        return 0.3 + 2 * work(some) ** 0.7

    model, _ = fit_cost_model(law_of(kernel, 0, 200), CostConfig(num_members=2, num_steps=250), seed=0)
    large = shards(np.random.default_rng(3), 100)
    m = Measurement(task=PlacementTask.uniform(large, 1), placement=(0,) * 100, error="not measured")
    assert predict(model, m)[0].step_ms.item() == pytest.approx(kernel(large), rel=0.08)


def test_one_number_of_devices_does_not_make_the_exchange_grow_with_it():
    model, _ = fit_cost_model(samples(0, 60), CONFIG, seed=0)
    for devices in (2, 8, 32):
        m = samples(4, 1, num_devices=devices, count=3 * devices)[0]
        assert predict(model, m)[0].backward_comms_ms.mean().item() == pytest.approx(
            m.cost.backward_comms_ms.mean(), rel=0.35
        )


def test_single_devices_leave_the_exchange_to_the_bandwidths():
    model, report = fit_cost_model(law_of(work, 0, 60), CONFIG, seed=0)
    assert report.ready and "single device" in report.notes[0]
    m = samples(1, 1)[0]
    out, _ = predict(model, m)
    sent = max(sum(s.dim for s, d in zip(m.task.shards, m.placement, strict=True) if d == k) for k in range(4))
    expected = 65_536 * 4 * 0.75 * sent / (m.task.hardware.intra_host_gb_s * 1e6)
    assert out.backward_comms_ms.max().item() == pytest.approx(expected, rel=0.3)


def test_repeated_measurements_are_held_out_together():
    some = [m for m in samples(0, 10) for _ in range(3)]
    loads = collect_loads(some)
    assert loads.repeat.tolist() == [i // 3 for i in range(30)]
    assert len(set(folds(loads, 4).view(10, 3)[0].tolist())) == 1
    _, report = fit_cost_model(some, CONFIG)
    assert report.num_repeated == 20 and report.num_contradictory == 0


def test_failures_and_contradictions_are_told_apart():
    good = samples(0, 12)
    failed = Measurement(task=good[0].task, placement=good[0].placement, error="out of memory")
    with pytest.raises(ValueError, match="all 2 failed.*out of memory"):
        fit_cost_model([failed, failed], CONFIG)
    with pytest.raises(ValueError, match="got none"):
        fit_cost_model([], CONFIG)
    slow = CostBreakdown(step_ms=3 * good[0].cost.step_ms, compute_ms=3 * good[0].cost.compute_ms)
    contradiction = Measurement(task=good[0].task, placement=good[0].placement, cost=slow)
    _, report = fit_cost_model([*good, failed, contradiction], CONFIG)
    assert (report.num_failed, report.num_contradictory) == (1, 2)
    assert "2 measurements contradict" in report.notes[0]


def test_a_profiler_that_costs_nothing_is_learned_as_such():
    zero = [
        Measurement(task=m.task, placement=m.placement, cost=CostBreakdown(compute_ms=[0.0] * 4)) for m in samples(0, 8)
    ]
    model, _ = fit_cost_model(zero, CONFIG)
    assert float(predict(model, zero[0])[0].step_ms) < 1e-6


def test_continuing_adapts_to_other_hardware(fitted):
    slow = [
        Measurement(
            task=m.task,
            placement=m.placement,
            cost=CostBreakdown(
                forward_compute_ms=3 * m.cost.forward_compute_ms, backward_compute_ms=3 * m.cost.backward_compute_ms
            ),
        )
        for m in samples(9, 10)
    ]
    model, _ = fit_cost_model(slow, model=fitted[0], seed=1)
    m = samples(1, 1)[0]
    ratio = predict(model, m)[0].forward_compute_ms / predict(fitted[0], m)[0].forward_compute_ms
    assert torch.allclose(ratio, torch.full_like(ratio, 3.0), rtol=0.1)


def test_normaliser_ignores_constant_columns():
    normalizer = Normalizer(2)
    normalizer.fit(torch.tensor([[1.0, 5.0], [3.0, 5.0]]))
    assert torch.equal(normalizer(torch.tensor([[2.0, 9.0]])), torch.zeros(1, 2))


def test_nonnegative_least_squares_meets_the_optimality_conditions():
    rng = np.random.default_rng(0)
    for _ in range(20):
        matrix = rng.random((40, 8))
        matrix[:, 3] = matrix[:, 2]
        target = matrix @ np.maximum(rng.normal(size=8), 0) + 0.1 * rng.normal(size=40)
        x = fit_nonnegative(matrix, target)
        gradient = matrix.T @ (matrix @ x - target)
        assert (x >= 0).all() and (gradient > -1e-3).all() and np.abs(gradient[x > 0]).max() < 1e-3


def term_report(mape, weighted, prior):
    return TermReport(
        num_values=50,
        mape=mape,
        rank_correlation=0.9,
        weighted_error=weighted,
        prior_mape=prior,
        prior_weighted_error=prior,
    )


@pytest.mark.parametrize(
    ("mape", "weighted", "ready"),
    [(0.2, 0.2, False), (0.2, 0.1, False), (0.1, 0.2, False), (0.2, 0.045, True), (0.1, 0.1, True)],
)
def test_worse_than_the_prior_on_balance_is_not_ready(mape, weighted, ready):
    assert (doubts({"compute_ms": term_report(mape, weighted, prior=0.1)}) == "") == ready


def test_links_between_hosts_are_priced_though_never_seen(fitted):
    task = samples(5, 1, num_devices=4, count=12)[0].task
    placement = tuple(range(4)) * 3
    one_host = Measurement(task=task, placement=placement, error="not measured")
    spread = PlacementTask.uniform(task.shards, 4, devices_per_host=2)
    two_hosts = Measurement(task=spread, placement=placement, error="not measured")
    near, far = (predict(fitted[0], m)[0].backward_comms_ms for m in (one_host, two_hosts))
    assert (far > 5 * near).all()


def test_a_small_error_is_no_excuse_but_an_exact_fit_is():
    def term(error):
        return term_report(error, error, prior=0.001)

    assert "worse" in doubts({"compute_ms": term(0.015)})
    assert doubts({"compute_ms": term(0.004)}) == ""


def test_corrections_that_do_not_beat_the_prior_are_dropped():
    rows = law_of(work, 0, 60)  # exactly what the prior can say
    model, report = fit_cost_model(rows, CONFIG, seed=0)
    term = report.terms["compute_ms"]
    assert report.ready and term.mape == term.prior_mape < 1e-3
    out = predict(model, rows[0])[0].step_ms.item()
    assert out == pytest.approx(work(rows[0].task.shards), rel=1e-3)


def test_costs_at_random_are_not_ready():
    rng = np.random.default_rng(0)
    rows = law_of(lambda some: float(rng.uniform(1, 100)), 0, 100)
    _, report = fit_cost_model(rows, CONFIG, seed=0)
    assert not report.ready and "hardly follows" in report.reason
