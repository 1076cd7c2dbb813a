"""Differential privacy: what one client can change, how much noise there is, and what the accountant says about it."""

import math
import sys
from types import SimpleNamespace

import conformance
import numpy as np
import pytest
import torch
from conformance import HALF, MULTISET, SYNC, make
from problems import Quadratics, add, digits, small_network
from scipy.stats import norm

import fedstride as fs
from fedstride.algorithm import Delta
from fedstride.engine import Plan
from fedstride.keys import generator
from fedstride.privacy import ORDERS, Gaussian, PrivateReplies, clipped
from fedstride.sampling import Jobs

dp = pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install fedstride[privacy]")

FEDERATED = [name for name in fs.algorithms.names() if not make(name).pooled]
PRIVATE = [name for name in FEDERATED if make(name).displacements]
WEIGHTS = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
FULL = fs.participation.full()


def replies(uploads, rule, share=1.0, secret=7, version=0):
    count = len(uploads)
    zeros, ones = np.zeros(count, dtype=np.int64), np.ones(count, dtype=np.int64)
    made = PrivateReplies(
        rule,
        share,
        secret,
        uploads.dtype,
        WEIGHTS.numpy(),
        uploads.shape[1],
        False,
        False,
        version,
        lambda header: None,
    )
    add(made, Jobs(np.arange(count), zeros, zeros, ones, ones, ones * 0.1, ones), Delta(uploads))
    return made


# Noise


def test_the_noise_has_the_stated_deviation():
    d, rule = 40_000, Gaussian(clip=2.0, noise=1.5)
    uploads = torch.randn(4, d, dtype=torch.float64)
    noise = replies(uploads, rule).total("dx") - WEIGHTS @ clipped(uploads, 2.0)
    stated = 1.5 * 2.0 * 0.4
    assert abs(float(noise.std()) / stated - 1) < 0.03 and abs(float(noise.mean())) < 5 * stated / math.sqrt(d)
    inside = float((noise.abs() < stated).double().mean())
    assert abs(inside - 0.6827) < 0.02  # a normal distribution, not only its deviation


def test_the_noise_has_a_key():
    rule, zeros = Gaussian(clip=1.0, noise=1.0), torch.zeros(4, 1000, dtype=torch.float64)
    first = replies(zeros, rule)
    assert torch.equal(first.total("dx"), first.total("dx"))  # asked twice, one vector: nothing averages out
    torch.testing.assert_close(first.mean("dx"), first.total("dx"))
    for other in (replies(zeros, rule, version=1), replies(zeros, rule, secret=8)):
        correlation = np.corrcoef(first.total("dx"), other.total("dx"))[0, 1]
        assert abs(correlation) < 0.2


def test_the_noise_of_a_whole_run():
    clients, _ = digits()
    settings = dict(rounds=1, lr=1e-9, steps=1, batch_size=5, device="cpu", weights="uniform", dtype=torch.float64)
    for who, share in ((None, 1.0), (fs.participation.uniform(3), 0.5)):
        method = fs.algorithms.FedAvg(server_lr=2.0)
        start = fs.simulate(method, small_network(), clients, **settings).x
        noisy = fs.simulate(method, small_network(), clients, **settings, participation=who, privacy=Gaussian(0.5, 3.0))
        stated = 2.0 * 3.0 * 0.5 / 6 / share
        assert abs(float((noisy.x - start).std()) / stated - 1) < 0.15


# Sensitivity


@pytest.mark.parametrize("seed", range(4))
def test_one_client_moves_the_sum_by_no_more_than_is_stated(seed):
    rng, rule = torch.Generator().manual_seed(seed), Gaussian(clip=0.7, noise=1e-3)
    uploads = 10 ** torch.linspace(6, -2, 4, dtype=torch.float64)[:, None] * torch.randn(
        4, 30, dtype=torch.float64, generator=rng
    )
    before = replies(uploads, rule).total("dx")
    largest = 0.0
    for client in range(4):
        for other, factor in ((torch.zeros(30), 1), (-1e9 * uploads[client], 2), (1e3 * torch.ones(30), 2)):
            changed = uploads.clone()
            changed[client] = other
            moved = float((replies(changed, rule).total("dx") - before).norm())  # the same noise in both
            assert moved <= factor * 0.7 * float(WEIGHTS.max()) * (1 + 1e-9)
            largest = max(largest, moved / (0.7 * float(WEIGHTS.max())))
    assert largest > 1.9  # the bound is met, not only kept


