"""Closed-form fixed points on heterogeneous quadratics with exact gradients and unequal steps and weights."""

import numpy as np
import pytest
from problems import LR, STEPS, Quadratics

import fedstride as fs
from fedstride.algorithms import FedaGrac, FedAvg, FedNova, FedProx, LocalSteps, Scaffold

WIDE = [1, 40, 8, 3, 20, 5]  # steps from 1 to 40


def fedavg_point(problem, steps, rates, weights="data"):
    paths = [rate * problem.path(rate, k, a) for rate, k, a in zip(rates, steps, problem.a)]
    return problem.balance(paths, weights)


@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_fedavg_rests_at_its_biased_point(weights):
    problem = Quadratics()
    result = problem.run(FedAvg(), weights=weights, rounds=40)
    point = fedavg_point(problem, STEPS, [LR] * 6, weights)
    assert problem.distance(result, point) < 1e-10
    assert problem.distance(result, problem.optimum(weights)) > 0.1


def test_fedavg_with_one_rate_a_client():
    problem, rates = Quadratics(), [0.05, 0.1, 0.2, 0.15, 0.08, 0.12]
    assert problem.distance(problem.run(FedAvg(), lr=rates, rounds=50), fedavg_point(problem, STEPS, rates)) < 1e-10
    local = problem.run(LocalSteps(step="given"), lr=rates, rounds=50)
    assert problem.distance(local, fedavg_point(problem, STEPS, rates)) < 1e-10


def test_local_steps_from_theory_rest_at_the_closed_form():
    problem = Quadratics()
    rates = [1 / np.linalg.eigvalsh(a).max() for a in problem.a]
    result = problem.run(LocalSteps(step="local"), rounds=20)
    assert problem.distance(result, fedavg_point(problem, STEPS, rates)) < 1e-5  # L_i are known to 1e-7 or so


@pytest.mark.parametrize("mu", [0.1, 1.0])
def test_fedprox_rests_at_its_biased_point(mu):
    problem, eye = Quadratics(), np.eye(4)
    paths = [LR * problem.path(LR, k, a + mu * eye) for k, a in zip(STEPS, problem.a)]
    assert problem.distance(problem.run(FedProx(mu=mu), rounds=50), problem.balance(paths)) < 1e-10


def test_fednova_rests_at_its_biased_point_and_the_bias_is_proportional_to_lr():
    problem = Quadratics()
    biases = {}
    for lr, rounds in ((LR, 40), (0.04, 130), (0.02, 260)):
        paths = [lr * problem.path(lr, k, a) / k for k, a in zip(STEPS, problem.a)]
        point = problem.balance(paths)
        biases[lr] = np.linalg.norm(point - problem.optimum())
        assert problem.distance(problem.run(FedNova(), lr=lr, rounds=rounds), point) < 1e-10
    assert biases[0.04] / biases[0.02] == pytest.approx(2, rel=0.15)
    fedavg = np.linalg.norm(fedavg_point(problem, STEPS, [0.02] * 6) - problem.optimum())
    assert biases[0.02] < fedavg / 5


def test_fedavg_is_exact_with_one_step_or_identical_clients():
    problem = Quadratics()
    assert problem.distance(problem.run(FedAvg(), steps=1, rounds=100), problem.optimum()) < 1e-10
    same = Quadratics(shared=True)
    assert same.distance(same.run(FedAvg(), rounds=40), same.c[0]) < 1e-10


@pytest.mark.parametrize("mode", ["std", "avg", "first", "reverse"])
@pytest.mark.parametrize("start", ["full_grad", pytest.param("zeros", marks=pytest.mark.slow)])
def test_fedagrac_is_exact_in_every_mode(mode, start):
    problem = Quadratics()
    for local_ref in ("avg", "sent"):
        result = problem.run(FedaGrac(mode=mode, start=start, local_ref=local_ref), rounds=70)
        assert problem.distance(result, problem.optimum()) < 1e-10


