"""Cohorts, weights, steps, rejection, exchanges, rows, stopping, saving."""

import copy
import json

import numpy as np
import pytest
import torch
from problems import STEPS, Quadratics, add, digits, small_network

import fedstride as fs
from fedstride.algorithm import Algorithm, Delta
from fedstride.algorithms import FedAvg, Scaffnew, Scaffold
from fedstride.clients import Fleet
from fedstride.engine import Plan

simulate_module = fs.simulate.__globals__


def one_step_displacements(problem):
    x = np.linspace(-1, 1, 4)
    return x, [-0.15 * a @ (x - c) for a, c in zip(problem.a, problem.c)]


@pytest.mark.parametrize(
    ("who", "factors"),
    [
        ([[0, 1, 2, 3, 4, 5]], lambda w: w),
        ([[1, 3, 4]], lambda w: np.where(np.isin(range(6), [1, 3, 4]), w, 0)),
        ([[1, 3, 3, 4]], lambda w: np.array([0, 1, 0, 2, 1, 0]) * w),
    ],
)
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_aggregation_factors(who, factors, weights):
    problem = Quadratics()
    x, moves = one_step_displacements(problem)
    share = factors(problem.weights[weights])
    result = problem.run(FedAvg(), rounds=1, steps=1, participation=who, weights=weights)
    np.testing.assert_allclose(result.x.numpy(), x + sum(s * d for s, d in zip(share / share.sum(), moves)), atol=1e-12)


def test_weighted_draws_count_by_multiplicity_alone():
    problem = Quadratics()
    x, moves = one_step_displacements(problem)
    who = fs.participation.weighted(5)
    cohort = who.draw(fs.keys.generator(0, "cohort", 1), problem.weights["data"], 1)
    assert cohort.times.sum() == 5
    expected = x + sum(m / 5 * moves[c] for c, m in zip(cohort.clients, cohort.times))
    result = problem.run(FedAvg(), rounds=1, steps=1, participation=who)
    np.testing.assert_allclose(result.x.numpy(), expected, atol=1e-12)


def test_participation_frequencies():
    weights = np.array([0.5, 0.2, 0.2, 0.1])
    rounds = 4000
    for who, chance in (
        (fs.participation.uniform(2), np.full(4, 0.5)),
        (fs.participation.uniform(2, replacement=True), np.full(4, 0.5)),
        (fs.participation.weighted(2), 2 * weights),
        (fs.participation.bernoulli(0.3), np.full(4, 0.3 / (1 - 0.7**4))),
    ):
        counts = np.zeros(4)
        for round in range(1, rounds + 1):
            cohort = who.draw(fs.keys.generator(0, "cohort", round), weights, round)
            counts[cohort.clients] += cohort.times
            assert len(cohort.clients) > 0
        np.testing.assert_allclose(counts / rounds, chance, atol=0.05)


def test_unequal_weights_are_the_methods_own_by_default():
    problem = Quadratics()
    for name in fs.algorithms.names():
        method = fs.algorithms.make(name)
        default, forced = (problem.run(method, rounds=2, weights=w) for w in (None, method.weights))
        assert torch.equal(default.x, forced.x)
    assert FedAvg.weights == "data" and fs.algorithms.Tracking.weights == "uniform"


def test_gaussian_steps():
    fixed, redrawn = fs.steps.gaussian(500, 10_000), fs.steps.gaussian(500, 10_000, redraw=True)
    ids, epoch = np.arange(2000), np.ones(2000, dtype=np.int64)
    one, two = (fixed.draw(ids, round, epoch, 0)[0] for round in (1, 2))
    assert (
        (one == two).all() and one.mean() == pytest.approx(500, rel=0.02) and one.std() == pytest.approx(100, rel=0.05)
    )
    assert (redrawn.draw(ids, 1, epoch, 0)[0] != redrawn.draw(ids, 2, epoch, 0)[0]).mean() > 0.9
    assert (fixed.draw(ids[::-1], 1, epoch, 0)[0][::-1] == one).all()
    assert fs.steps.gaussian(1, 4).draw(ids, 1, epoch, 0)[0].min() == 1


