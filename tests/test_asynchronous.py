"""Clock, schedules and the delayed methods: identities, closed forms, and what the fleet does when."""

import json
import math
from collections import Counter

import numpy as np
import pytest
import torch
from conformance import UNEVEN
from problems import LR, Quadratics, digits, small_network

import fedstride as fs
from fedstride.clock import ARRIVAL, CLIENT, SERVER, Clock
from fedstride.courses import BufferedCourse, FirstArrivalsCourse, SendBuffersCourse
from fedstride.world import Pace

EQUAL = fs.World(devices=0.1, links=fs.links.bandwidth(1e5))


def assert_same(one, two):
    torch.testing.assert_close(one.x, two.x, rtol=1e-12, atol=1e-12)


def costs(world, count, extra=0):
    return Pace(world, count, 0).costs(0, 0, np.full(count, extra))


# The clock


def test_events_come_by_time_then_priority_then_sequence():
    clock = Clock()
    for time, priority, kind in [
        (2, ARRIVAL, "e"),
        (1, SERVER, "c"),
        (1, CLIENT, "b"),
        (1, ARRIVAL, "a"),
        (1, SERVER, "d"),
    ]:
        clock.push(time, priority, kind)
    stored = json.loads(json.dumps(clock.dump()))
    other = Clock()
    other.load(stored)
    for queue in (clock, other):
        assert [queue.pop()[0] for _ in range(5)] == list("abcde") and queue.now == 2 and not len(queue)


# Identities of the DLSGD paper and of the methods it compares with; to rounding


@pytest.mark.parametrize("batch_size", [None, 3])
def test_hetero_without_delay_is_generalized_fedavg_with_the_same_draws(batch_size):
    problem = Quadratics()
    settings = dict(rounds=25, weights="uniform", batch_size=batch_size, seed=4)
    hetero = problem.run(fs.algorithms.DlsgdHetero(n=4, server_lr=0.7), **settings)
    draws = fs.participation.uniform(4, replacement=True)
    assert_same(hetero, problem.run(fs.algorithms.FedAvg(server_lr=0.7), participation=draws, **settings))
    assert all(row["max_staleness"] == 0 for row in hetero.rows)


@pytest.mark.parametrize("world", [None, EQUAL], ids=["no time", "equal speeds"])
def test_homo_with_everybody_and_equal_speeds_is_local_sgd(world):
    problem = Quadratics()
    settings = dict(rounds=25, weights="uniform", batch_size=3, steps=5, world=world)
    homo = problem.run(fs.algorithms.DlsgdHomo(n=6, server_lr=0.7), **settings)
    local = problem.run(fs.algorithms.FedAvg(server_lr=0.7), **settings)
    assert_same(homo, local)
    assert [row["seconds"] for row in homo.rows] == pytest.approx([row["seconds"] for row in local.rows])


def test_homo_with_one_step_is_asysg():
    problem = Quadratics()
    settings = dict(rounds=60, world=UNEVEN, batch_size=3, timeline=True)
    homo = problem.run(fs.algorithms.DlsgdHomo(n=3), steps=1, **settings)
    asysg = problem.run(fs.algorithms.AsySG(n=3), **settings)  # which does one step, whatever the run says
    assert_same(homo, asysg)
    assert homo.timeline.trace() == asysg.timeline.trace() and homo.timeline.max_delay > 0
    mean = problem.run(fs.algorithms.DlsgdHomo(n=3, server_lr=LR), steps=1, lr=1.0, **settings)
    assert_same(mean, asysg)  # local lr 1 and server lr eta, as the paper states the identity


@pytest.mark.parametrize("world", [None, EQUAL], ids=["no time", "equal speeds"])
def test_fedbuff_with_everybody_and_equal_delays_is_fedavg(world):
    problem = Quadratics()
    settings = dict(rounds=25, weights="data", batch_size=3, steps=5, world=world)
    buffered = problem.run(fs.algorithms.FedBuff(n=6, staleness="polynomial"), **settings)
    assert_same(buffered, problem.run("fedavg", **settings))


