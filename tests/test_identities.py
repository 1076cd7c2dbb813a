"""Methods that coincide at the edges of their settings, on the same batches, and invariants that always hold."""

import numpy as np
import pytest
import torch
from problems import LR, STEPS, Quadratics, add, digits, small_network

import fedstride as fs
from fedstride.algorithms import (
    Centralised,
    FedAdam,
    FedaGrac,
    FedaGracSaving,
    FedAvg,
    FedAvgM,
    FedDyn,
    FedExP,
    FedLGA,
    FedLin,
    FedNova,
    FedProx,
    FedVeca,
    Scaffnew,
    Scaffold,
    Tracking,
)

EXACT_GRADIENTS = dict(batch_size=None)
BATCHES = dict(batch_size=4)


def same(one, two, tolerance=1e-12, **settings):
    problem = Quadratics()
    a, b = (problem.run(method, **({"rounds": 6} | settings)) for method in (one, two))
    torch.testing.assert_close(a.x, b.x, rtol=tolerance, atol=tolerance)
    assert torch.isfinite(a.x).all()


@pytest.mark.parametrize("mode", ["std", "avg", "first", "reverse"])
def test_fedagrac_without_calibration_is_fedavg_bit_for_bit(mode):
    clients, test = digits()
    settings = dict(rounds=4, lr=0.1, steps=STEPS, batch_size=5, test=test, weights="data", device="cpu")
    a, b = (
        fs.simulate(method, small_network(0.2), clients, **settings)
        for method in (FedaGrac(calibration=0.0, mode=mode), FedAvg())
    )
    assert torch.equal(a.x, b.x)


@pytest.mark.parametrize("batches", [EXACT_GRADIENTS, BATCHES])
def test_fedagrac_avg_is_scaffold(batches):
    same(FedaGrac(mode="avg", start="zeros"), Scaffold(), weights="uniform", **batches)


def test_fedagrac_modes_with_equal_steps():
    same(FedaGrac(mode="std"), FedaGrac(mode="avg"), steps=4, tolerance=0, **BATCHES)
    same(FedaGrac(mode="reverse"), FedaGrac(mode="first"), steps=4, tolerance=0, **BATCHES)


def test_fedagrac_equal_steps_are_slow_whatever_the_rounding():
    from fedstride.algorithms.calibration import sends_first

    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = torch.as_tensor(rng.dirichlet(np.ones(7)))
        mean = (weights * 500.0).sum()
        assert not sends_first("std", torch.full((7,), 500.0, dtype=torch.float64), mean).any()


def test_fedagrac_equal_steps_are_slow_in_float32_too():
    for seed in range(6):
        sizes = tuple(int(n) for n in np.random.default_rng(seed).integers(5, 60, 6))
        problem = Quadratics(seed=seed, sizes=sizes)
        runs = [
            problem.run(FedaGrac(mode=mode), rounds=3, steps=5, lr=0.05, dtype=torch.float32) for mode in ("std", "avg")
        ]
        assert torch.equal(runs[0].x, runs[1].x)


def test_fedagrac_with_single_steps_is_gradient_descent():
    problem = Quadratics()
    x = np.linspace(-1, 1, 4)
    h = sum(w * a for w, a in zip(problem.weights["data"], problem.a))
    for _ in range(5):
        x = x - LR * h @ (x - problem.optimum())
    for mode in ("std", "avg", "first", "reverse"):
        result = problem.run(FedaGrac(mode=mode), steps=1, rounds=5)
        np.testing.assert_allclose(result.x.numpy(), x, atol=1e-12)


def test_fedagrac_references_sum_to_the_global_one_in_mode_avg_only():
    problem = Quadratics()
    weights = torch.as_tensor(problem.weights["data"])
    for mode, holds in (("avg", True), ("std", False)):
        result = problem.run(FedaGrac(mode=mode), rounds=4, **BATCHES)
        gap = (weights @ result.memories.get(range(6)).nu - result.state.nu).norm()
        assert (gap < 1e-12) == holds


def test_fedagrac_recursion():
    """x+ - x = -lr sum w_i sum_k g - lr lambda Kbar nu + lr lambda sum w_i K_i nu_i."""
    problem, rate, weights = Quadratics(), 0.7, torch.as_tensor(Quadratics().weights["data"])
    before = problem.run(FedaGrac(calibration=rate), rounds=3, **BATCHES)
    after = problem.run(FedaGrac(calibration=rate), rounds=4, **BATCHES)
    steps = torch.tensor(STEPS, dtype=torch.float64)
    totals = steps[:, None] * after.memories.get(range(6)).nu  # nu_i+ is the mean of the round's raw gradients
    nu = before.memories.get(range(6)).nu
    predicted = -LR * weights @ totals - LR * rate * (weights @ steps) * before.state.nu
    predicted = predicted + LR * rate * (weights * steps) @ nu
    torch.testing.assert_close(after.x - before.x, predicted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["std", "avg", "first", "reverse"])
