"""Workers on Ray: the same answer with any number of them, whatever happens to them."""

import copy
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conformance import UNEVEN, make
from problems import Quadratics, digits, heed_ctrl_c, small_network

import fedstride as fs
from fedstride.scale import cluster, team
from fedstride.scale.placement import TOLERANCE, Placement
from fedstride.scale.worker import Held

pytestmark = pytest.mark.xdist_group("ray")  # one set of workers for all of them
DRIVER = os.getpid()
BUFFERED = dict(world=UNEVEN, schedule=fs.schedule.Buffered(4, 2))


@pytest.fixture(scope="module")
def everybody():
    with fs.Pool(3) as pool:
        yield pool


def some(pool, count):
    """A pool of the first few workers."""
    few = copy.copy(pool)
    for name in ("handles", "machines", "neighbours", "sharing"):
        setattr(few, name, getattr(pool, name)[:count])
    return few


def assert_same(one, two, tolerance=1e-9):
    """The same model and memories to rounding; sampling, clock, cohorts and bytes exactly."""
    torch.testing.assert_close(one.x, two.x, rtol=tolerance, atol=tolerance)
    for row, other in zip(one.rows, two.rows, strict=True):
        assert row.keys() == other.keys()
        for name in ("round", "seconds", "clients", "steps", "bytes_up", "bytes_down", "rejected", "max_staleness"):
            assert row.get(name) == other.get(name), name
        assert row.get("local_loss", 0) == pytest.approx(other.get("local_loss", 0), rel=1e-6)
    assert one.status == two.status
    (mine, tables), (theirs, others) = one.memories.dump(), two.memories.dump()
    assert mine == theirs and tables.keys() == others.keys()
    for name in tables:
        torch.testing.assert_close(tables[name], others[name], rtol=tolerance, atol=tolerance)
    if one.timeline is not None:
        assert (one.timeline.jobs, one.timeline.updates) == (two.timeline.jobs, two.timeline.updates)


RUNS = {
    "fedavg": ("fedavg", dict(participation=fs.participation.weighted(4))),
    "scaffold": ("scaffold", dict(participation=fs.participation.uniform(4, replacement=True))),
    "fedagrac": ("fedagrac", dict(chunk=2)),
    "fedveca": ("fedveca", {}),
    "fedlga": ("fedlga", dict(schedule=fs.schedule.Deadline(1.0), world=UNEVEN)),
    "scaffold, buffered": ("scaffold", BUFFERED),
    "fedagrac-saving": ("fedagrac-saving", dict(participation=fs.participation.bernoulli(0.6))),
    "fedbuff": (fs.algorithms.FedBuff(n=2, staleness="polynomial"), dict(world=UNEVEN, chunk=1)),
    "dlsgd-hetero": ("dlsgd-hetero", dict(world=UNEVEN)),
    "fedlga, buffered": ("fedlga", BUFFERED),
}


@pytest.mark.parametrize("name", RUNS)
def test_any_number_of_workers_gives_the_same_run(everybody, name):
    method, settings = RUNS[name]
    settings = dict(rounds=6, batch_size=3, timeline=True) | settings
    method, problem = make(method) if isinstance(method, str) else method, Quadratics()
    alone = problem.run(method, **settings)
    for count in (1, 2, 3):
        assert_same(alone, problem.run(method, workers=some(everybody, count), **settings))


def test_a_network_with_dropout_and_test_data(everybody):
    clients, test = digits()
    settings = dict(rounds=3, lr=0.05, steps=[1, 4, 2, 3, 2, 5], dtype=torch.float64, test=test, train_loss=True)
    settings |= dict(sampling="shuffle", momentum=0.5, device="cpu")
    runs = [
        fs.simulate("fedavg", small_network(0.3), clients, workers=workers, **settings) for workers in (None, everybody)
    ]
    assert_same(*runs)
    assert runs[1].rows[-1]["accuracy"] == runs[0].rows[-1]["accuracy"] and runs[1].backend == "sequential"


def test_workers_compute_in_the_type_of_the_run(everybody):
    clients, _ = digits()
    cases = ((torch.bfloat16, None), (torch.bfloat16, everybody), (torch.float32, everybody))
    one, two, exact = (
        fs.simulate("fedavg", small_network(), clients, rounds=2, steps=3, device="cpu", dtype=dtype, workers=workers)
        for dtype, workers in cases
    )
    torch.testing.assert_close(one.x, two.x, rtol=0, atol=1e-6)
    assert (exact.x - one.x).abs().max() > 1e-5