def test_fedbuff_and_fedasync_by_hand():
    """One server update after the other, from the recorded order of arrivals."""
    problem = Quadratics()
    a, c = problem.a, problem.c
    settings = dict(rounds=40, world=UNEVEN, weights="uniform", timeline=True)

    def local(job, x):
        y = x.copy()
        for _ in range(job["steps"]):
            y = y - LR * a[job["client"]] @ (y - c[job["client"]])
        return y

    buffered = problem.run(fs.algorithms.FedBuff(n=3, staleness="polynomial", exponent=0.7, server_lr=0.5), **settings)
    models = [np.linspace(-1, 1, 4)]
    for update in buffered.timeline.trace():
        tau = [len(models) - 1 - job["version"] for job in update["jobs"]]
        moves = [local(job, models[job["version"]]) - models[job["version"]] for job in update["jobs"]]
        models.append(models[-1] + 0.5 * sum((1 + t) ** -0.7 * move for t, move in zip(tau, moves)) / 3)
    np.testing.assert_allclose(buffered.x, models[-1], rtol=1e-10)

    for options, s in (
        (dict(staleness="hinge", slope=3.0, after=2), lambda t: 1.0 if t <= 2 else 1 / (3 * (t - 2) + 1)),
        (dict(staleness="polynomial", exponent=0.5), lambda t: (1 + t) ** -0.5),
        (dict(staleness="constant"), lambda t: 1.0),
    ):
        mixed = problem.run(fs.algorithms.FedAsync(mixing=0.6, **options), **settings)
        assert mixed.timeline.max_delay > 2
        models = [np.linspace(-1, 1, 4)]
        for update in mixed.timeline.trace():
            (job,) = update["jobs"]
            weight = 0.6 * s(len(models) - 1 - job["version"])
            models.append((1 - weight) * models[-1] + weight * local(job, models[job["version"]]))
        np.testing.assert_allclose(mixed.x, models[-1], rtol=1e-10)


def test_fedasync_alone_and_at_once_is_sgd():
    problem = Quadratics(sizes=(20,))
    settings = dict(rounds=10, steps=7, batch_size=4)
    alone = problem.run(fs.algorithms.FedAsync(mixing=1.0), **settings)
    assert_same(alone, problem.run("centralised", **settings))
    tied = problem.run(fs.algorithms.FedAsync(mixing=1.0, rho=0.4), **settings)
    assert_same(tied, problem.run(fs.algorithms.FedProx(mu=0.4), **settings))


def test_staleness_discounts_divide_by_n_and_not_by_their_sum():
    """Two replies, one of them old: the discount shrinks the step, it is not normalised away."""
    problem = Quadratics(sizes=(8, 8), seed=3)
    world = fs.World(devices=[1.0, 2.5])
    plain = problem.run(fs.algorithms.FedBuff(n=1, server_lr=1.0), world=world, rounds=3, steps=1, timeline=True)
    halved = problem.run(
        fs.algorithms.FedBuff(n=1, staleness="polynomial", exponent=1.0), world=world, rounds=3, steps=1, timeline=True
    )
    assert plain.timeline.staleness() == {0: 2, 2: 1}  # client 0 at 1 and 2 s, client 1 at 2.5 s from the first model
    before = problem.run(fs.algorithms.FedBuff(n=1), world=world, rounds=2, steps=1)
    torch.testing.assert_close(halved.x - before.x, (plain.x - before.x) / 3)


# What the fleet does when


def test_number_of_server_updates_is_uploads_over_n():
    result = Quadratics().run(fs.algorithms.DlsgdHomo(n=4), rounds=50, world=UNEVEN, timeline=True)
    uploads = [job for job in result.timeline.jobs if job["fate"] == "used"]
    assert len(uploads) == 200 and all(row["clients"] == 4 for row in result.rows)


def test_the_first_arrivals_by_hand():
    """Three clients with 1, 2 and 4 s a job, no transfers, n = 2."""
    result = Quadratics(sizes=(5, 6, 7)).run(
        fs.algorithms.DlsgdHomo(n=2), rounds=4, steps=1, world=fs.World(devices=[1.0, 2.0, 4.0]), timeline=True
    )
    order = [[(job["client"], job["version"]) for job in update["jobs"]] for update in result.timeline.trace()]
    # 1 s: client 0 arrives and has no newer model: it is idle. 2 s: client 1; update 1, both start from it.
    # 3 s: client 0 again, idle. 4 s: clients 1 and 2, in the order in which their ends were planned: 2, then 1.
    assert order[:2] == [[(0, 0), (1, 0)], [(0, 1), (2, 0)]]
    assert [row["seconds"] for row in result.rows][:2] == [2.0, 4.0]
    # Client 1 arrives at 4 s, too, after the second update was made: it counts for the third, one version late.
    assert order[2][0] == (1, 1) and result.rows[2]["max_staleness"] == 1
    busy = result.timeline.utilisation(3)
    assert busy[2] == pytest.approx(1.0) and busy[0] < 1


