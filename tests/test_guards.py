"""Bounds on norms and robust means: liars are left out, honest clients are not."""

import itertools
from types import SimpleNamespace

import conformance
import numpy as np
import pytest
import torch
from attackers import lying
from conformance import HALF, MULTISET, SYNC, UNEVEN, make
from problems import Quadratics, add
from scipy.stats import trim_mean

import fedstride as fs
from fedstride.algorithm import Delta, Params
from fedstride.algorithms.fedasync import Local
from fedstride.arguments import description
from fedstride.guards import Norms, judged
from fedstride.replies import Replies
from fedstride.robust import Median, RobustReplies, TrimmedMean, centre
from fedstride.sampling import Jobs
from fedstride.study import Study

FEDERATED = [name for name in fs.algorithms.names() if not make(name).pooled]
ROBUST = [name for name in FEDERATED if not make(name).inspects]
EVERYONE = [0, 1, 2, 3, 4, 5]


def far(value):
    return value + 1e6


# Norms


@pytest.mark.parametrize("guard", [Norms(bound=1e3), Norms(times=100.0), Norms(bound=1e9, times=100.0)], ids=str)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "feddyn", "fedagrac", "fedlga", "tracking", "fedveca"])
def test_a_rejected_client_is_as_absent_and_its_memory_stays(name, guard):
    problem, method = Quadratics(), make(name)
    if method.full_only:
        with pytest.raises(fs.FedstrideError):  # absence cannot even be asked for
            problem.run(method, participation=[EVERYONE])
    later = {"rounds": 0}

    def lie(value):  # the prologue, if there is one, is honest
        later["rounds"] += 1
        return far(value) if later["rounds"] > len(method.prologue) else value

    with lying({2}, lie):
        guarded = problem.run(method, guard=guard, rounds=3)
    rejected = [row["rejected"] for row in guarded.rows if row["round"]]
    assert rejected == [1, 1, 1] and guarded.status == "finished" and torch.isfinite(guarded.x).all()
    for mine, first in zip(guarded.memories.get([2]), problem.run(method, rounds=1).memories.get([2])):
        assert mine.shape == first.shape and torch.isfinite(mine).all()
    if method.full_only:
        return
    absent = problem.run(method, rounds=3, participation=[[0, 1, 3, 4, 5]] * 3)
    torch.testing.assert_close(guarded.x, absent.x, rtol=1e-12, atol=1e-12)
    for mine, theirs in zip(guarded.memories.get(range(6)), absent.memories.get(range(6))):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", FEDERATED)
def test_a_wide_guard_changes_nothing(name):
    problem, method = Quadratics(), make(name)
    plain, guarded = (problem.run(method, rounds=4, schedule=SYNC, guard=g) for g in (None, Norms(1e9, times=1e6)))
    assert torch.equal(plain.x, guarded.x) and plain.rows == guarded.rows


def test_the_median_is_that_of_the_whole_round_however_it_is_cut_up():
    problem = Quadratics()
    with lying({1, 4}, lambda value: 50 * value):
        runs = [problem.run("fedavg", rounds=5, guard=Norms(times=10.0), chunk=chunk) for chunk in (None, 1, 2)]
    for other in runs[1:]:
        torch.testing.assert_close(other.x, runs[0].x, rtol=1e-12, atol=1e-12)
    assert [row["rejected"] for row in runs[0].rows] == [2] * 5


def test_norms_are_compared_with_the_median_of_those_that_are_finite():
    method, problem = fs.algorithms.FedAvg(), Quadratics(shared=True)  # all send the same
    lies = {0: float("nan"), 1: 2.9, 2: 3.1}

    def lie(value):
        return value * torch.tensor([lies.get(client, 1.0) for client in range(6)], dtype=value.dtype)[:, None]

    with lying(set(range(6)), lie):
        result = problem.run(method, steps=2, rounds=1, guard=Norms(times=3.0), timeline=True)
    fates = {job["client"]: job["fate"] for job in result.timeline.jobs}
    assert fates == {0: "rejected", 1: "used", 2: "rejected", 3: "used", 4: "used", 5: "used"}


@pytest.mark.parametrize(
    "lengths, guard, used",
    [
        ([1, 1, 1, 5], Norms(bound=4.0, times=10.0), [True, True, True, False]),
        ([1, 1, 1, 5], Norms(bound=9.0, times=4.0), [True, True, True, False]),
        ([1, 1, 1, 5], Norms(bound=5.1, times=5.1), [True, True, True, True]),
        ([0, 0, 0, 5], Norms(times=2.0), [True, True, True, True]),  # nothing to compare with
        ([0, 0, 0, 5], Norms(bound=4.0, times=2.0), [True, True, True, False]),
    ],
)
def test_bound_and_times_both_hold(lengths, guard, used):
    upload = Delta(torch.tensor(lengths, dtype=torch.float64)[:, None] * torch.tensor([[0.6, 0.8]]))
    answers = SimpleNamespace(upload=upload, jobs=SimpleNamespace(clients=range(4)))
    ((_, found),) = judged(iter([answers]), guard, 2, insist=False)
    assert found.tolist() == used