@pytest.mark.parametrize("settings", [{}, BUFFERED], ids=["sync", "buffered"])
def test_rejected_uploads(everybody, settings):
    """A client whose numbers run away is counted, and keeps its memory."""
    settings = settings | dict(rounds=4, lr=[0.1, 0.1, 1e300, 0.1, 0.1, 0.1], timeline=True)
    runs = [Quadratics().run("scaffold", workers=workers, **settings) for workers in (None, everybody)]
    assert_same(*runs)
    assert sum(row["rejected"] for row in runs[1].rows) > 0


def test_sums_travel_and_not_vectors(everybody, monkeypatch):
    """What comes back in a round is one vector a worker and field, however many clients there are."""
    came = []
    get = team.get

    def counted(ref):
        value = get(ref)
        if hasattr(value, "reduced"):
            came.append(sum(table.size for part in value.reduced[2:] for table in part.values()))
        return value

    monkeypatch.setattr(team, "get", counted)
    rng = np.random.default_rng(0)
    clients = fs.Clients.from_arrays([(rng.normal(size=(4, 30)), rng.normal(size=4)) for _ in range(40)])
    settings = dict(loss=fs.losses.least_squares, rounds=2, steps=2, workers=some(everybody, 2), device="cpu")
    fs.simulate("fedavg", torch.nn.Linear(30, 1), clients, **settings)
    assert came == [31] * 4  # factors are weights here: one sum serves both
    came.clear()
    fs.simulate("fedlga", torch.nn.Linear(30, 1), clients, **settings)  # needs rows, and says so
    assert sum(came) == 2 * (40 * 31 + 2 * 31)


@pytest.mark.parametrize("name", ["fedexp", "fednova"])
def test_an_asynchronous_run_diverges_with_workers_as_without(everybody, name):
    """Methods whose uploads have single numbers beside the vectors."""
    alone, shared = (
        Quadratics().run(name, lr=1e300, rounds=6, workers=pool, **BUFFERED) for pool in (None, some(everybody, 2))
    )
    assert alone.status == shared.status == "diverged" and len(alone.rows) == len(shared.rows)


@pytest.mark.parametrize("settings", [{}, BUFFERED], ids=["sync", "buffered"])
@pytest.mark.parametrize("first", ["workers", "alone"])
def test_resume_with_and_without_workers(everybody, tmp_path, settings, first):
    problem, settings = Quadratics(), settings | dict(batch_size=3, timeline=True)
    whole = problem.run("scaffold", rounds=8, **settings)
    order = (everybody, None) if first == "workers" else (None, everybody)
    problem.run("scaffold", rounds=3, folder=tmp_path, workers=order[0], **settings)
    resumed = problem.run("scaffold", rounds=8, folder=tmp_path, resume=True, workers=order[1], **settings)
    assert_same(whole, resumed)


class Deadly:
    """Draws batches, says which process does, and kills it once in the middle of a round."""

    def __init__(self, folder):
        self.folder, self.driver = folder, os.getpid()

    def __call__(self, client, round, step):
        me = os.getpid()
        if me != self.driver:
            (self.folder / f"pid-{me}").touch()
            if round == 2 and step == 1 and client % 2:
                try:
                    (self.folder / "dead").touch(exist_ok=False)
                except FileExistsError:
                    pass
                else:
                    os.kill(me, signal.SIGKILL)
        return [(client + round + 3 * step) % 5, (client * round + step) % 5]


@pytest.mark.parametrize("settings", [{}, BUFFERED], ids=["sync", "buffered"])
def test_a_worker_is_killed_in_the_middle_of_a_round(everybody, tmp_path, settings):
    """The run ends as without; its clients' memories are not lost; when it is back, it is used again."""
    before = everybody.processes()

    def wait(row):
        if (tmp_path / "dead").exists() and len(list(tmp_path.glob("pid-*"))) < 3:
            time.sleep(0.5)  # another process takes part only when it is there

    problem, workers = Quadratics(), some(everybody, 2)
    settings = dict(rounds=60, batch_size=2, timeline=True) | settings
    alone = problem.run("scaffold", sampling=Deadly(tmp_path), **settings)
    shot = problem.run("scaffold", sampling=Deadly(tmp_path), workers=workers, progress=wait, **settings)
    assert (tmp_path / "dead").exists()
    assert_same(alone, shot)
    (new,) = set(everybody.processes()) - set(before)
    assert (tmp_path / f"pid-{new}").exists()


@pytest.mark.slow
def test_work_that_kills_every_worker_is_given_up(everybody):
    def fatal(client, round, step):
        if os.getpid() != DRIVER:
            os.kill(os.getpid(), signal.SIGKILL)
        return [0]

    with pytest.raises(fs.FedstrideError, match="workers have died 4 times over the same work"):
        Quadratics().run("fedavg", sampling=fatal, rounds=2, workers=some(everybody, 1))
    everybody.processes()