def test_a_client_can_count_twice_in_one_update():
    """It can, if a newer model lay in its receive buffer while it trained; both of its updates are used."""
    result = Quadratics().run(
        fs.algorithms.DlsgdHomo(n=3),
        rounds=60,
        steps=1,
        world=fs.World(devices=[0.1, 1, 1.3, 1.7, 0.35, 2.1]),
        timeline=True,
    )
    twice = [
        Counter(job["client"] for job in update["jobs"]).most_common(1)[0][1] for update in result.timeline.trace()
    ]
    assert max(twice) == 2 and all(row["clients"] == 3 for row in result.rows)


def test_send_buffers_by_hand():
    """Overwritten updates are never computed, empty buffers are waited for, sent ones are cleared."""
    problem = Quadratics(sizes=(5, 6, 7))
    settings = dict(rounds=12, steps=1, timeline=True, seed=2)
    result = problem.run(fs.algorithms.DlsgdHetero(n=2), world=fs.World(devices=[1.0, 3.0, 10.0]), **settings)
    jobs = result.timeline.jobs
    overwritten = [job for job in jobs if job["fate"] == "overwritten"]
    assert overwritten and all(job["arrival"] is None and job["client"] != 2 for job in overwritten)
    used = [job for job in jobs if job["fate"] == "used"]
    assert len({(job["client"], job["version"], job["repeat"]) for job in used}) == len(used)  # nothing is sent twice
    assert all(job["arrival"] >= job["end"] for job in used)
    assert sum(job["times"] for job in used) == 2 * 12
    slow = [job for job in used if job["client"] == 2]
    assert slow[0]["arrival"] == 10.0  # the server waited for it
    linked = fs.World(devices=[1.0, 3.0, 10.0], links=fs.links.bandwidth(1e9, latency=0.3))
    again = problem.run(fs.algorithms.DlsgdHetero(n=2, resend=True), world=linked, **settings)
    sent = [(job["client"], job["version"]) for job in again.timeline.jobs if job["fate"] == "used"]
    assert len(set(sent)) < len(sent) and again.rows[-1]["seconds"] < result.rows[-1]["seconds"]
    assert (again.timeline.utilisation(3) <= 1 + 1e-9).all()


@pytest.mark.parametrize("seed", range(4))
def test_resent_updates_are_kept_as_long_as_they_are_needed(seed):
    result = Quadratics().run(
        fs.algorithms.DlsgdHetero(n=3, resend=True), rounds=60, steps=1, world=UNEVEN, seed=seed, timeline=True
    )
    assert result.status == "finished"
    with pytest.raises(fs.FedstrideError, match="resend needs links that take time"):
        Quadratics().run(fs.algorithms.DlsgdHetero(n=3, resend=True), rounds=3, world=fs.World(devices=0.1))


def test_times_with_links_by_hand():
    """One client at a time: 10 bytes a second down, 20 up, half a second of latency; 32 bytes travel each way."""
    links = fs.links.bandwidth(up=160.0, down=80.0, latency=0.5)
    world = fs.World(devices=2.0, links=links)
    problem = Quadratics(sizes=(6,))
    down, train, up = 0.5 + 32 / 10, 3 * 2.0, 0.5 + 32 / 20
    once = problem.run(fs.algorithms.FedBuff(n=1, concurrency=1), rounds=3, steps=3, world=world)
    assert [row["seconds"] for row in once.rows] == pytest.approx([k * (down + train + up) for k in (1, 2, 3)])
    first = problem.run(fs.algorithms.DlsgdHomo(n=1), rounds=2, steps=3, world=world)
    assert [row["seconds"] for row in first.rows] == pytest.approx([k * (down + train + up) for k in (1, 2)])
    # Send buffers: the request has long arrived when the first job ends. From then on the client trains from the newest
    # model there is, which comes `down` after the update; the next request waits for that job.
    sent = problem.run(fs.algorithms.DlsgdHetero(n=1), rounds=2, steps=3, world=world)
    assert [row["seconds"] for row in sent.rows] == pytest.approx([k * (down + train + up) for k in (1, 2)])
    # Two clients, the second so slow that the server waits for it; then the first has an update ready: a request takes
    # the latency, the upload 2.1 s.
    pair = Quadratics(sizes=(6, 7))
    draws = [fs.participation.uniform(1, True).draw(fs.keys.generator(s, "cohort", 1), np.ones(2), 1) for s in range(9)]
    seconds = [
        fs.participation.uniform(1, True).draw(fs.keys.generator(s, "cohort", 2), np.ones(2), 2) for s in range(9)
    ]
    seed = next(s for s in range(9) if draws[s].clients[0] == 1 and seconds[s].clients[0] == 0)
    slow = fs.World(devices=[2.0, 20.0], links=links)
    waited = pair.run(fs.algorithms.DlsgdHetero(n=1), rounds=2, steps=3, world=slow, seed=seed)
    end = down + 60.0 + up
    assert [row["seconds"] for row in waited.rows] == pytest.approx([end, end + 0.5 + up])
    full = problem.run(fs.algorithms.Scaffold(option="I"), rounds=1, steps=3, batch_size=2, world=fs.World(devices=2.0),
                       schedule=fs.schedule.Buffered(1, 1))  # fmt: skip
    assert full.rows[0]["seconds"] == pytest.approx((3 + 3) * 2.0)  # three steps, and a pass of three batches