def test_clipping_leaves_short_rows_alone():
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    torch.testing.assert_close(clipped(rows, 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.0, 0.0]]))


def test_who_is_missing_leaves_the_divisor_alone():
    """A client's absence must show in the sum alone."""
    problem, rule = Quadratics(), Gaussian(clip=1e3, noise=1e-9)
    start = torch.linspace(-1, 1, 4, dtype=torch.float64)
    together = [
        problem.run("fedavg", rounds=1, participation=fs.participation.uniform(3), seed=seed, privacy=rule)
        for seed in range(3)
    ]
    for seed, result in enumerate(together):
        plain = problem.run("fedavg", rounds=1, participation=fs.participation.uniform(3), seed=seed, timeline=True)
        weight = sum(problem.weights["data"][job["client"]] for job in plain.timeline.jobs)
        torch.testing.assert_close(result.x - start, (plain.x - start) * weight / 0.5, rtol=1e-5, atol=1e-5)


# The accountant


@pytest.mark.parametrize("noise, rounds", [(1.0, 1), (2.0, 20), (0.5, 3), (30.0, 100)])
def test_with_everyone_epsilon_is_that_of_the_gaussian_mechanism(noise, rounds):
    """Balle and Wang 2018, Theorem 8, for one mechanism with the noise z / sqrt(t)."""
    rule = Gaussian(clip=1.0, noise=noise, delta=1e-5)
    epsilon, mu = rule.spent(FULL, 6, rounds), math.sqrt(rounds) / noise
    delta = norm.cdf(-epsilon / mu + mu / 2) - math.exp(epsilon) * norm.cdf(-epsilon / mu - mu / 2)
    assert abs(delta / 1e-5 - 1) < 1e-4


@pytest.mark.parametrize("noise, p, rounds", [(1.0, 0.1, 50), (2.0, 0.05, 200), (1.5, 0.3, 10)])
def test_with_a_coin_epsilon_is_that_of_the_sampled_mechanism(noise, p, rounds):
    """Mironov, Talwar and Zhang 2019 for whole orders, and the conversion of Canonne, Kamath and Steinke 2020."""
    best = math.inf
    for order in ORDERS:
        terms = [
            math.lgamma(order + 1) - math.lgamma(k + 1) - math.lgamma(order - k + 1)
            + (order - k) * math.log(1 - p) + k * math.log(p) + k * (k - 1) / (2 * noise**2)
            for k in range(order + 1)
        ]  # fmt: skip
        renyi = rounds * np.logaddexp.reduce(terms) / (order - 1)
        best = min(best, renyi + math.log1p(-1 / order) - math.log(1e-5 * order) / (order - 1))
    mine = Gaussian(1.0, noise).spent(fs.participation.bernoulli(p), 10_000, rounds)
    assert abs(mine / best - 1) < 1e-6


def test_a_draw_of_fixed_size_is_accounted_for_one_client_in_anothers_place():
    rule, who = Gaussian(1.0, 4.0), fs.participation.uniform(10)
    accountant = dp.rdp.RdpAccountant(list(ORDERS), dp.NeighboringRelation.REPLACE_ONE)
    accountant.compose(dp.SampledWithoutReplacementDpEvent(1000, 10, dp.GaussianDpEvent(2.0)), 30)  # 4 C w over 2 C w
    assert rule.spent(who, 1000, 30) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert rule.spent(who, 1000, 30) < rule.spent(FULL, 1000, 30)
    # Where nearly all are drawn the draw hides nothing, and a client in every round is the better bound.
    assert rule.spent(fs.participation.uniform(9), 10, 30) == rule.spent(FULL, 10, 30)