def test_every_field_has_its_own_bound_on_norms():
    scales = itertools.cycle([1, 1e4])  # a liar in dc alone

    def second_field(value):
        return value * next(scales)

    with lying({3}, second_field):
        result = Quadratics().run(make("scaffold"), rounds=3, guard=Norms(times=50.0))
    assert [row["rejected"] for row in result.rows] == [1, 1, 1]


def test_a_bound_in_an_asynchronous_run():
    with lying({2}, far):
        result = Quadratics().run(make("fedbuff"), rounds=30, guard=Norms(bound=1e3), world=UNEVEN, timeline=True)
    assert result.status == "finished" and float(result.x.norm()) < 100
    assert {job["client"] for job in result.timeline.jobs if job["fate"] == "rejected"} == {2}
    assert "uploads rejected" in result.summary()


def test_a_bound_that_nobody_keeps_is_divergence():
    result = Quadratics().run(make("fedavg"), guard=Norms(bound=1e-9), rounds=5)
    assert result.status == "diverged" and result.rows[-1]["rejected"] == 6
    few = Quadratics().run(make("fedavg"), guard=Norms(bound=1e-9), rounds=30, participation=[[0, 1]] * 30)
    assert few.status == "diverged" and len(few.rows) == 10  # the others, who are never asked, might do better


def test_a_liar_that_is_alone_in_its_cohort_does_not_end_the_run(tmp_path):
    settings = dict(guard=Norms(bound=1e3), participation=[[2], [2], [0], [2], [1, 2], [3]])
    with lying({2}, far):
        result = Quadratics().run(make("scaffold"), rounds=6, **settings)
    assert result.status == "finished" and [row["clients"] for row in result.rows] == [0, 0, 1, 0, 1, 1]
    honest = Quadratics().run(make("scaffold"), rounds=6, **settings | dict(participation=[[], [], [0], [], [1], [3]]))
    assert torch.equal(result.x, honest.x)