def test_clients_take_the_newest_model_that_has_arrived():
    links = fs.links.bandwidth(1e12, latency=[0.3, 0.05, 1.1, 0.6, 0.2, 0.9])
    world = fs.World(devices=[0.1, 0.2, 0.15, 0.4, 0.12, 0.3], links=links)
    result = Quadratics().run(fs.algorithms.DlsgdHomo(n=1), rounds=80, steps=1, world=world, timeline=True)
    sent = [0.0] + [row["seconds"] for row in result.timeline.updates]
    behind = 0
    for job in result.timeline.jobs:
        down = links.latency[job["client"]] + 8 * 32 / 1e12
        surely, perhaps = (
            max(v for v, at in enumerate(sent) if at == 0 or at + down <= job["start"] + slack)
            for slack in (-1e-9, 1e-9)
        )
        assert surely <= job["version"] <= perhaps  # moments that are equal but for rounding go either way
        behind += max(v for v, at in enumerate(sent) if at <= job["start"]) > job["version"]
    assert behind > 10  # several were on their way


def test_rates_and_steps_are_those_of_the_client_and_of_the_version_it_starts_from():
    problem = Quadratics()
    table = np.random.default_rng(1).integers(1, 5, (30, 6))
    rate = lambda number: [0.1 / (1 + 0.1 * number) * (1 + 0.1 * i) for i in range(6)]  # noqa: E731
    result = problem.run(
        fs.algorithms.FedBuff(n=2), rounds=30, steps=table, lr=rate, world=UNEVEN, weights="uniform", timeline=True
    )
    models = [np.linspace(-1, 1, 4)]
    for update in result.timeline.trace():
        moves = []
        for job in update["jobs"]:
            i, v = job["client"], job["version"]
            assert job["steps"] == table[v, i]
            y = models[v].copy()
            for _ in range(table[v, i]):
                y = y - rate(v + 1)[i] * problem.a[i] @ (y - problem.c[i])
            moves.append(y - models[v])
        models.append(models[-1] + sum(moves) / 2)
    np.testing.assert_allclose(result.x, models[-1], rtol=1e-10)


def test_one_broken_client_does_not_end_the_run_however_fast_it_is():
    problem = Quadratics()
    pairs = [problem.clients.data(i) for i in range(6)]
    pairs[2] = (pairs[2][0] * 1e120, pairs[2][1] * 0 + 1e200)
    clients, world = fs.Clients.from_arrays(pairs), fs.World(devices=[1.0, 1.1, 0.01, 1.2, 1.3, 1.4])
    for method in (fs.algorithms.FedAsync(), fs.algorithms.FedBuff(n=2), fs.algorithms.DlsgdHomo(n=1),
                   fs.algorithms.DlsgdHomo(n=6), fs.algorithms.DlsgdHetero(n=2)):  # fmt: skip
        result = fs.simulate(
            method, problem.model(), clients, loss=fs.losses.least_squares, rounds=20, lr=0.1, steps=2, batch_size=None,
            dtype=torch.float64, device="cpu", world=world,
        )  # fmt: skip
        assert result.status == "finished" and sum(row["rejected"] for row in result.rows) > 0
        used = [row["clients"] for row in result.rows]
        assert sum(count > 0 for count in used) > 10