def test_drawing_again_when_nobody_came_costs_delta():
    few, many = (Gaussian(1.0, 1.0).spent(fs.participation.bernoulli(0.5), count, 10) for count in (21, 60))
    assert few > many


def test_epsilon_is_in_the_rows_and_in_the_summary():
    rule = Gaussian(clip=1.0, noise=2.0, delta=1e-4)
    result = Quadratics().run("fedavg", rounds=5, privacy=rule)
    spent = [row["epsilon"] for row in result.rows]
    assert spent == [rule.spent(FULL, 6, number) for number in range(1, 6)] and spent == sorted(set(spent))
    assert {row["delta"] for row in result.rows} == {1e-4}
    assert f"epsilon {spent[-1]:.4g} at delta 0.0001" in result.summary()


# Methods


@pytest.mark.parametrize("name", PRIVATE)
def test_the_declaration_is_true(name):
    seen = []

    class Spy(PrivateReplies):
        def reduce(self, jobs, upload, *rest):
            seen.append(upload)
            return super().reduce(jobs, upload, *rest)

    method = make(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedstride.engine.PrivateReplies", Spy)
        Quadratics().run(method, rounds=2, schedule=SYNC, privacy=Gaussian(1.0, 1.0))
    assert len(method.exchanges) == 1 and not method.prologue and not method.init_client(torch.zeros(3))
    assert len(seen) == 2 and all(upload._fields == ("dx",) for upload in seen)


@pytest.mark.parametrize("name", PRIVATE)
@pytest.mark.parametrize("who", [None, HALF], ids=["full", "half"])
def test_without_clipping_and_noise_it_is_the_plain_method(name, who):
    problem, method = Quadratics(), make(name)
    plain, private = (
        problem.run(method, rounds=6, schedule=SYNC, weights="uniform", participation=who, privacy=rule)
        for rule in (None, Gaussian(1e3, 1e-9))
    )
    torch.testing.assert_close(private.x, plain.x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name, who",
    [(name, fs.participation.uniform(3)) for name in PRIVATE]
    + [("fedavg", None), ("fedavg", fs.participation.bernoulli(0.9))],  # accounted for in other ways
    ids=str,
)
def test_private_runs_resume_bit_for_bit_and_epsilon_goes_on(name, who):
    conformance.check_resume(make(name), schedule=SYNC, participation=who, privacy=Gaussian(0.1, 1.0, delta=0.01))


def test_another_seed_is_another_noise():
    one, two, other = (Quadratics().run("fedavg", rounds=2, seed=s, privacy=Gaussian(1.0, 1.0)) for s in (1, 1, 2))
    assert torch.equal(one.x, two.x) and not torch.equal(one.x, other.x)


@pytest.mark.parametrize(
    "name, words",
    [
        ("scaffold", "send 2 vectors, and clipping and noise cover the displacement alone"),
        ("fedagrac", "further exchanges"),
        ("fedlin", "further exchanges"),
        ("tracking", "further exchanges"),
        ("localsteps", "further exchanges"),
        ("scaffnew", "further exchanges"),
        ("fedlga", "looks at single uploads"),
        ("fedveca", "send 2 vectors|looks at single uploads"),
        ("fedexp", "does not declare `displacements`"),
        ("feddyn", "does not declare `displacements`"),
        ("centralised", "pools all data"),
    ],
)
def test_what_noise_would_not_cover_is_refused(name, words):
    with pytest.raises(fs.FedstrideError, match=f"{name} cannot be private: .*({words})"):
        Quadratics().run(make(name), privacy=Gaussian(1.0, 1.0))


@pytest.mark.parametrize("name", [name for name in FEDERATED if name not in PRIVATE])
def test_every_other_method_is_refused(name):
    with pytest.raises(fs.FedstrideError, match=f"{name} cannot be private"):
        Quadratics().run(make(name), privacy=Gaussian(1.0, 1.0))


def test_single_uploads_are_out_of_reach():
    seen = replies(torch.ones(4, 3), Gaussian(1.0, 1.0))
    for look in (seen.each, seen.rows):
        with pytest.raises(fs.FedstrideError, match="would not be private"):
            look("dx")
    assert seen.each("steps").tolist() == [1, 1, 1, 1]


RULE = Gaussian(1.0, 1.0)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(algorithm="fedbuff"), "Buffered lets quick clients take part more often"),
        (dict(participation=MULTISET), "privacy knows how to account for participation full, uniform without"),
        (dict(participation=fs.participation.weighted(3)), "privacy knows how to account"),
        (dict(participation=[[0, 1]] * 5), "privacy knows how to account"),
        (dict(participation=fs.participation.bernoulli(0.5)), "draws nobody, and then again, too often"),
        (dict(robust=fs.robust.Median()), "not a trimmed one"),
        (dict(guard=fs.guards.Norms(times=3.0)), "no upload may decide whether another is used"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, words):
    with pytest.raises(fs.FedstrideError, match=words):
        Quadratics().run(**(dict(algorithm="fedavg", rounds=5, privacy=RULE) | changes))