def test_epochs_and_unfinished_steps():
    clients, _ = digits()
    result = fs.simulate(
        "fedavg", small_network(), clients, rounds=1, steps=fs.steps.epochs(2), batch_size=7, device="cpu"
    )
    assert result.rows[0]["steps"] == sum(2 * -(-n // 7) for n in clients.sizes)
    rule = fs.steps.unfinished(0.5, 4, epochs=5)
    ids, epoch = np.arange(10), np.full(10, 3)
    seen = set()
    for round in range(1, 200):
        target, done = rule.draw(ids, round, epoch, 0)
        assert (target == 15).all() and (done % 3 == 0).all() and (done < target).sum() <= 5
        seen |= set((done // 3).tolist())
    assert seen == {2, 3, 4, 5}


def test_rows_and_summary():
    clients, test = digits()
    top3 = lambda out, y: (out.topk(3).indices == y[:, None]).any(1).double().mean()  # noqa: E731
    result = fs.simulate(
        Scaffold(),
        small_network(),
        clients,
        rounds=5,
        every=2,
        test=test,
        metrics={"top3": top3},
        train_loss=True,
        device="cpu",
    )
    assert [row["round"] for row in result.rows] == [1, 2, 3, 4, 5]
    assert ["loss" in row for row in result.rows] == [False, True, False, True, True]
    d = len(result.x)
    for row in result.rows:
        assert row["bytes_up"] == row["bytes_down"] == 6 * 2 * d * 4 and row["steps"] == 60 and row["seconds"] == 0
    last = result.rows[-1]
    assert 0 <= last["accuracy"] <= last["top3"] <= 1 and last["train_loss"] > 0
    outputs = result.model.eval()(torch.as_tensor(test[0]))
    assert last["accuracy"] == pytest.approx(float((outputs.argmax(1) == torch.as_tensor(test[1])).double().mean()))
    weights = clients.sizes / clients.sizes.sum()
    losses = [fs.losses.cross_entropy(result.model(a), b).item() for a, b in map(clients.data, range(6))]
    assert last["train_loss"] == pytest.approx(float(weights @ losses), rel=1e-5)
    text = result.summary()
    assert "scaffold finished after 5 rounds" in text and "accuracy" in text and "300 client steps" in text
    json.dumps(result.rows)


def test_target_stops_the_run():
    clients, test = digits()
    settings = dict(lr=0.2, test=test, device="cpu", rounds=60)
    result = fs.simulate("fedavg", small_network(), clients, stop=fs.Target(accuracy=0.15), **settings)
    assert result.status == "stopped" and result.rows[-1]["accuracy"] >= 0.15 and len(result.rows) < 60
    assert all(row["accuracy"] < 0.15 for row in result.rows[:-1])


def test_prologue_is_row_zero():
    result = Quadratics().run("fedagrac", rounds=2)
    assert [row["round"] for row in result.rows] == [0, 1, 2]
    assert result.rows[0]["bytes_up"] == 6 * 4 * 8 and result.rows[0]["steps"] == 0


def test_lost_replies_leave_memories_and_exactness(monkeypatch):
    """A quarter of all replies never comes: absent memories stay, exact methods stay exact."""
    original = simulate_module["Simulator"].ask
    rng = np.random.default_rng(0)

    def lossy(self, exchange, message, jobs, deadline=None):
        arrives = (rng.random(len(jobs.clients)) > 0.25) | (exchange.name != "train")
        yield from original(self, exchange, message, jobs.take(arrives))

    monkeypatch.setattr(simulate_module["Simulator"], "ask", lossy)
    problem = Quadratics()
    for method in (Scaffold(), Scaffnew(p=0.3), fs.algorithms.FedTrack()):
        result = problem.run(method, rounds=100)
        assert problem.distance(result, problem.optimum()) < 1e-9
    weights = torch.as_tensor(problem.weights["data"])
    memory = problem.run(Scaffnew(p=0.3), rounds=9).memories.get(range(6))
    assert (weights @ memory.h).norm() < 1e-11


def test_all_uploads_rejected_is_divergence():
    result = Quadratics().run("scaffold", lr=1e200, rounds=10)
    assert result.status == "diverged" and len(result.rows) < 10 and "diverged at round" in result.summary()
    assert torch.isfinite(result.x).all() or result.rows[-1]["rejected"] < 6


def test_zero_steps_is_absence():
    problem = Quadratics()
    table = np.array([[3, 0, 2, 0, 1, 4]])
    one = problem.run(FedAvg(), rounds=1, steps=table)
    two = problem.run(FedAvg(), rounds=1, steps=[3, 1, 2, 1, 1, 4], participation=[[0, 2, 4, 5]])
    assert torch.equal(one.x, two.x) and one.rows[0]["clients"] == 4


def test_the_prologue_asks_everybody_whatever_their_steps():
    table = np.full((5, 6), 2)
    table[0, 1] = 0
    for method in ("localsteps", "fedagrac"):
        result = Quadratics().run(method, rounds=5, steps=table)
        assert result.rows[0]["clients"] == 6 and sum(row["rejected"] for row in result.rows) == 0


def test_nan_meets_no_target():
    for name in ("accuracy", "loss", "train_loss"):
        target = fs.Target(**{name: 0.5})
        assert not target({name: float("nan")}) and not target({}) and target({name: 0.5})


def test_a_refused_second_exchange_with_a_few_does_not_end_the_run(monkeypatch):
    from fedstride.algorithms import FedaGracSaving
    from fedstride.algorithms.calibration import Reference

    bad = lambda self, work, msg, memory: (Reference(memory.first * float("nan")), memory)  # noqa: E731
    monkeypatch.setattr(FedaGracSaving, "reference", bad)
    result = Quadratics().run(FedaGracSaving(), rounds=3, steps=[1, 6, 1, 1, 1, 1])
    assert result.status == "finished" and result.rows[-1]["rejected"] == 1


def test_empty_rounds_report_nothing_old():
    rows = Quadratics().run("fedlga", rounds=2, participation=[[0, 1], []]).rows
    assert "unfinished" in rows[0] and "unfinished" not in rows[1]


def test_centralised_follows_the_cohorts_steps():
    rows = Quadratics().run("centralised", rounds=2, participation=[[0], [1, 3]]).rows
    assert [row["steps"] for row in rows] == [STEPS[0], STEPS[1] + STEPS[3]]


def test_upload_fields_may_not_shadow_the_header():
    from typing import NamedTuple

    from fedstride.replies import Replies
    from fedstride.sampling import Jobs

    class Bad(NamedTuple):
        steps: torch.Tensor

    ones = np.ones(2, dtype=np.int64)
    replies = Replies(np.full(2, 0.5), 3, False, False)
    with pytest.raises(fs.FedstrideError, match="must not be called 'steps'"):
        add(replies, Jobs(np.arange(2), ones, ones, ones, ones, ones, ones), Bad(torch.ones(2, 1)))


class Shifted(torch.nn.Module):
    """Something that is not trained."""

    def __init__(self, by=0.1):
        super().__init__()
        self.register_buffer("by", torch.tensor(by))

    def forward(self, inputs):
        return inputs + self.by


class TestFolders:
    def settings(self, **changes):
        return dict(lr=0.05, steps=STEPS, batch_size=5, device="cpu", weights="data") | changes

    def start(self, folder, method="scaffold", rounds=3, **changes):
        clients, _ = digits()
        return fs.simulate(method, small_network(), clients, rounds=rounds, folder=folder, **self.settings(**changes))

    def test_interruption_at_every_round(self, tmp_path, monkeypatch):
        """Killed after any round, by an error in the middle of the next one: the same end."""
        clients, _ = digits()
        whole = fs.simulate("fedagrac", small_network(), clients, rounds=5, **self.settings())

        original = fs.steps.Fixed.draw

        class Killed(Exception):
            pass

        for stop in range(2, 6):
            folder = tmp_path / str(stop)

            def draw(self, clients, round, epoch, seed, stop=stop):
                if round == stop:
                    raise Killed
                return original(self, clients, round, epoch, seed)

            with monkeypatch.context() as patch, pytest.raises(Killed):
                patch.setattr(fs.steps.Fixed, "draw", draw)
                self.start(folder, "fedagrac", rounds=5)
            (folder / "rows.jsonl").open("a").write('{"round": 99')  # a row cut off in the middle
            resumed = self.start(folder, "fedagrac", rounds=5, resume=True)
            assert torch.equal(whole.x, resumed.x) and whole.rows == resumed.rows
            lines = (folder / "rows.jsonl").read_text().splitlines()
            assert [json.loads(line) for line in lines] == resumed.rows

    def test_finished_runs_are_not_repeated_and_can_be_lengthened(self, tmp_path):
        first = self.start(tmp_path)
        again = self.start(tmp_path, resume=True)
        assert torch.equal(first.x, again.x) and first.rows == again.rows
        longer = self.start(tmp_path, rounds=5, resume=True)
        assert len(longer.rows) == 5

    def test_nothing_is_overwritten(self, tmp_path):
        self.start(tmp_path)
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        for changes, words in (
            ({}, "already holds a run"),
            ({"method": "fedavg", "resume": True}, "its method is scaffold, this run's is fedavg"),
            ({"lr": 0.1, "resume": True}, "its lr is 0.05, this run's is 0.1"),
            ({"sampling": "shuffle", "resume": True}, "its sampling is replacement"),
            ({"seed": 1, "resume": True}, "its seed is 0, this run's is 1"),
            ({"method": Scaffold(server_lr=0.5), "resume": True}, "options"),
        ):
            with pytest.raises(fs.FedstrideError, match=words):
                self.start(tmp_path, **changes)
        clients, _ = digits()
        with pytest.raises(fs.FedstrideError, match="its model is"):
            other = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
            fs.simulate("scaffold", other, clients, rounds=3, folder=tmp_path, resume=True, **self.settings())
        for place, layer, words in (  # of the same parameters
            (6, torch.nn.Tanh(), r'its network is \["6", "ReLU.*"6", "Tanh'),
            (7, torch.nn.Dropout(0.5), r'its network is \["7", "Dropout\(p=0.0.*"7", "Dropout\(p=0.5'),
            (4, torch.nn.Sequential(Shifted(), torch.nn.Flatten()), r"its network is"),
        ):
            other = small_network()
            other[place] = layer
            with pytest.raises(fs.FedstrideError, match=words):
                fs.simulate("scaffold", other, clients, rounds=3, folder=tmp_path, resume=True, **self.settings())
        for part in ("inputs", "targets", "order"):  # other data of the same sizes
            changed = copy.copy(clients)
            setattr(changed, part, getattr(clients, part).flip(0))
            with pytest.raises(fs.FedstrideError, match="its clients is"):
                fs.simulate(
                    "scaffold", small_network(), changed, rounds=3, folder=tmp_path, resume=True, **self.settings()
                )
        with pytest.raises(fs.FedstrideError, match="holds 3 rounds, more than the 2 asked for"):
            self.start(tmp_path, rounds=2, resume=True)
        assert before == {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    @pytest.mark.parametrize("damage", ["tensors", "json", "cut", "missing", "rows", "no rows"])
    def test_damage_is_noticed(self, tmp_path, damage):
        self.start(tmp_path)
        tensors = next(tmp_path.glob("tensors-*"))
        target = {
            "tensors": tensors,
            "missing": tensors,
            "rows": tmp_path / "rows.jsonl",
            "no rows": tmp_path / "rows.jsonl",
        }.get(damage, tmp_path / "run.json")
        if damage in ("missing", "no rows"):
            target.unlink()
        else:
            data = bytearray(target.read_bytes())
            if damage == "cut":
                del data[len(data) // 2 :]
            elif damage == "rows":
                data = data[: data.index(b"\n") + 1]
            else:
                data[len(data) * 3 // 4] ^= 1
            target.write_bytes(bytes(data))
        with pytest.raises(fs.FedstrideError, match="damaged|missing"):
            self.start(tmp_path, rounds=5, resume=True)

    def test_replayed_runs_can_be_lengthened(self, tmp_path):
        cohorts, table = [[0, 1], [2], [3, 5]], np.arange(1, 19).reshape(3, 6) % 4 + 1
        whole = self.start(None, rounds=3, participation=cohorts, steps=table)
        self.start(tmp_path, rounds=2, participation=cohorts[:2], steps=table[:2])
        longer = self.start(tmp_path, rounds=3, participation=cohorts, steps=table, resume=True)
        assert torch.equal(whole.x, longer.x)
        with pytest.raises(fs.FedstrideError, match="its participation is|its steps is"):
            self.start(tmp_path, rounds=4, participation=[[0], *cohorts], steps=np.ones((4, 6), dtype=int), resume=True)

    def test_what_is_frozen_must_be_the_same(self, tmp_path):
        def go(rounds, by):
            other, (clients, _) = small_network(), digits()
            other[3] = Shifted(by)
            return fs.simulate("fedavg", other, clients, rounds=rounds, folder=tmp_path, resume=True, lr=0.1)

        go(2, 0.1)
        with pytest.raises(fs.FedstrideError, match="its frozen part is .*, this run's is"):
            go(3, 0.2)
        assert len(go(3, 0.1).rows) == 3

    def test_rows_without_a_checkpoint_belong_to_nothing(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"round": 777}\n')
        self.start(tmp_path, rounds=2)
        assert [row["round"] for row in self.start(tmp_path, rounds=3, resume=True).rows] == [1, 2, 3]

    def test_no_pickle_and_no_leftovers(self, tmp_path):
        self.start(tmp_path)
        assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir()) == ["rows.jsonl", "run.json", "tensors"]


def test_rates_are_asked_for_once_a_round_and_kept_as_they_were():
    held, asked = np.ones(2), []

    def lr(round):
        asked.append(round)
        held[:] = round  # the same array every time
        return held

    fleet = Fleet(torch.full((2,), 0.5), torch.ones(2))
    plan = Plan(fs.algorithms.make("fedavg"), fleet, None, None, lr, None, 5, 0, 0, 1, None)
    for number in (1, 2, 1):
        assert plan.rates(number).tolist() == [number, number]
    assert asked == [1, 2]


class TestMistakesInMethods:
    """A method of one's own that is not whole yet says so."""

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"client": lambda self, work, msg, memory: (work.descend(msg.x) - msg.x, memory)}, "NamedTuple"),
            ({"client": lambda self, work, msg, memory: Delta(work.descend(msg.x) - msg.x)}, "an upload and a memory"),
            ({"client": Algorithm.client}, r"has no client\(self, work, msg, memory\)"),
            ({"server": Algorithm.server}, r"has no server\(self, state, replies\)"),
            ({"server": lambda self, state, replies: replies.mean("dy")}, "no field 'dy' of that kind; they have dx"),
            ({"server": lambda self, state, replies: replies.rows("dx")}, "must declare needs_rows = True"),
        ],
    )
    def test_one_sentence(self, changes, words, monkeypatch):
        for name, function in changes.items():
            monkeypatch.setattr(FedAvg, name, function)
        clients, _ = digits()
        with pytest.raises(fs.FedstrideError, match=words):
            fs.simulate("fedavg", small_network(), clients, rounds=1, lr=0.1)


def test_the_local_loss_is_the_mean_over_steps_by_aggregation_factors():
    problem = Quadratics()
    start, losses = problem.model().weight.detach().numpy().ravel(), []
    for a, c, steps in zip(problem.a, problem.c, STEPS):
        y, seen = start.copy(), []
        for _ in range(steps):
            seen.append((y - c) @ a @ (y - c) / 2)
            y -= 0.05 * a @ (y - c)
        losses.append(np.mean(seen))
    (row,) = problem.run("fedavg", rounds=1, lr=0.05).rows
    assert row["local_loss"] == pytest.approx(problem.weights["data"] @ losses, rel=1e-12)