def test_traces_of_draws_by_weight_and_of_empty_rounds():
    problem = Quadratics()
    first = problem.run("fedavg", rounds=10, participation=fs.participation.weighted(3), timeline=True)
    again = problem.run("fedavg", rounds=10, schedule=fs.schedule.Replay(first.timeline.trace()))
    assert_same(first, again)
    world = fs.World(devices=0.01, availability=fs.availability.dropout(0.9))
    settings = dict(rounds=12, timeline=True)
    sparse = problem.run("fedavg", schedule=fs.schedule.Deadline(0.5), world=world, **settings)
    assert any(row["clients"] == 0 for row in sparse.rows)
    again = problem.run("fedavg", schedule=fs.schedule.Replay(sparse.timeline.trace()), **settings)
    assert [row["seconds"] for row in again.rows] == pytest.approx([row["seconds"] for row in sparse.rows])


def test_messages_of_ones_own(tmp_path):
    """Numbers in a message, and messages with properties, work asynchronously and after a resume."""
    from typing import NamedTuple

    from fedstride.algorithm import REGISTRY, Algorithm, Delta, register

    class Message(NamedTuple):
        x: torch.Tensor
        round: int

        @property
        def shrink(self):
            return 1 / (1 + 0.1 * self.round)

    class State(NamedTuple):
        x: torch.Tensor
        round: int = 0

    @register("own-messages")
    class Own(Algorithm):
        """A counter travels with the model."""

        def init(self, x, fleet):
            return State(x)

        def message(self, state):
            return Message(*state)

        def client(self, work, msg, memory):
            return Delta((work.descend(msg.x) - msg.x) * msg.shrink), memory

        def server(self, state, replies):
            return State(state.x + replies.mean("dx"), state.round + 1)

    try:
        settings = dict(schedule=fs.schedule.Buffered(4, 2), world=UNEVEN)
        whole = Quadratics().run(Own(), rounds=9, **settings)
        Quadratics().run(Own(), rounds=4, folder=tmp_path, **settings)
        assert torch.equal(Quadratics().run(Own(), rounds=9, folder=tmp_path, resume=True, **settings).x, whole.x)
    finally:
        del REGISTRY["own-messages"]


def test_an_overwritten_update_is_never_computed():
    """Whose batches are drawn is trained: these are the updates that were used, and those asked for at the end."""
    computed = set()

    def sampling(client, version, step):
        computed.add((client, version))
        return [0]

    result = Quadratics().run(
        fs.algorithms.DlsgdHetero(n=2), rounds=40, steps=1, world=UNEVEN, timeline=True, sampling=sampling
    )
    of = lambda fate: {(job["client"], job["version"]) for job in result.timeline.jobs if job["fate"] == fate}  # noqa: E731
    assert len(of("overwritten")) > 20 and of("used") <= computed
    assert computed - of("used") <= {(0, 0)}  # client 0 shows once, at the start, how large an upload is


def test_selection_is_uniform_and_counts_multiplicity():
    result = Quadratics().run(fs.algorithms.DlsgdHetero(n=3), rounds=400, world=UNEVEN, steps=1, timeline=True)
    counts = Counter()
    for job in result.timeline.jobs:
        counts[job["client"]] += job["times"]
    shares = np.array([counts[client] for client in range(6)]) / 1200
    assert abs(shares - 1 / 6).max() < 4 * math.sqrt(1 / 6 * 5 / 6 / 1200)


def test_everybody_at_work_trains_together():
    """Lazy batching: at the first arrival all jobs under way train in one batch."""
    clients, _ = digits(30, 40)
    world = fs.World(devices=fs.devices.slowdown(0.01, 1, 5))
    result = fs.simulate(
        fs.algorithms.FedBuff(n=1), small_network(), clients, rounds=120, steps=4, world=world, device="cpu"
    )
    assert result.batch > 7 and "trained at once" in result.summary()
    narrow = fs.simulate(
        fs.algorithms.FedBuff(n=1), small_network(), clients, rounds=120, steps=4, world=world, device="cpu", chunk=4
    )
    assert narrow.batch <= 4
    torch.testing.assert_close(result.x, narrow.x, rtol=1e-3, atol=1e-4)


def test_messages_are_counted_as_they_are_sent():
    """First arrivals and send buffers send every model to all N; Buffered sends one to every client that starts."""
    problem, size = Quadratics(), 4 * 8
    for method, down in ((fs.algorithms.DlsgdHomo(n=2), 6), (fs.algorithms.DlsgdHetero(n=2), 6)):
        for row in problem.run(method, rounds=10, world=UNEVEN).rows:
            assert row["bytes_down"] == down * size and row["bytes_up"] == row["clients"] * size
    buffered = problem.run(fs.algorithms.FedBuff(n=2, concurrency=3), rounds=10, world=UNEVEN)
    assert buffered.rows[0]["bytes_down"] == (3 + 1) * size  # three at the start, one after the first arrival
    assert {row["bytes_down"] for row in buffered.rows[1:]} == {2 * size}