def test_a_bound_goes_with_privacy():
    result = Quadratics().run("fedavg", rounds=3, privacy=RULE, guard=fs.guards.Norms(bound=8.0))
    assert result.status == "finished"


@pytest.mark.parametrize("options", [(0, 1), (1, 0), (1, 1, 1), (1, 1, 0), ("1", 1), (1, float("nan"))], ids=str)
def test_impossible_numbers_are_refused(options):
    with pytest.raises(fs.FedstrideError, match="of privacy must be a number above 0"):
        Gaussian(*options)


def test_without_the_library_one_sentence_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(fs.FedstrideError, match=r"pip install 'fedstride\[privacy\]'"):
        Quadratics().run("fedavg", rounds=1, privacy=RULE)


def test_absent_clients_of_a_private_run_are_drawn_like_the_others():
    """The accountant counts on a draw from the whole fleet, so who is away must not raise the others' chances."""
    weights = np.full(10, 0.1)
    here = np.array([1, 2, 3, 8])
    plan = SimpleNamespace(weights=weights, present=here, secret=4, participation=fs.participation.uniform(5))
    sizes = []
    for number in range(1, 200):
        plan.privacy = Gaussian(1.0, 1.0)
        drawn = Plan.cohort(plan, number).clients
        everybody = plan.participation.draw(generator(4, "cohort", number), weights, number).clients
        assert drawn.tolist() == [client for client in everybody if client in here]
        sizes.append(len(drawn))
    assert min(sizes) < 2 and np.mean(sizes) == pytest.approx(2, abs=0.2)


@pytest.mark.parametrize(
    "option",
    [
        dict(privacy=Gaussian(1.0, 1.0)),
        dict(wire="float16"),
        dict(robust=fs.robust.Median()),
        dict(guard=fs.guards.Norms(5)),
    ],
)
def test_workers_refuse_what_they_do_not_do(option):
    with pytest.raises(fs.FedstrideError, match="workers sum uploads where they train"):
        Quadratics().run("fedavg", rounds=1, workers=2, **option)


def test_a_round_without_usable_uploads_has_noise_like_any_other():
    """Or the model itself would tell that all of them were refused."""
    problem = Quadratics()
    refused = problem.run("fedavg", rounds=3, privacy=Gaussian(1.0, 1.0), guard=fs.guards.Norms(bound=1e-6))
    assert refused.status == "finished" and refused.rows[-1]["rejected"] == 6 and refused.rows[-1]["clients"] == 0
    start = problem.model().weight.detach().flatten()
    moved = refused.x - start
    scale = float(problem.weights["data"].max()) * 3**0.5  # of three rounds of noise
    assert 0.2 * scale < float(moved.std()) < 3 * scale
    assert refused.x.dtype == torch.float64
