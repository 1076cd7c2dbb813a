"""What every method must satisfy, as plain functions, so that mutation tests can watch them fail."""

import tempfile

import numpy as np
import torch
from problems import STEPS, Quadratics, digits, small_network

import fedstride as fs

TUNED = {"feddyn": {"alpha": 2.0}, "scaffnew": {"p": 0.3}}  # quick on the test problem; the defaults are for practice
HALF = fs.participation.uniform(3)
MULTISET = fs.participation.uniform(4, replacement=True)
SYNC = fs.schedule.Sync()  # for what is said about rounds and cohorts; otherwise a method runs on its own schedule
UNEVEN = fs.World(
    devices=fs.devices.seconds([0.5, 0.1, 0.2, 0.35, 0.4, 0.1]),
    links=fs.links.bandwidth(up=[2e5, 1e5, 3e5, 1e5, 2e5, 1e5], down=4e5, latency=0.01),
)


def make(name: str, **options):
    return fs.algorithms.make(name, **(TUNED.get(name, {}) | options))


def check_exact(algorithm, weights="data", **changes):
    """Exact gradients, fixed step, unequal steps and weights: the end is the weighted optimum."""
    problem = Quadratics()
    result = problem.run(algorithm, **({"weights": weights, "rounds": 100} | changes))
    distance = problem.distance(result, problem.optimum(weights))
    assert distance < 1e-10, f"{algorithm} ends {distance:.2e} from the {weights}-weighted optimum"


def check_backends_agree(algorithm, **changes):
    """One by one, all at once, and in chunks: the same numbers."""
    clients, test = digits()
    ways = [("sequential", None), ("vmap", 2), ("vmap", None)]
    for dtype, tolerance, tried in ((torch.float64, 1e-9, ways), (torch.float32, 2e-3, ways[:2])):
        settings = dict(rounds=3, lr=0.05, steps=STEPS, batch_size=5, dtype=dtype, test=test, device="cpu") | changes
        runs = [
            fs.simulate(algorithm, small_network(0.3), clients, backend=backend, chunk=chunk, **settings)
            for backend, chunk in tried
        ]
        for other in runs[1:]:
            torch.testing.assert_close(other.x, runs[0].x, rtol=tolerance, atol=tolerance)
            assert [row["bytes_up"] for row in other.rows] == [row["bytes_up"] for row in runs[0].rows]


def check_resume(algorithm, **changes):
    """Interrupted and gone on with: bit for bit the uninterrupted run, rows and memories included."""
    clients, test = digits()
    settings = dict(lr=0.05, steps=STEPS, batch_size=5, test=test, device="cpu", seed=3) | changes
    model = small_network(0.2)
    whole = fs.simulate(algorithm, model, clients, rounds=4, **settings)
    with tempfile.TemporaryDirectory() as folder:
        fs.simulate(algorithm, model, clients, rounds=2, folder=folder, **settings)
        resumed = fs.simulate(algorithm, model, clients, rounds=4, folder=folder, resume=True, **settings)
    assert torch.equal(whole.x, resumed.x), f"{algorithm} differs after resuming"
    assert whole.rows == resumed.rows
    for mine, theirs in zip(whole.memories.dump(), resumed.memories.dump()):
        if isinstance(mine, dict):
            assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
        else:
            assert mine == theirs


def check_resume_anywhere(algorithm, **changes):
    """Cut after every single server update: clock, buffers, jobs in flight and the timeline go on as if nothing was."""
    clients, _ = digits()
    settings = dict(lr=0.05, steps=STEPS, batch_size=5, device="cpu", seed=3, world=UNEVEN, timeline=True) | changes
    model = small_network(0.2)
    whole = fs.simulate(algorithm, model, clients, rounds=5, **settings)
    with tempfile.TemporaryDirectory() as folder:
        for rounds in range(1, 6):
            resumed = fs.simulate(
                algorithm, model, clients, rounds=rounds, folder=folder, resume=rounds > 1, **settings
            )
    assert torch.equal(whole.x, resumed.x) and whole.rows == resumed.rows and whole.batch == resumed.batch
    assert whole.timeline.jobs == resumed.timeline.jobs and whole.timeline.updates == resumed.timeline.updates
    assert all(torch.equal(a, b) for a, b in zip(whole.memories.get(range(6)), resumed.memories.get(range(6))))


def check_replay(algorithm, **changes):
    """A recorded run, followed by another that knows only its trace: the same model and the same rows."""
    problem = Quadratics()
    settings = dict(rounds=30, world=UNEVEN, timeline=True, batch_size=3) | changes
    first = problem.run(algorithm, **settings)
    again = problem.run(
        algorithm, **(settings | {"schedule": fs.schedule.Replay(first.timeline.trace()), "world": None})
    )
    torch.testing.assert_close(first.x, again.x, rtol=1e-12, atol=1e-12)
    for name in ("seconds", "clients", "steps", "bytes_up", "bytes_down", "staleness", "max_staleness"):
        assert [row[name] for row in first.rows if row["round"]] == [row[name] for row in again.rows if row["round"]], (
            name
        )
    assert first.timeline.trace() == again.timeline.trace()