def test_dlsgd_constants_by_hand():
    """10 GFLOPS, 17.0 MFLOP a step, slow-down U[1, 5], 400 Mbps and 2.2 MB: 44 ms a transfer, 50 steps a job."""
    world = fs.World(devices=fs.devices.slowdown(17.0e6 / 1e10, 1, 5), links=fs.links.bandwidth(400e6))
    rng = np.random.default_rng(0)
    clients = fs.Clients.from_arrays([(rng.normal(size=(2, 5)), rng.normal(size=2)) for _ in range(100)])
    # The model's size is what travels: 550,000 float32 parameters are 2.2 MB, of which only five are used.
    model = Padded(550_000)
    settings = dict(loss=fs.losses.least_squares, lr=1e-3, steps=50, batch_size=1, seed=5, device="cpu")
    per_step = Pace(world, 100, 5)._per_step
    cohort = [2, 30, 77]
    rows = fs.simulate("fedavg", model, clients, rounds=1, world=world, participation=[cohort], **settings).rows
    assert rows[0]["seconds"] == pytest.approx(0.044 + 50 * per_step[cohort].max() + 0.044, rel=1e-6)

    tiny = Padded(5)  # the same world and times with transfers put in as latency, so that it is quick
    slow = fs.World(devices=world.devices, links=fs.links.bandwidth(1e15, latency=0.044))
    homo = fs.simulate(fs.algorithms.DlsgdHomo(n=10), tiny, clients, rounds=400, world=slow, timeline=True, **settings)
    # Every client is at work all the time but for its transfers: a cycle is 50 steps, the upload, and a wait for the
    # next model, at most one transfer down and the time between two server updates.
    busy = np.array([50 * s + 0.044 for s in per_step])
    fastest, slowest = (1 / busy).sum() / 10, (1 / (busy + 0.088 + 0.02)).sum() / 10
    rate = 400 / homo.rows[-1]["seconds"]
    assert slowest < rate < fastest
    assert rate / fastest > 0.9  # a newer model nearly always lies in the buffer


class Padded(torch.nn.Module):
    """A linear model of five weights with so many parameters in all."""

    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, x):
        return x @ self.weight[:5, None].to(x.dtype)


# The bias of arrival rates


def test_first_arrivals_weigh_clients_by_arrival_rate_and_send_buffers_do_not():
    """Eight clients, speeds 1 to 5, one exact gradient a job, small steps: where the tail of the run has its mean."""
    problem, rounds = Quadratics(sizes=(6, 9, 14, 5, 20, 11, 8, 7), seed=24), 1000
    metrics = {f"x{k}": lambda outputs, targets, k=k: float(outputs[k]) for k in range(4)}  # the model itself

    def tail(method):
        """Mean model and arrival rates over the last two thirds of a run."""
        result = problem.run(
            method, rounds=rounds, steps=1, lr=0.03, weights="uniform", timeline=True, metrics=metrics,
            world=fs.World(devices=np.linspace(1, 5, 8).tolist()), test=(np.eye(4), np.zeros(4)),
        )  # fmt: skip
        rows = [row for row in result.rows if row["round"] > rounds / 3]
        used = [job for job in result.timeline.jobs if job["fate"] == "used" and job["update"] > rounds / 3]
        counts = np.bincount([job["client"] for job in used], weights=[job["times"] for job in used])
        return np.array([np.mean([row[name] for row in rows]) for name in metrics]), counts / counts.sum()

    homo, rates = tail(fs.algorithms.DlsgdHomo(n=2))
    hetero, even = tail(fs.algorithms.DlsgdHetero(n=4))
    uniform = problem.optimum("uniform")
    weighted = [r * a for r, a in zip(rates, problem.a)]
    biased = np.linalg.solve(sum(weighted), sum(m @ c for m, c in zip(weighted, problem.c)))
    away = np.linalg.norm(biased - uniform)
    assert away > 0.5
    assert np.linalg.norm(homo - biased) < 0.01 * away
    assert np.linalg.norm(hetero - uniform) < 0.1 * away
    assert rates.max() / rates.min() == pytest.approx(5, rel=0.15) and even == pytest.approx(1 / 8, rel=0.15)


# Absence, and what cannot work