def test_fedagrac_is_exact_with_steps_redrawn_every_round():
    problem = Quadratics()
    table = np.random.default_rng(0).integers(1, 7, (60, 6))
    assert problem.distance(problem.run(FedaGrac(), steps=table, rounds=60), problem.optimum()) < 1e-10


def test_fedagrac_below_calibration_one_is_biased_and_the_increasing_schedule_is_not():
    problem = Quadratics()
    runs = [problem.run(FedaGrac(calibration=rate), rounds=60) for rate in (0, 0.5, 0.9)]
    gaps = [problem.distance(result, problem.optimum()) for result in runs]
    assert gaps[0] > gaps[1] > gaps[2] > 1e-3
    stages = FedaGrac(calibration=((1, 0.1), (11, 0.5), (21, 1.0)))
    assert stages.exact and not FedaGrac(calibration=0.5).exact
    assert problem.distance(problem.run(stages, rounds=80), problem.optimum()) < 1e-10


@pytest.mark.parametrize("mode", ["std", "avg", "first", "reverse"])
def test_fedagrac_all_scope_is_exact_with_part_of_the_fleet(mode):
    problem, who = (
        Quadratics(),
        fs.participation.uniform(3 if mode in ("std", "first") else 4, mode in ("avg", "reverse")),
    )
    result = problem.run(FedaGrac(mode=mode, nu_scope="all"), participation=who, rounds=130)
    assert problem.distance(result, problem.optimum()) < 1e-10
    missed = problem.run(FedaGrac(mode=mode), participation=who, rounds=50)
    assert problem.distance(missed, problem.optimum()) > 0.01


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold_is_exact_with_both_options(option):
    problem = Quadratics()
    for who in (fs.participation.uniform(4, True), fs.participation.bernoulli(0.6)):
        result = problem.run(Scaffold(option=option), participation=who, rounds=130)
        assert problem.distance(result, problem.optimum()) < 1e-10
    heavy = problem.run(Scaffold(option=option), momentum=0.5, lr=LR / 2, rounds=60)
    assert problem.distance(heavy, problem.optimum()) < 1e-10


def test_weight_decay_is_part_of_the_objective():
    problem, decay = Quadratics(), 0.3
    point = np.linalg.solve(
        sum(w * (a + decay * np.eye(4)) for w, a in zip(problem.weights["data"], problem.a)),
        sum(w * a @ c for w, a, c in zip(problem.weights["data"], problem.a, problem.c)),
    )
    for name in ("scaffold", "fedagrac", "fedtrack"):
        assert problem.distance(problem.run(name, weight_decay=decay, rounds=70), point) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [("fedagrac", {"mode": mode}) for mode in ("std", "avg", "first", "reverse")]
    + [("scaffold", {"option": "I"}), ("scaffold", {"option": "II"}), ("feddyn", {"alpha": 2.0})]
    + [("fedlin", {}), ("tracking", {}), ("scaffnew", {"p": 0.1}), ("fedagrac-saving", {}), ("fedtrack", {})],
)
def test_exact_with_steps_from_1_to_40(name, options):
    problem = Quadratics()
    result = problem.run(fs.algorithms.make(name, **options), steps=WIDE, lr=0.1, rounds=300)
    assert problem.distance(result, problem.optimum()) < 1e-10


@pytest.mark.slow
def test_closed_forms_with_steps_from_1_to_40():
    problem, eye = Quadratics(), np.eye(4)
    run = lambda method: problem.run(method, steps=WIDE, lr=0.1, rounds=200)  # noqa: E731
    assert problem.distance(run(FedAvg()), fedavg_point(problem, WIDE, [0.1] * 6)) < 1e-10
    prox = [0.1 * problem.path(0.1, k, a + 0.1 * eye) for k, a in zip(WIDE, problem.a)]
    assert problem.distance(run(FedProx(mu=0.1)), problem.balance(prox)) < 1e-10
    nova = [0.1 * problem.path(0.1, k, a) / k for k, a in zip(WIDE, problem.a)]
    assert problem.distance(run(FedNova()), problem.balance(nova)) < 1e-10