@pytest.mark.parametrize("seed", [0, 1, 3, 49])
def test_when_an_asynchronous_run_counts_as_diverged_does_not_depend_on_groups(seed):
    """Uploads are judged in groups, which depend on how many clients train at once."""
    sizes = (6, 9) if seed % 2 else (6, 9, 5, 7, 4, 8)
    rng = np.random.default_rng(seed)
    world, guard = fs.World(devices=list(rng.uniform(1, 3, len(sizes)))), Norms(bound=rng.uniform(0.3, 1.2))
    settings = dict(schedule=fs.schedule.Buffered(None, 2), steps=fs.steps.gaussian(4, 16, redraw=True), batch_size=2)
    found = [
        Quadratics(sizes=sizes).run(
            "fedavg", rounds=6, seed=seed, lr=0.05, world=world, guard=guard, chunk=n, **settings
        )
        for n in (1, 2, None)
    ]
    assert sum(row["rejected"] for row in found[0].rows) > 0
    for other in found[1:]:
        assert other.status == found[0].status and len(other.rows) == len(found[0].rows)
        for row, like in zip(other.rows, found[0].rows):
            assert row == pytest.approx(like, rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_guarded_runs_resume(name):
    conformance.check_resume(make(name), guard=Norms(times=2.0))
    conformance.check_resume(make(name), robust=TrimmedMean(0.2))


@pytest.mark.parametrize("options", [{}, {"bound": 0}, {"bound": "1"}, {"times": 1}, {"times": float("nan")}], ids=str)
def test_impossible_guards_are_refused(options):
    with pytest.raises(fs.FedstrideError, match="guard Norms"):
        Norms(**options)


# Robust means


def repeated(values, sizes):
    return np.repeat(values, sizes, axis=0)


@pytest.mark.parametrize("seed", range(5))
def test_weighted_trimming_is_plain_trimming_of_repeated_values(seed):
    rng = np.random.default_rng(seed)
    values, sizes = rng.normal(size=(7, 3)), rng.integers(1, 5, 7)
    sizes[0] += -sizes.sum() % 10  # so that a tenth of the weight is a whole number
    weights = torch.as_tensor(sizes / sizes.sum())
    for share in (0.0, 0.1, 0.2, 0.3, 0.4):
        mine = centre(torch.as_tensor(values), weights, share).numpy()
        np.testing.assert_allclose(mine, trim_mean(repeated(values, sizes), share, axis=0), rtol=1e-12)
    mine = centre(torch.as_tensor(values), weights, 0.5).numpy()
    np.testing.assert_allclose(mine, np.median(repeated(values, sizes), axis=0), rtol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_not_even_rounding_lets_a_vast_number_in(count):
    values = torch.cat([torch.zeros(10 - count, 1).double(), torch.full((count, 1), 1e300, dtype=torch.float64)])
    tenth = torch.full((10,), 0.1, dtype=torch.float64)
    for share in (0.1 * count, count / 10, 0.1 * count + 0.05):
        assert float(centre(values, tenth, share)) == 0


def test_blocks_of_columns_give_the_same(monkeypatch):
    values, weights = torch.randn(5, 40, dtype=torch.float64), torch.tensor([0.1, 0.3, 0.2, 0.15, 0.25])
    whole = centre(values, weights.double(), 0.2)
    monkeypatch.setattr("fedstride.robust.BLOCK", 15)
    torch.testing.assert_close(centre(values, weights.double(), 0.2), whole, rtol=1e-12, atol=1e-12)


def settings_of(method, count=3):
    """Its own schedule where enough replies come together, else rounds."""
    if not method.schedule.asynchronous:
        return {}
    own = {"n": count} if hasattr(method, "n") else None
    return {"schedule": SYNC} if own is None else {"schedule": type(method)(**own).schedule, "world": UNEVEN}


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("weights", ["data", "uniform"])
def test_nothing_trimmed_is_the_plain_method(name, weights):
    problem, method = Quadratics(), make(name)
    changes = dict(rounds=4, weights=weights, batch_size=3) | settings_of(method)
    plain, wrapped = (problem.run(method, robust=rule, **changes) for rule in (None, TrimmedMean(0.0)))
    torch.testing.assert_close(wrapped.x, plain.x, rtol=1e-9, atol=1e-11)
    for mine, theirs in zip(wrapped.memories.get(range(6)), plain.memories.get(range(6))):
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", [name for name in ROBUST if not make(name).full_only])
@pytest.mark.parametrize("who", [HALF, MULTISET, fs.participation.weighted(4)], ids=["half", "multiset", "weighted"])
def test_nothing_trimmed_is_the_plain_method_with_part_of_the_fleet(name, who):
    problem, method = Quadratics(), make(name)
    changes = dict(rounds=4, schedule=SYNC, participation=who)
    plain, wrapped = (problem.run(method, robust=rule, **changes) for rule in (None, TrimmedMean(0.0)))
    torch.testing.assert_close(wrapped.x, plain.x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", [name for name in FEDERATED if make(name).inspects])
def test_methods_that_look_at_single_uploads_are_refused(name):
    with pytest.raises(fs.FedstrideError, match=f"{name} cannot be robust: its server looks at single uploads"):
        Quadratics().run(make(name), schedule=SYNC, robust=Median())


@pytest.mark.parametrize("name", [name for name in FEDERATED if make(name).inspects])
def test_the_declaration_is_needed(name, monkeypatch):
    """Undeclared, the same methods end in words and not in a run that only looks protected."""
    monkeypatch.setattr(type(make(name)), "inspects", False)
    with pytest.raises(fs.FedstrideError, match="must declare `inspects`"):
        Quadratics().run(make(name), schedule=SYNC, robust=Median(), rounds=2)


@pytest.mark.parametrize("name", ["localsteps", "tracking"])
def test_what_is_inspected_depends_on_the_options(name):
    problem, method = Quadratics(), fs.algorithms.make(name, step="given")
    assert problem.run(method, rounds=2, robust=Median()).status == "finished"


class Points(Quadratics):
    """F_i = 1/2 |x - c_i|^2: whatever the steps, a displacement is a multiple of c_i - x, the same for all."""

    def __init__(self, sizes, seed=0, d=3):
        rng = np.random.default_rng(seed)
        self.d, self.sizes, self.c = d, np.array(sizes), [rng.normal(size=d) for _ in sizes]
        eye = [np.sqrt(d) * np.tile(np.eye(d), (size, 1)) for size in sizes]
        self.clients = fs.Clients.from_arrays([(x, x @ c) for x, c in zip(eye, self.c)])


SIZES = (2, 1, 3, 1, 2, 1, 4, 2, 3, 1)  # 20 in all: a share of 0.1 is the weight of 2


@pytest.mark.parametrize("weights", ["data", pytest.param("uniform", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fednova", "fedavgm"])
def test_the_fixed_point_is_the_trimmed_mean_of_the_minimisers(name, weights):
    problem, sizes = Points(SIZES), np.array(SIZES if weights == "data" else [1] * 10)
    options = {"mu": 0.1} if name == "fedprox" else {"beta": 0.5} if name == "fedavgm" else {}
    for rule, point in [
        (TrimmedMean(0.1), trim_mean(repeated(problem.c, sizes), 0.1, axis=0)),
        (TrimmedMean(0.3), trim_mean(repeated(problem.c, sizes), 0.3, axis=0)),
        (Median(), np.median(repeated(problem.c, sizes), axis=0)),
    ]:
        result = problem.run(fs.algorithms.make(name, **options), steps=4, rounds=80, weights=weights, robust=rule)
        assert problem.distance(result, point) < 1e-10


LIES = {"far": far, "flip": lambda value: -20 * value, "vast": lambda value: 0 * value - 1e150}
NAMED = ["fedavg", "scaffold", "feddyn", "fedagrac", "fedtrack", "fednova", "fedexp"]


@pytest.mark.parametrize(
    "name, rule, lie",
    [(name, TrimmedMean(0.2), lie) for name in NAMED for lie in ("far", "flip")]
    + [(name, Median(), "vast") for name in NAMED],
    ids=str,
)
def test_equal_clients_and_a_few_liars_end_where_the_honest_do(name, rule, lie):
    problem = Quadratics(shared=True, sizes=(8,) * 10)
    with lying({0, 7}, LIES[lie]):
        wrapped = problem.run(make(name), steps=2, rounds=45, robust=rule)
        plain = problem.run(make(name), steps=2, rounds=10)
    assert problem.distance(wrapped, problem.c[0]) < 1e-5
    assert plain.status == "diverged" or problem.distance(plain, problem.c[0]) > 1


def test_unequal_clients_and_a_few_liars_end_among_the_honest():
    problem = Points((1,) * 10)
    honest = np.array(problem.c)[2:]
    with lying({0, 1}, far):
        result = problem.run(make("fedavg"), steps=3, rounds=80, robust=TrimmedMean(0.2))
        assert problem.distance(problem.run(make("fedavg"), steps=3, rounds=80), honest.mean(0)) > 1e4
    # The liars are the two largest of every coordinate, so what remains are the honest without their two smallest.
    assert problem.distance(result, np.sort(honest, axis=0)[2:].mean(0)) < 1e-9
    x = result.x.numpy()
    assert (honest.min(0) <= x).all() and (x <= honest.max(0)).all()


@pytest.mark.parametrize(
    "share, weight, holds", [(0.2, 0.2, True), (0.2, 0.21, False), (0.5, 0.49, True), (0.5, 0.51, False)]
)
def test_the_breakdown_point_is_a_share_of_the_weight(share, weight, holds):
    honest = torch.linspace(-1, 1, 9, dtype=torch.float64)[:, None]
    values = torch.cat([honest, torch.full((1, 1), 1e12, dtype=torch.float64)])
    weights = torch.tensor([(1 - weight) / 9] * 9 + [weight], dtype=torch.float64)
    assert (abs(float(centre(values, weights, share))) <= 1) == holds


def test_a_discount_is_a_weight():
    """FedAsync's model is kept when all clients send it back, however old and however unevenly discounted."""
    method = fs.algorithms.FedAsync(exponent=1.0)
    weights = np.full(4, 0.25)
    x = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    columns = np.array([[0, 0], [1, 3], [2, 4], [3, 5]]).T
    zeros, ones = np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64)
    jobs = Jobs(columns[0], columns[1], zeros, ones, ones, 0.1 * ones, ones)
    upload = Local(x.expand(4, 3))
    for rule in (TrimmedMean(0.25), Median()):
        replies = RobustReplies(rule, weights, 3, False, False, 5, method.factor)
        plain = Replies(weights, 3, False, False, 5, method.factor)
        add(replies, jobs, upload)
        add(plain, jobs, upload)
        torch.testing.assert_close(replies.mean("y"), plain.mean("y"))
        torch.testing.assert_close(method.server(Params(x), replies).x, x)
        assert float(replies.mean("steps")) == float(plain.mean("steps"))


def test_liars_on_an_asynchronous_schedule():
    problem = Quadratics(shared=True, sizes=(8,) * 10)
    settings = dict(steps=2, rounds=80, world=fs.World(devices=[0.1 + 0.01 * i for i in range(10)]))
    method = fs.algorithms.FedBuff(n=5)
    with lying({4}, far):
        assert problem.distance(problem.run(method, robust=Median(), **settings), problem.c[0]) < 0.5
        assert problem.distance(problem.run(method, **settings), problem.c[0]) > 1e3


# Words


@pytest.mark.parametrize(
    "method, changes, words",
    [
        ("fedbuff", dict(guard=Norms(times=3.0)), "Buffered has no rounds whose median"),
        ("fedbuff", dict(robust=Median()), "at least 3 replies a server update, and here it has 2"),
        ("fedavg", dict(robust=Median(), participation=fs.participation.uniform(2)), "here it has 2"),
        ("fedavg", dict(robust=Median(), participation=fs.participation.bernoulli(0.2)), "here it has 1.2"),
        ("centralised", dict(robust=Median()), "pools all data"),
        ("fedavg", dict(robust="median"), "robust must be such as fs.robust"),
        ("fedavg", dict(guard=3.0), "guard must be such as fs.guards"),
        ("fedavg", dict(privacy=1.0), "privacy must be such as fs.privacy"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(method, changes, words):
    with pytest.raises(fs.FedstrideError, match=words):
        Quadratics().run(make(method), **changes)


@pytest.mark.parametrize("share", [-0.1, 0.5, "0.1", float("nan")])
def test_impossible_shares_are_refused(share):
    with pytest.raises(fs.FedstrideError, match="share of the trimmed mean"):
        TrimmedMean(share)


# Descriptions


PROTECTED = """
rounds = 2
robust = { name = "trimmed-mean", share = 0.2 }
guard = { name = "norms", bound = 50.0, times = 8.0 }

[partition]
name = "iid"
clients = 5
"""


def test_a_description_is_the_same_run(tmp_path):
    path = tmp_path / "protected.toml"
    path.write_text(PROTECTED)
    experiment = fs.Experiment.load(path)
    experiment.save(tmp_path / "again.toml")
    assert fs.Experiment.load(tmp_path / "again.toml") == experiment
    prepared = experiment.prepare()
    assert prepared.settings["robust"] == TrimmedMean(0.2) and prepared.settings["guard"] == Norms(50.0, 8.0)
    assert torch.equal(
        experiment.run().x, fs.simulate(prepared.method, prepared.model, prepared.clients, **prepared.settings).x
    )
    assert not torch.equal(experiment.run().x, fs.Experiment(**experiment.dump() | {"robust": "median"}).run().x)


@pytest.mark.parametrize(
    "fields, words",
    [
        (dict(robust="mean"), "unknown robust 'mean'"),
        (dict(robust={"name": "median", "share": 0.1}), "share"),
        (dict(robust={"name": "trimmed-mean", "share": 0.7}), "share of the trimmed mean must be"),
        (dict(guard="norms"), "needs bound"),
        (dict(privacy={"name": "gaussian", "noise": 1.0}), "privacy 'gaussian' needs clip"),
        (dict(privacy={"name": "gaussian", "clip": 1.0, "noise": 1.0}, method="scaffold"), "cannot be private"),
        (dict(robust="median", method="fedveca"), "cannot be robust"),
        (dict(robust="median", method="fedasync"), "at least 3 replies"),
    ],
)
def test_mistakes_in_descriptions_are_refused_before_data_are_loaded(fields, words, monkeypatch):
    monkeypatch.setattr(fs.Experiment, "fleet", lambda self: pytest.fail("data were loaded"))
    with pytest.raises(fs.FedstrideError, match=words):
        fs.Experiment(**fields).prepare()


def test_the_command_line(tmp_path):
    given = description(["method=fedprox", "robust=median", "guard.name=norms", "guard.bound=9", "rounds=2"], None)
    study = Study.parse(given)
    (plan,) = study.plans
    assert plan.experiment.robust.name == "median" and plan.experiment.guard.options == {"bound": 9}
    study.play(tmp_path)
    again = Study.parse(given | {"rounds": 4}).play(tmp_path, resume=True)
    assert [row["round"] for row in again["fedprox"][0].rows] == [1, 2, 3, 4]


@pytest.mark.parametrize("change", [{"guard": None}, {"robust": Median()}, {"robust": TrimmedMean(0.1)}], ids=str)
def test_a_run_goes_on_only_with_the_same_protection(change, tmp_path):
    settings = dict(rounds=2, guard=Norms(bound=1e3), robust=TrimmedMean(0.2), folder=tmp_path)
    Quadratics().run("fedavg", **settings)
    with pytest.raises(fs.FedstrideError, match="is of another run: its (guard|robust) is"):
        Quadratics().run("fedavg", **settings | {"rounds": 3, "resume": True} | change)