def test_mistakes_of_workers_come_out_as_they_were_made(everybody):
    with pytest.raises(fs.FedstrideError, match=r"^sampling\(\d, 0, 0\) gave \[99\]; client"):
        Quadratics().run("fedavg", sampling=lambda client, round, step: [99], workers=everybody)
    lock = __import__("threading").Lock()
    with pytest.raises(fs.FedstrideError, match="cannot be copied to another process"):
        Quadratics().run("fedavg", sampling=lambda client, round, step: [0] if lock else [1], workers=everybody)


def test_old_memories_are_cleared_away(everybody, monkeypatch):
    """With few clients a round, the store holds about as many rows as there are clients, not one for every job."""
    seen = []
    remember = cluster.Cluster._remember

    def counted(self, answers, used):
        remember(self, answers, used)
        places = self.memories._places.values()
        seen.append(sum(stored.count for stored in {place.stored for place in places}))

    monkeypatch.setattr(cluster.Cluster, "_remember", counted)
    monkeypatch.setattr("fedstride.scale.shelf.SELDOM", 4)
    rng = np.random.default_rng(0)
    clients = fs.Clients.from_arrays([(rng.normal(size=(4, 3)), rng.normal(size=4)) for _ in range(12)])
    settings = dict(loss=fs.losses.least_squares, rounds=40, steps=2, device="cpu", dtype=torch.float64)
    settings |= dict(participation=fs.participation.uniform(4))
    model = torch.nn.Linear(3, 1)
    runs = [
        fs.simulate("scaffold", model, clients, workers=workers, **settings) for workers in (None, some(everybody, 1))
    ]
    assert_same(*runs)
    assert max(seen) <= 3 * 12


# Whole runs


def study():
    base = dict(partition={"name": "dirichlet", "clients": 4, "alpha": 1.0}, model={"name": "mlp", "hidden": 8})
    return fs.Study(fs.Experiment(**base, rounds=3, steps=2, dtype="float64"), ["fedavg", "scaffold"], seeds=2)


def test_a_study_spreads_runs_first_and_cohorts_second(everybody, tmp_path):
    """Four runs on three workers: three whole ones, and one whose cohorts are shared."""
    rows, ended = [], []
    alone = study().play(tmp_path / "alone")
    watch, done = lambda plan, row: rows.append((str(plan), row["round"])), lambda plan, run: ended.append(str(plan))
    spread = study().play(tmp_path / "spread", False, watch, done, everybody)
    plans = study().plans
    assert sorted(rows) == sorted((str(plan), round) for plan in plans for round in (1, 2, 3))
    assert sorted(ended[:3]) == sorted(map(str, plans[:3])) and ended[3:] == [str(plans[3])]
    assert list(alone) == list(spread)
    for label in alone:
        for one, two in zip(alone[label], spread[label], strict=True):
            assert one.seed == two.seed and one.rows[-1]["loss"] == pytest.approx(two.rows[-1]["loss"], rel=1e-9)
    assert not (tmp_path / "spread" / ".seen").exists()
    again = study().play(tmp_path / "spread", False, workers=1)  # complete: no workers are needed
    assert again == spread


# Last, because nobody waits for the worker it leaves behind


def test_a_straggler_is_not_waited_for(everybody, tmp_path, monkeypatch):
    monkeypatch.setattr(team, "LATE", (0.5, 1.0))

    def slow(client, round, step):
        if os.getpid() != DRIVER and round == 1 and client == 1 and not (tmp_path / "asleep").exists():
            (tmp_path / "asleep").write_text(str(os.getpid()))
            time.sleep(100)
        return [step % 5]

    problem, start = Quadratics(), time.monotonic()
    late = problem.run("scaffold", sampling=slow, rounds=4, workers=some(everybody, 2))
    assert time.monotonic() - start < 90
    os.kill(int((tmp_path / "asleep").read_text()), signal.SIGKILL)
    assert_same(problem.run("scaffold", sampling=slow, rounds=4), late)


# Placement


def test_work_is_balanced_by_steps_and_clients_stay():
    placement = Placement(60, 3)
    clients, work = np.arange(60), np.random.default_rng(0).integers(1, 50, 60).astype(float)
    first = placement.split(clients, work, [0, 1, 2])
    loads = [work[rows].sum() for rows in first.values()]
    assert max(loads) - min(loads) <= work.max()
    again = placement.split(clients, work, [0, 1, 2])
    assert all(np.array_equal(first[worker], again[worker]) for worker in first)
    few = np.sort(np.random.default_rng(1).choice(60, 20, replace=False))
    parts = placement.split(few, work[few], [0, 1, 2])
    stayed = sum(int(np.isin(few[rows], first[worker]).sum()) for worker, rows in parts.items())
    assert stayed >= 14 and sorted(np.concatenate(list(parts.values()))) == list(range(20))
    limit = TOLERANCE * work[few].sum() / 3 + work.max()
    assert max(work[few[rows]].sum() for rows in parts.values()) <= limit
    without = placement.split(clients, work, [0, 2])
    assert set(without) == {0, 2} and (placement.home != 1).all()