def test_a_lost_job_frees_its_slot_or_is_tried_again():
    world = fs.World(devices=UNEVEN.devices, availability=fs.availability.dropout(0.4))
    for method in ("fedbuff", "dlsgd-homo", "dlsgd-hetero", "asysg", "fedasync"):
        result = Quadratics().run(method, rounds=30, world=world, timeline=True)
        fates = Counter(job["fate"] for job in result.timeline.jobs)
        assert result.status == "finished" and fates["lost"] > 5
    # Everybody is needed and somebody is always lost: who is lost tries again from the same model.
    stubborn = Quadratics().run(fs.algorithms.DlsgdHomo(n=6), rounds=20, world=world, timeline=True)
    again = [job for job in stubborn.timeline.jobs if job["repeat"]]
    assert again and all(row["clients"] == 6 for row in stubborn.rows)


def test_absent_clients_start_when_they_are_back():
    world = fs.World(devices=0.1, availability=fs.availability.cycle(on=3.0, period=10.0))
    for method in ("fedbuff", "dlsgd-homo", "dlsgd-hetero"):
        result = Quadratics().run(method, rounds=60, steps=3, world=world, timeline=True)
        assert len({job["client"] for job in result.timeline.jobs}) == 6 and result.rows[-1]["seconds"] > 3


def test_nobody_left_is_said_with_time_and_clients():
    gone = fs.World(devices=1.0, availability=lambda client, seconds: seconds < 2.5)
    for method in (fs.algorithms.FedBuff(n=2), fs.algorithms.DlsgdHomo(n=2), fs.algorithms.DlsgdHetero(n=2)):
        with pytest.raises(fs.FedstrideError, match=r"at virtual second .* clients \[.*\]"):
            Quadratics().run(method, rounds=50, steps=1, world=gone)


def test_who_is_away_when_a_model_comes_takes_the_one_that_is_on_its_way():
    """Client 0 is ten seconds off and away when its first model comes; others were sent meanwhile."""
    world = fs.World(
        devices=1.0, links=fs.links.bandwidth(1e12, latency=[10.0] + [0.1] * 5),
        availability=lambda client, now: client > 0 or not 9.5 <= now < 10.5,
    )  # fmt: skip
    result = Quadratics().run(fs.algorithms.DlsgdHomo(n=1), rounds=80, steps=1, world=world, timeline=True)
    first = next(job for job in result.timeline.jobs if job["client"] == 0)
    assert first["start"] == pytest.approx(11.2) and first["version"] > 0


def test_too_few_live_clients_do_not_hang():
    two_left = fs.World(devices=1.0, availability=lambda client, seconds: client < 2 or seconds < 0.5)
    with pytest.raises(fs.FedstrideError, match="has 2 of 3 updates and nobody is at work.*lower n"):
        Quadratics().run(fs.algorithms.DlsgdHomo(n=3), rounds=5, steps=1, world=two_left)
    assert Quadratics().run(fs.algorithms.DlsgdHomo(n=2), rounds=5, steps=1, world=two_left).status == "finished"


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        (fs.algorithms.DlsgdHomo(n=7), {}, "n=7 updates, but the fleet has 6 clients"),
        (fs.algorithms.DlsgdHetero(n=7), {}, "n=7 updates, but the fleet has 6 clients"),
        (fs.algorithms.FedBuff(n=7), {}, "buffer of 7 updates is more than the fleet"),
        (fs.algorithms.FedBuff(concurrency=9), {}, "concurrency of 9 is more than the fleet"),
        ("fedbuff", {"participation": fs.participation.uniform(3)}, "decides itself who takes part"),
        ("fedveca", {"schedule": fs.schedule.Buffered()}, "assigns the clients' steps"),
        ("fedagrac", {"schedule": fs.schedule.Buffered()}, "2 exchanges a round"),
        ("fedlin", {"schedule": fs.schedule.FirstArrivals(2)}, "exchanges a round"),
        ("scaffold", {"schedule": fs.schedule.SendBuffers(2)}, "keeps memories on its clients"),
        ("fedavg", {"schedule": fs.schedule.Buffered(), "steps": fs.steps.unfinished(0.5, 2)}, "for whole cohorts"),
        ("fedavg", {"schedule": fs.schedule.Buffered(), "steps": [[1, 2, 3, 0, 1, 2]] * 250}, "for whole cohorts"),
        ("fedavg", {"schedule": "buffered"}, "schedule must come from fs.schedule"),
        ("fedavg", {"schedule": fs.schedule.Replay([])}, "the trace has 0 server updates"),
    ],
)  # fmt: skip
def test_impossible_pairings_are_refused(method, changes, words):
    with pytest.raises(fs.FedstrideError, match=words):
        Quadratics().run(method, **changes)