@pytest.mark.parametrize("who", [None, fs.participation.uniform(3), fs.participation.weighted(4)])
def test_fedagrac_saving_is_fedagrac_with_fewer_bytes(mode, who):
    problem = Quadratics()
    settings = dict(rounds=8, participation=who, **BATCHES)
    plain = problem.run(FedaGrac(mode=mode, nu_scope="all"), **settings)
    saving = problem.run(FedaGracSaving(mode=mode), **settings)
    torch.testing.assert_close(plain.x, saving.x, rtol=1e-10, atol=1e-10)
    less = sum(row["bytes_up"] for row in saving.rows) < sum(row["bytes_up"] for row in plain.rows)
    assert less == (mode != "first")


def test_fedprox_without_mu_is_fedavg():
    same(FedProx(mu=0.0), FedAvg(), tolerance=0, **BATCHES)


def test_fednova_with_equal_steps_is_fedavg():
    same(FedNova(), FedAvg(), steps=4, **BATCHES)


@pytest.mark.parametrize(("rho", "mu"), [(0.6, 0.0), (0.0, 0.8), (0.6, 0.8)])
def test_fednova_norms(rho, mu):
    """|a_i|_1 against closed forms: with identical gradients every client's normalised displacement is the same."""
    from fedstride.algorithms.fednova import FedNova as Method

    problem, seen = Quadratics(), {}
    client = Method.client

    def spy(self, work, msg, memory):
        upload, memory = client(self, work, msg, memory)
        seen["norm"] = (work.steps[:, 0], upload)
        return upload, memory

    Method.client = spy
    try:
        problem.run(FedNova(momentum=rho, mu=mu), rounds=1)
    finally:
        Method.client = client
    steps, upload = seen["norm"]
    for tau, d in zip(steps.tolist(), upload.d):
        tau = int(tau)
        if mu == 0:
            norm = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
            assert float(upload.reach[list(steps).index(tau)]) == pytest.approx(LR * norm)
        elif rho == 0:
            norm = (1 - (1 - LR * mu) ** tau) / (LR * mu)
        else:
            count = norm = 0.0
            for _ in range(tau):
                count = rho * count + 1
                norm = (1 - LR * mu) * norm + count
        client_id = STEPS.index(tau)
        displacement = fednova_path(problem, client_id, tau, rho, mu)
        np.testing.assert_allclose(d.numpy(), displacement / (LR * norm), atol=1e-12)


def fednova_path(problem, client, tau, rho, mu):
    x = y = np.linspace(-1, 1, 4)
    v = np.zeros(4)
    for _ in range(tau):
        v = rho * v + problem.a[client] @ (y - problem.c[client])
        y = y - LR * (v + mu * (y - x))
    return y - x


def test_fednova_server_momentum_off_and_on():
    same(FedNova(server_momentum=0.0), FedNova(), tolerance=0)
    problem = Quadratics()
    assert not torch.equal(problem.run(FedNova(server_momentum=0.5), rounds=3).x, problem.run(FedNova(), rounds=3).x)


def test_fednova_server_momentum_is_of_gradients_not_of_steps():
    """u <- m u + step / lr, x <- x + lr u, where the learning rate changes from round to round."""
    problem, momentum, rates = Quadratics(), 0.6, [0.12, 0.03, 0.3, 0.05]
    eye, x, u = np.eye(4), np.linspace(-1, 1, 4), np.zeros(4)
    for lr in rates:
        steps = zip(problem.weights["data"], STEPS, problem.a, problem.c)
        paths = [w / k * (np.linalg.matrix_power(eye - lr * a, k) - eye) @ (x - c) for w, k, a, c in steps]
        u = momentum * u + np.dot(problem.weights["data"], STEPS) * sum(paths) / lr
        x = x + lr * u
    found = problem.run(FedNova(server_momentum=momentum), rounds=4, lr=lambda round: rates[round - 1])
    np.testing.assert_allclose(found.x.numpy(), x, rtol=1e-12)


