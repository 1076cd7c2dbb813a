"""The conformance suite: registering a method is being tested. Capabilities are asked of the class, never its name."""

from functools import partialmethod

import conformance
import pytest
import torch
from conformance import HALF, MULTISET, SYNC, UNEVEN, make
from problems import Quadratics

import fedstride as fs
from fedstride.inputs import unfit
from fedstride.train import Work

NAMES = fs.algorithms.names()
FEDERATED = [name for name in NAMES if not make(name).pooled]
EXACT = [name for name in NAMES if make(name).exact]
EXACT_PARTIAL = [name for name in EXACT if make(name).exact_partial]
BUFFERED = fs.schedule.Buffered(concurrency=4, size=2)
PARTIAL = [name for name in FEDERATED if not make(name).full_only]


def fits(name, schedule):
    method = make(name)
    return not unfit(method, schedule, bool(method.init_client(torch.zeros(3))))


# Every method on its own schedule, if that is asynchronous, and on Buffered, if it can.
ASYNCHRONOUS = [
    pytest.param(name, schedule, id=f"{name}-{type(schedule).__name__}")
    for name in FEDERATED
    for schedule in (make(name).schedule, BUFFERED)
    if schedule.asynchronous and fits(name, schedule)
]


@pytest.fixture(autouse=True)
def few_power_iterations(monkeypatch):
    """Nothing here is about how precisely curvatures are measured, which takes long; test_theory.py is."""
    monkeypatch.setattr(Work, "smoothness", partialmethod(Work.smoothness, iterations=5))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_exact_with_everyone(name, weights):
    conformance.check_exact(make(name), weights)


@pytest.mark.parametrize("name", EXACT_PARTIAL)
@pytest.mark.parametrize(
    "who", [pytest.param(HALF, id="half"), pytest.param(MULTISET, id="multiset", marks=pytest.mark.slow)]
)
def test_exact_with_part_of_the_fleet(name, who):
    conformance.check_exact(make(name), participation=who, rounds=160)


@pytest.mark.parametrize("name", NAMES)
def test_backends_agree(name):
    conformance.check_backends_agree(make(name))


@pytest.mark.parametrize("name", NAMES)
def test_resume_equals_uninterrupted(name):
    conformance.check_resume(make(name))


@pytest.mark.parametrize("name", PARTIAL)
def test_resume_with_part_of_the_fleet(name):
    conformance.check_resume(make(name), participation=MULTISET, schedule=SYNC)


@pytest.mark.parametrize("name", NAMES)
def test_traffic(name):
    conformance.check_traffic(make(name), partial=False)


@pytest.mark.parametrize("name", PARTIAL)
def test_traffic_with_part_of_the_fleet(name):
    conformance.check_traffic(make(name), partial=True)


@pytest.mark.parametrize("name", PARTIAL)
def test_absent_clients_are_untouched(name):
    conformance.check_absent_untouched(make(name))


@pytest.mark.parametrize("name", FEDERATED)
def test_bad_uploads_are_rejected(name):
    conformance.check_rejection(make(name), schedule=SYNC)


@pytest.mark.parametrize("name", FEDERATED)
def test_order_of_replies(name):
    conformance.check_order_of_replies(make(name))


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_bytes_other_seed_other_run(name):
    problem = Quadratics()
    one, two, other = (problem.run(make(name), rounds=4, batch_size=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.x, two.x) and one.rows == two.rows
    assert not torch.equal(one.x, other.x)


@pytest.mark.parametrize("name", NAMES)
def test_diverging_runs_end_as_such(name):
    result = Quadratics().run(make(name), rounds=25, lr=1e6, steps=20)
    if result.status != "diverged":  # normalised steps are bounded: these methods cannot overflow
        assert torch.isfinite(result.x).all()
    else:
        assert result.rows[-1]["round"] < 25 and f"diverged at round {result.rows[-1]['round']}" in result.summary()


@pytest.mark.parametrize("name", [name for name in NAMES if make(name).full_only])
def test_full_only_methods_refuse_part_of_the_fleet(name):
    with pytest.raises(fs.FedstrideError, match="needs every client"):
        Quadratics().run(make(name), participation=HALF)


@pytest.mark.parametrize(("name", "schedule"), ASYNCHRONOUS)
def test_asynchronous_runs_resume_anywhere(name, schedule):
    conformance.check_resume_anywhere(make(name), schedule=schedule)


@pytest.mark.parametrize(("name", "schedule"), ASYNCHRONOUS)
def test_backends_agree_on_asynchronous_runs(name, schedule):
    conformance.check_backends_agree(make(name), schedule=schedule, world=UNEVEN, rounds=5)


@pytest.mark.parametrize(("name", "schedule"), ASYNCHRONOUS)
def test_a_trace_can_be_replayed(name, schedule):
    conformance.check_replay(make(name), schedule=schedule)


@pytest.mark.parametrize(("name", "schedule"), ASYNCHRONOUS)
def test_bad_uploads_are_rejected_in_asynchronous_runs(name, schedule):
    conformance.check_rejection(make(name), rounds=25, schedule=schedule, world=UNEVEN)


@pytest.mark.parametrize("name", sorted({case.values[0] for case in ASYNCHRONOUS}))
def test_the_time_of_a_job_is_known_beforehand(name):
    conformance.check_time_of_a_job(make(name))


@pytest.mark.parametrize("name", [name for name in EXACT_PARTIAL if fits(name, BUFFERED)])
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_exact_methods_stay_exact_whatever_the_speeds(name, weights):
    conformance.check_exact(make(name), weights, schedule=BUFFERED, world=UNEVEN, lr=0.1, rounds=400)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_one_parameter(name):
    """Vectors of length one look like scalars; they must not be taken for them."""
    problem = Quadratics(d=1)
    result = problem.run(make(name), rounds=3)
    assert result.x.shape == (1,) and result.status == "finished"
