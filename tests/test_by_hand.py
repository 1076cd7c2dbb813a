"""Single numbers of methods, schedules, verdicts and rules, computed by hand beside the code."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from problems import LR, STEPS, Quadratics, add

import fedstride as fs
from fedstride.algorithm import Delta
from fedstride.algorithms import FedaGrac, FedAvg, FedLGA, FedNova, FedVeca, LocalSteps, Tracking
from fedstride.algorithms.calibration import calibration_at
from fedstride.algorithms.fedveca import Upload
from fedstride.clients import Fleet
from fedstride.courses import BufferedCourse, FirstArrivalsCourse
from fedstride.replies import Replies
from fedstride.sampling import Jobs
from fedstride.world import Costs


def uploads(method, monkeypatch, **settings):
    """What the clients of one round send."""
    seen, client = [], type(method).client

    def spy(self, work, msg, memory):
        given = client(self, work, msg, memory)
        seen.append(given[0])
        return given

    monkeypatch.setattr(type(method), "client", spy)
    Quadratics().run(method, rounds=1, **settings)
    return seen[0]


@pytest.mark.parametrize("terms", ["line17", "assumption"])
def test_beta_and_delta_by_hand(terms, monkeypatch):
    problem, x = Quadratics(), np.linspace(-1, 1, 4)
    sent = uploads(FedVeca(adapt=False, tau_start=5, delta_terms=terms), monkeypatch)
    for i, (a, c) in enumerate(zip(problem.a, problem.c)):
        y, path, beta, delta = x, np.zeros(4), 0.0, 0.0
        for s in range(5):
            g = a @ (y - c)
            before, path = path, path + g
            if s:
                beta = max(beta, np.linalg.norm(a @ (x - c) - g) / np.linalg.norm(x - y))
                delta = max(delta, path @ path / (s + 1) if terms == "line17" else before @ before / s)
            y = y - LR * g
        np.testing.assert_allclose([sent.beta[i], sent.delta[i]], [[beta], [delta]], rtol=1e-12)
        np.testing.assert_allclose(sent.mean[i], path / 5, rtol=1e-12)


def taken(method, state, steps, gradient, beta=1.0, delta=1.0, loss=0.0):
    """The state after uploads with these numbers, one a client, at lr 0.1."""
    n, ones = len(steps), np.ones(len(steps), dtype=np.int64)
    replies = Replies(np.full(n, 1 / n), 3, False, False)
    column = lambda value: torch.as_tensor(np.broadcast_to(value, n).astype(float))[:, None]  # noqa: E731
    upload = Upload(gradient.repeat(n, 1), gradient.repeat(n, 1), column(loss), column(beta), column(delta))
    add(replies, Jobs(np.arange(n), 0 * ones, 0 * ones, steps, steps, 0.1 * ones, ones), upload)
    return method.server(state, replies)


def begun(method, n=2):
    fleet = Fleet(torch.full((n,), 1 / n, dtype=torch.float64), torch.ones(n, dtype=torch.int64))
    return method.init(torch.tensor([3.0, 0.0, 4.0], dtype=torch.float64), fleet)


def test_fedveca_smoothness_premise_and_bound_by_hand():
    method, two = FedVeca(), np.array([2, 2])
    first = taken(method, begun(method), two, torch.tensor([6.0, 0.0, 8.0], dtype=torch.float64))
    assert first.smoothness == pytest.approx(2) and first.premise == pytest.approx(0.1 * 2 * 2)  # |g| / |x_0|
    assert first.tau.tolist() == [2, 2]  # nothing to go by yet
    g = torch.tensor([6.0, 0.0, 7.0], dtype=torch.float64)
    second = taken(method, first, two, g, beta=[1.0, 2.0], delta=[1.0, 3.0])
    moved = 0.1 * 2 * 10  # |x_1 - x_0|
    assert second.smoothness == pytest.approx(2)  # a running maximum: from x_0 to x_1 it is 1 / moved
    assert second.a_min == pytest.approx(0.1 * 1 * 1 / 100)  # over |grad F(x_0)|^2 = 100
    assert second.tau.tolist() == [20, 2]
    assert second.premise == pytest.approx(0.1 * 11 * 2)
    assert method.report(second)["alpha_bound"] == 1.0
    now = taken(FedVeca(norm_at="current"), first, two, g, beta=[1.0, 2.0], delta=[1.0, 3.0])
    assert now.a_min == pytest.approx(0.1 / float(g @ g))
    assert method.report(second._replace(a_min=16.0))["alpha_bound"] == pytest.approx(2 * 2 / 16)
    steeper = taken(method, first, two, first.gradient + torch.tensor([0.0, 20.0, 0.0], dtype=torch.float64))
    assert steeper.smoothness == pytest.approx(20 / moved)


def test_fedveca_who_did_a_single_step_keeps_tau():
    method, g = FedVeca(), torch.ones(3, dtype=torch.float64)
    state = begun(method)._replace(k=1, gradient=g, tau=torch.tensor([7, 9]))
    assert taken(method, state, np.array([1, 2]), g, beta=[0.0, 1.0]).tau.tolist() == [7, 20]


@pytest.mark.parametrize(
    ("after", "streaks", "bests"), [(2, [0, 1, 2, 0], [1.0, 1.0, np.inf, 5.0]), (0, [0, 1, 2, 3], [1.0] * 4)]
)
def test_fedveca_forgets_the_best_loss_after_so_many_roll_backs(after, streaks, bests):
    method, g = FedVeca(rollback=True, reset_after=after), torch.ones(3, dtype=torch.float64)
    state, seen = begun(method), []
    for loss in (1.0, 5.0, 5.0, 5.0):
        state = taken(method, state, np.array([2, 2]), g, loss=loss)
        seen.append((state.streak, state.best))
    assert seen == list(zip(streaks, bests))


def test_stages_begin_in_the_round_they_name():
    rates = calibration_at(((1, 0.1), (3, 0.5)), torch.tensor([1.0, 2, 3, 4]))
    assert rates.tolist() == [0.1, 0.1, 0.5, 0.5]


@pytest.mark.parametrize("local", ["avg", "sent"])
def test_the_local_reference_is_the_mean_or_what_was_sent(local):
    memory = Quadratics().run(FedaGrac(local_ref=local), rounds=3).memories.get(range(6))
    fast = torch.tensor(STEPS) > np.dot(Quadratics().weights["data"], STEPS)
    assert torch.equal(memory.nu[~fast], memory.sent[~fast])
    assert torch.equal(memory.nu[fast], memory.sent[fast]) == (local == "sent")


UNFINISHED = dict(steps=fs.steps.unfinished(0.5, 4, epochs=5, unit="step"))


def test_fedlga_decay_reaches_the_correction():
    runs = [
        Quadratics().run(FedLGA(decay=decay, clip=False), rounds=3, lr=lr, **UNFINISHED)
        for decay, lr in ((0.1, LR), (0.0, lambda round: LR * 0.9 ** (round - 1)))
    ]
    torch.testing.assert_close(runs[0].x, runs[1].x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rho", [0.5, 1.0])
def test_fedlga_with_weights_by_hand(rho):
    """v is the weighted mean of the complete clients; if there are none, of all, rescaled."""
    problem, x = Quadratics(), np.linspace(-1, 1, 4)
    rule = fs.steps.unfinished(rho, 5, epochs=5, unit="step")
    drawn = [rule.draw(np.arange(6), 1, np.ones(6, dtype=np.int64), seed)[1] for seed in range(200)]
    paths = [
        np.array([problem.path(LR, int(k), a) @ a @ (x - c) for k, a, c in zip(ks, problem.a, problem.c)])
        for ks in drawn
    ]
    # The longest mean gradient is a complete client's, which the report must leave out.
    longest = [np.linalg.norm(path / ks[:, None], axis=1).argmax() for path, ks in zip(paths, drawn)]
    seed = next(s for s, ks in enumerate(drawn) if (ks < 5).sum() == 6 * rho and (rho == 1 or ks[longest[s]] == 5))
    done, dx = drawn[seed], -LR * paths[seed]
    w = problem.weights["data"]
    slow = done < 5
    part = w if slow.all() else w * ~slow
    mean = (part[:, None] * dx * 5 / done[:, None]).sum(0) / part.sum()
    g = -dx / (LR * done[:, None])
    square = (g**2).sum(1)
    change = np.minimum(1, 1 / square)[:, None] * g * (g * (mean - dx)).sum(1, keepdims=True)
    result = problem.run(FedLGA(empty="rescaled_mean"), rounds=1, steps=rule, seed=seed, weights="data")
    np.testing.assert_allclose(result.x, x + w @ (dx + slow[:, None] * change), rtol=1e-12, atol=1e-12)
    assert result.rows[0]["squared_gradient"] == pytest.approx(square[slow].max())


def test_fednova_with_a_proximal_term_reaches_as_far_as_its_steps(monkeypatch):
    sent = uploads(FedNova(mu=0.8), monkeypatch)
    assert sent.reach[:, 0].tolist() == pytest.approx([LR * k for k in sorted(STEPS, reverse=True)])


@pytest.mark.parametrize(("tau", "mean", "most"), [(4, 1.0, 1.5), (1, 1.0, 9.0)])
def test_step_sizes_by_hand(tau, mean, most):
    """Either bound may be the smaller one."""
    column = lambda value: torch.full((1, 1), value, dtype=torch.float64)  # noqa: E731
    msg = SimpleNamespace(x=column(0.0), mean_smoothness=column(mean), max_smoothness=column(most))
    work = SimpleNamespace(target=column(float(tau)), lr=column(0.1), descend=lambda x, lr: lr)
    for step, bound in (("exact", 2 / (5 * mean * tau - mean)), ("stochastic", 1 / (12 * tau * mean))):
        assert float(Tracking(step=step, scale=0.5).rate(work, msg)) == pytest.approx(0.5 * min(bound, 1 / most))
    for e, growth in ((most / mean, None), (0.2, 0.2)):
        bound = 8 * tau / (mean * (2 * tau + e * (tau - 1)) ** 2 + 4 * e * mean * tau * (tau - 1))
        method = LocalSteps(step="universal", scale=0.5, growth=growth)
        found = float(method.client(work, msg, None)[0].dx)
        assert found == pytest.approx(0.5 * min(1 / (tau * most), bound))
    for curved, expected in ((4.0, 0.5 / 4), (0.0, 0.1)):
        own = SimpleNamespace(smoothness=column(curved))
        assert float(LocalSteps(scale=0.5).client(work, msg, own)[0].dx) == pytest.approx(expected)


@pytest.mark.parametrize("method", [Tracking(step="exact"), LocalSteps(step="universal")])
def test_mean_and_largest_smoothness(method):
    state, each = Quadratics().run(method, rounds=1).state, [np.linalg.eigvalsh(a).max() for a in Quadratics().a]
    assert float(state.mean_smoothness) == pytest.approx(np.mean(each), rel=1e-5)
    assert float(state.max_smoothness) == pytest.approx(np.max(each), rel=1e-5)


def test_second_moments_by_hand():
    d = np.array([2.0, -0.5, 0.001])
    for name, rule in (
        ("fedadagrad", lambda v: v + d**2),
        ("fedadam", lambda v: 0.99 * v + 0.01 * d**2),
        ("fedyogi", lambda v: v - 0.01 * d**2 * np.sign(v - d**2)),
    ):
        method = fs.algorithms.make(name, beta1=0.5, server_lr=0.1)
        replies, one = Replies(np.ones(1), 3, False, False), np.ones(1, dtype=np.int64)
        add(replies, Jobs(0 * one, 0 * one, 0 * one, one, one, 0.1 * one, one), Delta(torch.as_tensor(d)[None]))
        state = method.init(torch.zeros(3, dtype=torch.float64), None)
        x, m, v = np.zeros(3), np.zeros(3), np.full(3, 1e-6)
        for _ in range(2):
            state, m, v = method.server(state, replies), 0.5 * m + 0.5 * d, rule(v)
            x = x + 0.1 * m / (np.sqrt(v) + 1e-3)
            np.testing.assert_allclose(state.x, x, rtol=1e-12)


def costs(down, step, presence=lambda client, version, repeat, now: (True, now)):
    nothing = [0] * len(step)
    return Costs(down, nothing, nothing, step, nothing, presence)


def jobs_of(course, count):
    """The first jobs that reach the server, which acts on each."""
    found = []
    for version in range(count):
        course.publish(version)
        number = course.advance()
        found.append(course.jobs[number])
        course.release(number)
    return found


def one_step(client, version):
    return 1, 1, 0.1


def test_a_free_client_takes_the_next_model_that_reaches_it():
    course = FirstArrivalsCourse(costs([0.0, 10.0], [3.0, 1.0]), one_step, 0, 0.0, 1)
    far = [(job.version, job.start) for job in jobs_of(course, 12) if job.client == 1]
    assert far[:3] == [(0, 10.0), (1, 13.0), (2, 16.0)]


def test_a_lost_job_is_drawn_anew():
    asked = []

    def presence(client, version, repeat, now):
        asked.append(repeat)
        assert len(asked) < 5
        return repeat > 0, now

    course = FirstArrivalsCourse(costs([0.0], [1.0], presence), one_step, 0, 0.0, 1)
    assert jobs_of(course, 1)[0].repeat == 1 and asked[:2] == [0, 1]


def test_the_first_to_come_back_is_sent_for_first():
    back = [5.0, 2.0, 9.0]
    for seed in range(5):
        here = costs(
            [0.0] * 3, [1.0] * 3, lambda client, version, repeat, now: (now >= back[client], max(now, back[client]))
        )
        (job,) = jobs_of(BufferedCourse(here, one_step, seed, 0.0, 1, 1), 1)
        assert (job.client, job.start) == (1, 2.0)


def test_a_forced_draw_by_hand():
    from fedstride.privacy import _alone

    assert _alone(fs.participation.bernoulli(0.5), 2) == pytest.approx(0.25 / 0.75)  # among the three draws that count


def test_a_guard_minds_a_model_of_one_parameter():
    clients = fs.Clients.from_arrays([(np.ones((4, 1)), np.full((4, 1), 5.0))] * 3)
    guard = fs.guards.Norms(bound=1e-6)
    model = torch.nn.Linear(1, 1, bias=False).double()
    run = fs.simulate(
        "fedavg", model, clients, loss=fs.losses.least_squares, rounds=1, guard=guard, dtype=torch.float64
    )
    assert run.rows[0]["rejected"] == 3


def test_what_orderings_cannot_be_sure_of(tmp_path):
    from test_reproduce import Cell, Found, judge, put, small, table

    cells = [
        Cell("a", name, small(lr=lr), {"accuracy %": p}) for name, lr, p in zip("xyz", (0.1, 0.2, 0.3), (80, 70, 60))
    ]
    found = Found(table(*cells), tmp_path / "found.json")
    for cell, values in zip(cells, ([0.5, 0.5, 0.5], [0.4, 0.4, 0.4], [0.9, 0.91, 0.92])):
        put(found, cell, values)
    verdict = judge(found)
    outcomes = {(o.better, o.worse): (o.outcome, o.sure) for o in verdict.orderings}
    assert outcomes[("x", "y")] == ("agrees", False)  # the same difference on every seed proves nothing
    assert outcomes[("x", "z")] == ("disagrees", True) and verdict.sure == 0


def test_a_run_that_diverged_is_behind_the_least(tmp_path):
    from test_reproduce import Cell, Found, judge, put, small, table

    cells = [Cell("a", name, small(lr=lr), {"accuracy %": p}) for name, lr, p in zip("xy", (0.1, 0.2), (80, 70))]
    found = Found(table(*cells), tmp_path / "found.json")
    put(found, cells[0], [0.9], "diverged")
    put(found, cells[1], [0.1])
    assert judge(found).orderings[0].outcome == "disagrees"


def test_losses_and_curvatures_with_a_penalty_by_hand():
    problem, x, seen = Quadratics(), np.linspace(-1, 1, 4), []

    class Look(FedAvg):
        def client(self, work, msg, memory):
            seen.append((work.loss(msg.x)[:, 0], work.smoothness(msg.x)[:, 0]))
            return super().client(work, msg, memory)

    problem.run(Look(), rounds=1, weight_decay=2.0)
    losses, curvatures = seen[0]
    order = np.argsort(-np.array(STEPS), kind="stable")
    half = [0.5 * (x - c) @ a @ (x - c) + x @ x for a, c in zip(problem.a, problem.c)]  # 2 / 2 |x|^2
    np.testing.assert_allclose(losses, np.array(half)[order], rtol=1e-12)
    np.testing.assert_allclose(curvatures, [np.linalg.eigvalsh(problem.a[i]).max() + 2 for i in order], rtol=1e-3)


def test_step_rules_by_hand():
    rule, ones = fs.steps.unfinished(0.3, 5, epochs=5, unit="step"), np.ones(6, dtype=np.int64)
    slow = [(rule.draw(np.arange(6), round, ones, 0)[1] < 5).sum() for round in range(1, 40)]
    assert max(slow) == 2  # round(0.3 * 6)
    draws = fs.steps.gaussian(1, 10_000).draw(np.arange(200), 1, None, 0)[0]
    assert (draws == 1).mean() < 0.1 and 60 < draws.mean() < 100  # |N(1, 100^2)|, not cut at one


def test_rounds_that_were_played_must_have_been_those(tmp_path):
    settings = dict(folder=tmp_path, rounds=3)
    Quadratics().run("fedavg", participation=[[0], [1], [2]], **settings)
    with pytest.raises(fs.FedstrideError, match="participation"):
        Quadratics().run("fedavg", participation=[[0], [2], [2], [1]], resume=True, **(settings | {"rounds": 4}))