def test_impossible_numbers_are_refused():
    for make in (
        lambda: fs.schedule.Buffered(concurrency=0),
        lambda: fs.schedule.Buffered(size=1.5),
        lambda: fs.schedule.FirstArrivals(0),
        lambda: fs.schedule.SendBuffers("2"),
        lambda: fs.schedule.Replay([{"jobs": 3}]),
        lambda: fs.algorithms.FedBuff(staleness="old"),
        lambda: fs.algorithms.FedAsync(mixing=1.5),
    ):
        with pytest.raises(fs.FedstrideError):
            make()


def test_a_run_in_which_everything_overflows_is_diverged():
    for method in ("fedbuff", "fedasync", "dlsgd-homo", "dlsgd-hetero", "asysg"):
        result = Quadratics().run(method, rounds=200, lr=1e6, steps=60, world=UNEVEN)
        assert result.status == "diverged", method


# Timelines


def test_a_synchronous_run_has_a_timeline_too():
    result = Quadratics().run("scaffold", rounds=3, world=UNEVEN, timeline=True)
    assert len(result.timeline.jobs) == 18 and result.timeline.staleness() == {0: 18} and result.timeline.max_delay == 0
    slowest = result.timeline.utilisation(6)
    assert slowest.max() > 0.9 and slowest.min() < 0.3
    assert Quadratics().run("scaffold", rounds=3, world=UNEVEN).timeline is None


def test_nobody_does_two_things_at_once():
    for method in ("fedbuff", "dlsgd-homo", "dlsgd-hetero"):
        result = Quadratics().run(method, rounds=80, world=UNEVEN, timeline=True)
        for client in range(6):
            spans = sorted((j["start"], j["end"]) for j in result.timeline.jobs if j["client"] == client)
            assert len(spans) > 5 and all(a[1] <= b[0] + 1e-12 for a, b in zip(spans, spans[1:]))
        assert (result.timeline.utilisation(6) <= 1 + 1e-9).all()


# Courses alone


@pytest.mark.parametrize("kind", ["buffered", "first", "send"])
def test_a_course_written_down_and_read_again_goes_on_alike(kind):
    def make():
        world = fs.World(devices=fs.devices.slowdown(0.1, 1, 5), links=fs.links.bandwidth(1e6, latency=0.02))
        arguments = (costs(world, 40), lambda client, version: (3, 3, 0.1), 0, 0.0)
        return {
            "buffered": lambda: BufferedCourse(*arguments, 10, 3),
            "first": lambda: FirstArrivalsCourse(*arguments, 5),
            "send": lambda: SendBuffersCourse(*arguments, 5, False),
        }[kind]()

    def play(course, first, last):
        seen = []
        for version in range(first, last):
            course.publish(version)
            while not course.closed:
                number = course.advance()
                assert number is not None
                seen.append((number, course.jobs[number], course.clock.now))
                course.release(number)
        return seen

    one = make()
    play(one, 0, 20)
    other = make()
    other.load(json.loads(json.dumps(one.dump())))
    assert play(one, 20, 40) == play(other, 20, 40)
    assert one.dump() == other.dump()


def test_numbers_in_messages_of_several_versions_become_a_column():
    from fedstride.algorithm import Params
    from fedstride.simulator import stacked

    like = torch.zeros(1, dtype=torch.float64)
    assert stacked([Params(1.5), Params(1.5)], like).x == 1.5
    assert stacked([Params(1.0), Params(2.0)], like).x.tolist() == [[1.0], [2.0]]
    assert stacked([Params(like[None]), Params(like[None] + 1)], like).x.tolist() == [[0.0], [1.0]]


def test_who_was_away_when_the_others_were_refused_is_not_waited_for():
    """The server had drawn client 1, went on without it, and must not take its update for one of the next draw."""
    problem = Quadratics()
    pairs = [problem.clients.data(i) for i in range(6)]
    pairs[2] = (pairs[2][0] * 1e120, pairs[2][1] * 0 + 1e200)  # never finite
    result = fs.simulate(
        fs.algorithms.DlsgdHetero(n=3), problem.model(), fs.Clients.from_arrays(pairs), loss=fs.losses.least_squares,
        rounds=25, lr=0.05, steps=3, batch_size=None, dtype=torch.float64, device="cpu", seed=33,
        world=fs.World(
            devices=[0.5, 0.1, 0.2, 0.35, 0.4, 0.1], availability=lambda client, t: not (client == 1 and 0.5 <= t < 6)
        ),
    )  # fmt: skip
    assert result.status == "finished" and result.rows[-1]["round"] == 25