def check_time_of_a_job(algorithm):
    """What a job takes is known before it is computed: its steps, and the full gradients the method declares."""
    problem, seconds = Quadratics(), np.array([0.5, 0.1, 0.2, 0.35, 0.4, 0.1])
    result = problem.run(
        algorithm, rounds=1, schedule=SYNC, batch_size=3, world=fs.World(devices=seconds.tolist()), timeline=True
    )
    passes = algorithm.full_gradients * -(-problem.clients.sizes // 3)
    trained = [job for job in result.timeline.jobs if job["exchange"] == "train" and job["update"] == 1]
    assert len(trained) == 6
    for job in trained:
        expected = seconds[job["client"]] * (job["steps"] + passes[job["client"]])
        assert abs(job["end"] - job["start"] - expected) < 1e-12


def check_traffic(algorithm, partial: bool):
    """Bytes counted from what travels are those of the declaration, but for a few scalars."""
    problem = Quadratics(d=40, sizes=(50, 60, 70, 45, 80, 55))
    who = HALF if partial else None
    result = problem.run(algorithm, rounds=3, participation=who, schedule=SYNC)
    size = 40 * 8
    for row in result.rows[1:]:
        for direction, vectors in zip(("bytes_down", "bytes_up"), algorithm.traffic):
            counted = row[direction] / (size * row["clients"]) if row["clients"] else 0
            least = 0 if any(exchange.audience for exchange in algorithm.exchanges) else vectors  # not all are asked
            assert least <= counted < vectors + 0.2, f"{algorithm}: {direction} {counted:.2f}, declared {vectors}"


def check_absent_untouched(algorithm):
    """Who does not take part keeps memory and state as they were; an empty round changes nothing."""
    problem = Quadratics()
    before = problem.run(algorithm, rounds=1, schedule=SYNC, participation=[[0, 1, 2, 3, 4, 5]])
    after = problem.run(algorithm, rounds=2, schedule=SYNC, participation=[[0, 1, 2, 3, 4, 5], [1, 4]])
    empty = problem.run(algorithm, rounds=2, schedule=SYNC, participation=[[0, 1, 2, 3, 4, 5], []])
    absent = [0, 2, 3, 5]
    for mine, theirs in zip(before.memories.get(absent), after.memories.get(absent)):
        assert torch.equal(mine, theirs)
    assert torch.equal(before.x, empty.x) and empty.rows[-1]["round"] == 2 and empty.rows[-1]["clients"] == 0
    for mine, theirs in zip(before.memories.get(range(6)), empty.memories.get(range(6))):
        assert torch.equal(mine, theirs)


def check_rejection(algorithm, rounds=3, **changes):
    """A client whose numbers overflow is refused and counted; its memory stays; the others go on."""
    problem = Quadratics()
    pairs = [problem.clients.data(i) for i in range(6)]
    pairs[2] = (pairs[2][0], pairs[2][1] * 0 + 1e200)  # gradients of 1e200 overflow when squared or taken further
    pairs[2] = (pairs[2][0] * 1e120, pairs[2][1])
    clients = fs.Clients.from_arrays(pairs)
    settings = dict(
        loss=fs.losses.least_squares,
        rounds=rounds,
        lr=0.1,
        steps=STEPS,
        batch_size=None,
        dtype=torch.float64,
        device="cpu",
    )
    result = fs.simulate(algorithm, problem.model(), clients, **(settings | changes))
    assert result.status == "finished" and torch.isfinite(result.x).all()
    assert sum(row["rejected"] for row in result.rows) >= 3
    for value in result.memories.get([2]):
        assert torch.isfinite(value).all(), f"{algorithm} kept the memory of a rejected upload"


def check_order_of_replies(algorithm):
    """The order in which replies arrive matters only to rounding."""
    problem = Quadratics()
    forward = problem.run(algorithm, rounds=3, chunk=1, schedule=SYNC)
    ask = fs.simulate.__globals__["Simulator"].ask

    def backwards(self, exchange, message, jobs, deadline=None):
        yield from reversed(list(ask(self, exchange, message, jobs)))

    fs.simulate.__globals__["Simulator"].ask = backwards
    try:
        backward = problem.run(algorithm, rounds=3, chunk=1, schedule=SYNC)
    finally:
        fs.simulate.__globals__["Simulator"].ask = ask
    torch.testing.assert_close(forward.x, backward.x, rtol=1e-12, atol=1e-12)


def check_batches_differ():
    """Every step, client, round and purpose has its own batch, and all data are drawn equally often."""
    from fedstride.keys import job_keys
    from fedstride.sampling import Jobs, Sampler

    clients = fs.Clients.from_arrays([(torch.arange(50.0)[:, None], torch.zeros(50))] * 4)
    sampler = Sampler(clients, 10, "replacement")
    ids, zero = np.arange(4), np.zeros(4, dtype=np.int64)
    seen = set()
    counts = np.zeros(200)
    for version in range(20):
        for purpose in ("train", "gradient"):
            jobs = Jobs(ids, zero + version, zero, zero + 6, zero + 6, zero, zero)
            keys = job_keys(0, purpose, *jobs[:3], torch.device("cpu"))
            for step in sampler.batches(jobs, keys, 0, 6):
                for row, client in zip(step.rows, ids):
                    assert ((row >= client * 50) & (row < client * 50 + 50)).all()
                    counts += np.bincount(row.numpy(), minlength=200)
                    seen.add(tuple((row - client * 50).tolist()))
    assert len(seen) == 20 * 2 * 6 * 4
    expected = counts.sum() / 200
    assert abs(counts - expected).max() < 6 * np.sqrt(expected)