@pytest.mark.parametrize("fixed", [0.0, 50.0], ids=["linear", "mostly overhead"])
def test_shares_follow_measured_speed_and_do_not_run_away(fixed):
    """Worker 1 is three times as fast; where a call costs the same whatever is in it, nothing drifts."""
    placement, rng = Placement(300, 2), np.random.default_rng(0)
    clients, work, speed = np.arange(300), np.ones(300), (1.0, 3.0)
    for _ in range(60):
        parts = placement.split(clients, work, [0, 1])
        times = {w: (fixed + len(rows) / speed[w]) * rng.uniform(0.9, 1.1) for w, rows in parts.items()}
        placement.learn({w: (float(len(rows)), times[w]) for w, rows in parts.items()})
    share = len(parts[1]) / 300
    assert 0.65 < share < 0.85 if fixed == 0 else 0.3 < share < 0.85


def test_a_device_holds_the_clients_that_were_asked_for():
    rng = np.random.default_rng(0)
    host = fs.Clients.from_arrays([(rng.normal(size=(n, 2)), rng.normal(size=n)) for n in (3, 5, 2, 4)])
    held = Held(host, torch.device("cpu"), 11 * 24)  # eleven examples of three numbers
    assert held.fetch(np.array([2, 1, 2])) and not held.fetch(np.array([1])) and len(held.inputs) == 7
    assert held.fetch(np.array([3, 1])) and len(held.inputs) == 11
    assert held.fetch(np.array([0, 3])) and len(held.inputs) == 7  # no room for one more: the others go
    assert not held.fetch(np.array([0, 3])) and held.fetch(np.array([1])) and held.fetch(np.array([1, 2, 3]))
    for client in (1, 2, 3):
        rows = held.order[held.offsets[client] : held.offsets[client] + held.sizes[client]]
        assert torch.equal(held.inputs[rows], host.data(client)[0])
        assert torch.equal(held.targets[rows], host.data(client)[1])


# The command line, and bad input


def test_bad_input(monkeypatch):
    with pytest.raises(fs.FedstrideError, match="workers must be a whole number from 1, not 0"):
        Quadratics().run("fedavg", workers=0)
    with pytest.raises(fs.FedstrideError, match="say how many workers"):
        fs.Pool()
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(fs.FedstrideError, match=r"workers need Ray: pip install 'fedstride\[scale\]'"):
        fs.Pool(2)


def command(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "fedstride.cli", *words],
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_ctrl_c,
        **options,
    )  # fmt: skip


def left_running():
    """Ray's processes of pools that are not open any more."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, parent = (path / "cmdline").read_text(), (path / "stat").read_text().rsplit(")", 1)[1].split()[1]
        except OSError:
            continue
        if "/tmp/fedstride-" in line and parent == "1":
            found.append(line)
    return found


@pytest.mark.slow
def test_ctrl_c_leaves_a_checkpoint_and_no_process(tmp_path):
    before = set(Path("/tmp").glob("fedstride-*"))
    words = ["partition.clients=4", "model.hidden=8", "steps=2", "--out", str(tmp_path / "runs")]
    process = command("run", *words, "rounds=100000", "--workers", "2")
    rows = tmp_path / "runs" / "fedavg" / "seed-0" / "rows.jsonl"
    until = time.monotonic() + 300
    while not (rows.exists() and rows.stat().st_size > 2000) and time.monotonic() < until:
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130 and "goes on from the last checkpoint" in said
    assert not left_running() and not set(Path("/tmp").glob("fedstride-*")) - before
    assert (rows.parent / "run.json").exists()


@pytest.mark.slow
def test_no_cluster_at_that_address():
    _, said = (process := command("run", "rounds=1", "--ray", "127.0.0.1:1")).communicate(timeout=120)
    assert process.returncode == 2 and said.startswith("error: cannot join a Ray cluster at '127.0.0.1:1'")


@pytest.mark.slow
def test_reproduce_with_workers(tmp_path):
    process = command("reproduce", "o1t/figure2", "--scale", "smoke", "--workers", "2", "--out", str(tmp_path))
    said, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert "o1t/figure2" in said and not left_running()