@pytest.mark.parametrize("who", [None, fs.participation.uniform(3), fs.participation.uniform(4, replacement=True)])
def test_scaffold_invariants(who):
    problem = Quadratics()
    result = problem.run(Scaffold(), rounds=7, participation=who, **BATCHES)
    weights = torch.as_tensor(problem.weights["data"])
    torch.testing.assert_close(weights @ result.memories.get(range(6)).c, result.state.c, rtol=1e-12, atol=1e-12)


def test_scaffold_control_variates():
    problem = Quadratics()
    result = problem.run(Scaffold(), rounds=1, steps=1)
    for client, c in enumerate(result.memories.get(range(6)).c):
        expected = problem.a[client] @ (np.linspace(-1, 1, 4) - problem.c[client])
        np.testing.assert_allclose(c.numpy(), expected, atol=1e-12)
    end = problem.run(Scaffold(), rounds=70)
    for client, c in enumerate(end.memories.get(range(6)).c):
        np.testing.assert_allclose(c.numpy(), problem.a[client] @ (problem.optimum() - problem.c[client]), atol=1e-9)


def test_scaffold_with_identical_clients_is_fedavg_with_equal_steps():
    problem = Quadratics(shared=True)
    a, b = (problem.run(method, rounds=5, steps=4) for method in (Scaffold(), FedAvg()))
    torch.testing.assert_close(a.x, b.x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("who", [None, fs.participation.uniform(3)])
def test_feddyn_invariants(who):
    problem = Quadratics()
    weights = torch.as_tensor(problem.weights["data"])
    result = problem.run(FedDyn(alpha=0.7), rounds=7, participation=who, **BATCHES)
    torch.testing.assert_close(weights @ result.memories.get(range(6)).q, result.state.h, rtol=1e-12, atol=1e-12)
    mean = problem.run(FedDyn(alpha=0.7, deploy="mean"), rounds=7, participation=who, **BATCHES)
    torch.testing.assert_close(mean.x, result.state.mean, rtol=0, atol=0)


def test_feddyn_memories_end_as_the_gradients_at_the_optimum():
    problem = Quadratics()
    end = problem.run(FedDyn(alpha=2.0), rounds=100)
    assert end.state.h.norm() < 1e-9
    for client, q in enumerate(end.memories.get(range(6)).q):
        np.testing.assert_allclose(q.numpy(), problem.a[client] @ (problem.optimum() - problem.c[client]), atol=1e-9)


def test_tracking_is_fedlin_with_equal_steps():
    problem = Quadratics()
    one = problem.run(Tracking(), rounds=6, steps=4, lr=0.05, **BATCHES)
    two = problem.run(FedLin(), rounds=6, steps=4, lr=0.2, **BATCHES)
    torch.testing.assert_close(one.x, two.x, rtol=1e-12, atol=1e-12)


def test_tracking_against_the_papers_recursion():
    """The printed recursion v <- v + grad f_i(y_new) - grad f_i(y_old), in numpy."""
    problem, alpha, tau = Quadratics(), 0.04, 5
    x = np.linspace(-1, 1, 4)
    gradient = lambda i, y: problem.a[i] @ (y - problem.c[i])  # noqa: E731
    for _ in range(6):
        gf, ends = np.mean([gradient(i, x) for i in range(6)], axis=0), []
        for i in range(6):
            y, v = x, gf
            for _ in range(tau):
                new = y - alpha * v
                y, v = new, v + gradient(i, new) - gradient(i, y)
            ends.append(y)
        x = np.mean(ends, axis=0)
    result = problem.run(Tracking(), rounds=6, steps=tau, lr=alpha, weights="uniform")
    np.testing.assert_allclose(result.x.numpy(), x, atol=1e-12)


def test_tracking_with_single_steps_is_gradient_descent():
    same(Tracking(), Scaffnew(p=1.0), steps=1)
    problem = Quadratics()
    one, two = problem.run(Tracking(), rounds=5, steps=1), problem.run(FedAvg(), rounds=5, steps=1)
    torch.testing.assert_close(one.x, two.x, rtol=1e-12, atol=1e-12)
    shared = Quadratics(shared=True)
    one, two = shared.run(Tracking(), rounds=5, steps=4), shared.run(FedAvg(), rounds=5, steps=4)
    torch.testing.assert_close(one.x, two.x, rtol=1e-12, atol=1e-12)


def test_scaffnew_invariants():
    problem = Quadratics()
    weights = torch.as_tensor(problem.weights["data"])
    result = problem.run(Scaffnew(p=0.3), rounds=9, **BATCHES)
    memory = result.memories.get(range(6))
    settled = memory.h + (0.3 / LR) * (result.x - memory.y)  # what the next message would make of it
    assert (weights @ memory.h).norm() < 1e-12 and (weights @ settled).norm() < 1e-11
    end = problem.run(Scaffnew(p=0.3), rounds=200)
    for client, h in enumerate(end.memories.get(range(6)).h):
        np.testing.assert_allclose(h.numpy(), problem.a[client] @ (problem.optimum() - problem.c[client]), atol=1e-8)
    steps = [row["steps"] / 6 for row in end.rows]
    assert np.mean(steps) == pytest.approx(1 / 0.3, rel=0.2) and all(count == int(count) for count in steps)


def test_scaffnew_with_a_decaying_rate_against_the_printed_loop():
    """Each h_i update uses the rate of the steps that led to it."""
    problem, p, x = Quadratics(), 0.3, np.linspace(-1, 1, 4)
    rate = lambda round: 0.15 / round  # noqa: E731
    h, weights = np.zeros((6, 4)), problem.weights["data"]
    for round in range(1, 5):
        steps = Scaffnew(p=p).assign(None, np.arange(6), fs.keys.generator(0, "assign", round))[0]
        ends = []
        for i in range(6):
            y = x
            for _ in range(steps):
                y = y - rate(round) * (problem.a[i] @ (y - problem.c[i]) - h[i])
            ends.append(y)
        x = weights @ np.array(ends)
        h = h + p / rate(round) * (x - np.array(ends))
    np.testing.assert_allclose(problem.run(Scaffnew(p=p), rounds=4, lr=rate).x.numpy(), x, atol=1e-12)


def test_fedavgm_and_fedadam_limits():
    same(FedAvgM(beta=0.0), FedAvg(), tolerance=0, **BATCHES)
    same(FedAdam(beta1=0.0, beta2=1.0, epsilon=0.2, v0=0.8**2, server_lr=0.7), FedAvg(server_lr=0.7), **BATCHES)


def test_fedexp_with_identical_clients_is_fedavg_and_otherwise_steps_further():
    shared = Quadratics(shared=True)
    one, two = (shared.run(method, rounds=5, steps=4) for method in (FedExP(), FedAvg()))
    assert torch.equal(one.x, two.x)
    problem = Quadratics()
    moves = np.array([fednova_path(problem, i, k, 0.0, 0.0) for i, k in enumerate(STEPS)])
    weights = problem.weights["data"]
    mean = weights @ moves
    factor = (weights @ (moves**2).sum(1)) / (2 * (mean @ mean + 1e-3))
    row = problem.run(FedExP(), rounds=1).rows[0]
    assert row["server_lr"] == pytest.approx(max(1.0, factor)) and factor > 1


def test_centralised_is_fedavg_with_one_client():
    problem = Quadratics()
    alone = fs.Clients.from_arrays([problem.clients.pooled().data(0)])
    settings = dict(loss=fs.losses.least_squares, rounds=5, lr=0.1, dtype=torch.float64, batch_size=4, device="cpu")
    one = fs.simulate(Centralised(), problem.model(), problem.clients, steps=STEPS, **settings)
    two = fs.simulate(FedAvg(), problem.model(), alone, steps=sum(STEPS), **settings)
    assert torch.equal(one.x, two.x)
    assert all(row["bytes_up"] == row["bytes_down"] == 0 and row["steps"] == sum(STEPS) for row in one.rows)


class TestFedLGA:
    unfinished = dict(steps=fs.steps.unfinished(0.5, 4, epochs=5, unit="step"), weights="uniform")

    def test_all_complete_is_fedavg(self):
        for variant in ("paper", "taylor", "rescale"):
            same(FedLGA(variant=variant, server_lr=0.8), FedAvg(server_lr=0.8), **BATCHES)
            rule = fs.steps.unfinished(0.5, 1, epochs=5, unit="step")
            same(FedLGA(variant=variant), FedAvg(), steps=rule, weights="uniform", **BATCHES)

    def test_without_kappa_is_fedavg(self):
        same(FedLGA(kappa=0.0), FedAvg(), **self.unfinished, **BATCHES)

    def test_correction_is_the_outer_product(self):
        problem = Quadratics()
        x0 = np.linspace(-1, 1, 4)
        rule = self.unfinished["steps"]
        target, done = rule.draw(np.arange(6), 1, np.ones(6, dtype=np.int64), 0)
        assert 0 < (done < target).sum() < 6
        dx = [fednova_path(problem, i, int(k), 0.0, 0.0) for i, k in enumerate(done)]
        complete = np.mean([d for d, a, b in zip(dx, done, target) if a == b], axis=0)
        for variant in ("paper", "clipped", "taylor", "rescale"):
            new = []
            for d, k, full in zip(dx, done, target):
                g = -d / (LR * k)
                if k < full:
                    outer = np.outer(g, g)
                    if variant == "paper":
                        d = d + outer @ (complete - d)
                    elif variant == "clipped":
                        d = d + min(1, 1 / (g @ g)) * outer @ (complete - d)
                    elif variant == "taylor":
                        d = d - LR * (full - k) * (g + outer @ (complete - d))
                    else:
                        d = d * full / k
                new.append(d)
            method = FedLGA(variant="paper" if variant == "clipped" else variant, clip=variant != "paper")
            result = problem.run(method, rounds=1, **self.unfinished)
            np.testing.assert_allclose(result.x.numpy(), x0 + np.mean(new, axis=0), rtol=1e-12, atol=1e-12)
            assert result.rows[0]["unfinished"] == (done < target).sum()

    def test_empty_k2(self):
        rule, ones = fs.steps.unfinished(1.0, 5, epochs=5, unit="step"), np.ones(6, dtype=np.int64)
        seed = next(seed for seed in range(100) if (rule.draw(np.arange(6), 1, ones, seed)[1] < 5).all())
        nobody, problem = dict(steps=rule, weights="uniform", seed=seed), Quadratics()
        plain = problem.run(FedAvg(), rounds=1, **nobody)
        torch.testing.assert_close(problem.run(FedLGA(), rounds=1, **nobody).x, plain.x, rtol=1e-12, atol=1e-12)
        assert not torch.allclose(problem.run(FedLGA(empty="rescaled_mean"), rounds=1, **nobody).x, plain.x)

    def test_decay(self):
        problem = Quadratics()
        decayed = problem.run(FedLGA(decay=0.1), rounds=4)
        by_hand = problem.run(FedAvg(), rounds=4, lr=lambda round: LR * 0.9 ** (round - 1))
        torch.testing.assert_close(decayed.x, by_hand.x, rtol=1e-12, atol=1e-12)

    def test_the_print_diverges_where_the_clip_does_not(self):
        settings = dict(self.unfinished, rounds=60)
        assert Quadratics().run(FedLGA(clip=False), **settings).status == "diverged"
        assert Quadratics().run(FedLGA(), **settings).status == "finished"


class TestFedVeca:
    def test_fixed_tau_is_fednova(self):
        for tau in (2, 5):
            same(FedVeca(adapt=False, tau_start=tau), FedNova(), steps=tau, **BATCHES)

    def test_adapted_tau_replayed_by_fednova(self):
        problem = Quadratics()
        veca = problem.run(FedVeca(), rounds=12, **BATCHES)
        taus = [[2] * 6] + [row["tau"] for row in veca.rows[:-1]]
        assert len({tuple(tau) for tau in taus}) > 2
        nova = problem.run(FedNova(), rounds=12, steps=np.array(taus), **BATCHES)
        torch.testing.assert_close(veca.x, nova.x, rtol=1e-10, atol=1e-10)
        assert [row["steps"] for row in veca.rows] == [sum(tau) for tau in taus]

    @pytest.mark.parametrize(("alpha", "tau"), [(0.95, 20), (0.5, 2), (0.995, 50)])
    def test_equal_clients_get_the_floor_not_one_less(self, alpha, tau):
        problem = Quadratics(shared=True, sizes=(6,) * 6)
        for dtype in (torch.float64, torch.float32):
            result = problem.run(FedVeca(alpha=alpha), rounds=4, lr=0.05, dtype=dtype)
            assert result.rows[-1]["tau"] == [tau] * 6

    def test_ratio_decides(self):
        """floor(q / (q - alpha)): 2 above q = 1.425, 3 just below."""
        from fedstride.replies import Replies
        from fedstride.sampling import Jobs

        ratios = np.array([1.0, 1.0001, 1.2, 1.42, 1.43, 1.89, 5.0])
        method = FedVeca()
        n, x = len(ratios), torch.ones(3, dtype=torch.float64)
        fleet = fs.clients.Fleet(torch.full((n,), 1 / n, dtype=torch.float64), torch.ones(n, dtype=torch.int64))
        state = method.init(x, fleet)._replace(k=1, gradient=x)
        ones, column = np.ones(n, dtype=np.int64), torch.ones(n, 1, dtype=torch.float64)
        replies = Replies(fleet.weights.numpy(), 3, False, False)
        from fedstride.algorithms.fedveca import Upload

        upload = Upload(x.repeat(n, 1), x.repeat(n, 1), column, column, torch.as_tensor(ratios)[:, None])
        add(replies, Jobs(np.arange(n), ones, ones, 2 * ones, 2 * ones, 0.1 * ones, ones), upload)
        expected = [20, 19, 4, 3, 2, 2, 2]
        assert method.server(state, replies).tau.tolist() == expected

    def test_rollback_stalls_and_is_reported(self):
        problem = Quadratics()
        stuck = problem.run(FedVeca(rollback=True), rounds=30, lr=0.05)
        free = problem.run(FedVeca(), rounds=30, lr=0.05)
        assert stuck.rows[-1]["longest_rollback"] > 20
        gap = [problem.distance(result, problem.optimum()) for result in (stuck, free)]
        assert gap[1] < gap[0]
        again = problem.run(FedVeca(rollback=True, reset_after=2), rounds=30, lr=0.05)
        assert again.rows[-1]["longest_rollback"] <= 2
        judged = problem.run(FedVeca(rollback=True, loss="global"), rounds=30, lr=0.05)
        assert problem.distance(judged, problem.optimum()) < gap[0]

    def test_smoothness_is_found(self):
        problem = Quadratics()
        h = sum(w * a for w, a in zip(problem.weights["data"], problem.a))
        low, high = np.linalg.eigvalsh(h)[[0, -1]]
        rows = problem.run(FedVeca(), rounds=20, lr=0.05).rows
        assert low - 1e-9 <= rows[5]["smoothness"] and "premise" in rows[5]


class TestCorners:
    """Where settings meet that are each fine alone."""

    def test_fednova_with_rates_of_their_own_keeps_no_bias_of_order_one(self):
        problem, ratio = Quadratics(), np.array([1, 4, 1, 2, 1, 3.0])
        far, near = (
            problem.distance(
                problem.run("fednova", lr=list(scale * ratio), rounds=int(60 / scale), steps=[1, 6, 3, 5, 2, 4]),
                problem.optimum(),
            )
            for scale in (0.02, 0.005)
        )
        assert near < 0.1 and near == pytest.approx(far / 4, rel=0.1)  # proportional to lr

    def test_the_roll_back_minds_weight_decay(self):
        problem = Quadratics()
        model = problem.model()
        with torch.no_grad():
            model.weight.copy_(torch.as_tensor(problem.optimum()))  # where the loss is least and the penalty is not
        ends = [
            fs.simulate(
                FedVeca(adapt=False, rollback=rollback, loss="global"), model, problem.clients, rounds=60, lr=0.05,
                steps=2, loss=fs.losses.least_squares, batch_size=None, weight_decay=2.0, dtype=torch.float64,
            ).x
            for rollback in (False, True)
        ]  # fmt: skip
        assert (ends[1] - ends[0]).norm() < 0.05 < 0.5 < (ends[1] - model.weight.flatten()).norm()

    def test_centralised_adds_up_the_steps_of_the_cohorts_of_others(self):
        problem = Quadratics()
        for weights in ("data", "uniform"):
            steps = [
                [row["steps"] for row in problem.run(
                    method, rounds=12, participation=fs.participation.weighted(3), weights=weights
                ).rows]
                for method in ("fedavg", "centralised")
            ]  # fmt: skip
            assert steps[0] == steps[1]

    def test_who_needs_everybody_does_not_lose_them_to_a_deadline(self):
        world = fs.World(devices=[0.5, 0.1, 0.2, 0.1, 0.1, 0.1])
        with pytest.raises(fs.FedstrideError, match="client 0 cannot do a single step .* scaffnew needs every client"):
            Quadratics().run("scaffnew", rounds=30, lr=0.1, schedule=fs.schedule.Deadline(0.45), world=world)

    @pytest.mark.parametrize(
        ("name", "options"),
        [("fedadam", {"v0": -1.0}), ("fedyogi", {"v0": "x"}), ("localsteps", {"growth": -9.0}),
         ("fedlga", {"variant": "taylor", "kappa": 0.0})],
    )  # fmt: skip
    def test_options_that_mean_nothing(self, name, options):
        with pytest.raises(fs.FedstrideError, match=list(options)[-1]):
            fs.algorithms.make(name, **options)
