"""Virtual seconds in synchronous rounds: devices, links, availability, deadlines."""

import numpy as np
import pytest
import torch
from problems import STEPS, Quadratics, digits, small_network

import fedstride as fs

D = 4  # parameters of the quadratics, 8 bytes each


def seconds(result):
    return [row["seconds"] for row in result.rows]


def test_no_world_no_time():
    assert seconds(Quadratics().run("scaffold", rounds=3)) == [0, 0, 0]


def test_a_round_lasts_as_long_as_its_slowest_client():
    per_step = [0.5, 0.1, 0.2, 0.3, 0.4, 0.1]
    world = fs.World(devices=fs.devices.seconds(per_step))
    length = max(k * s for k, s in zip(STEPS, per_step))
    assert seconds(Quadratics().run("fedavg", rounds=3, world=world)) == pytest.approx([length, 2 * length, 3 * length])
    alone = Quadratics().run("fedavg", rounds=1, world=world, participation=[[0]])
    assert seconds(alone) == pytest.approx([0.5])


def test_transfers_count_the_bytes_that_travel():
    world = fs.World(links=fs.links.bandwidth(up=100.0, down=[200.0] * 5 + [50.0], latency=0.25))
    bits = 8 * 8 * D
    once = 0.25 + bits / 50 + 0.25 + bits / 100
    assert seconds(Quadratics().run("fedavg", rounds=2, world=world)) == pytest.approx([once, 2 * once])
    both = 0.5 + 2 * bits / 50 + 2 * bits / 100  # SCAFFOLD: two vectors each way in one exchange
    assert seconds(Quadratics().run("scaffold", rounds=1, world=world)) == pytest.approx([both])


def test_dlsgd_constants_by_hand():
    """10 GFLOPS, 17.0 MFLOP a step, slow-down U[1, 5], 400 Mbps, 2.2 MB: 44 ms a transfer, 85 to 425 ms of training."""
    world = fs.World(devices=fs.devices.slowdown(17.0e6 / 1e10, 1, 5), links=fs.links.bandwidth(up=400e6))
    pace = fs.world.Pace(world, 100, 0)
    ids = np.arange(100)
    jobs = fs.sampling.Jobs(ids, 0 * ids, 0 * ids, 0 * ids + 50, 0 * ids + 50, ids, ids)
    np.testing.assert_allclose(pace.transfer(jobs, 2.2e6, "up"), 0.044)
    training = pace.compute(jobs, jobs.steps)
    assert 0.085 <= training.min() < 0.12 and 0.39 < training.max() <= 0.425
    assert training.mean() == pytest.approx(0.255, rel=0.1)
    assert (pace.compute(jobs, jobs.steps) == fs.world.Pace(world, 100, 0).compute(jobs, jobs.steps)).all()


def test_several_exchanges_and_full_gradients_take_their_time():
    world = fs.World(devices=1.0)
    problem = Quadratics()
    # One gradient at x, then the longest local descent; mini-batches of 3 examples.
    tracking = problem.run("tracking", rounds=1, world=world, batch_size=3)
    assert seconds(tracking) == pytest.approx([1 + max(STEPS)])
    passes = -(-problem.clients.sizes // 3)
    option = problem.run(fs.algorithms.Scaffold(option="I"), rounds=1, world=world, batch_size=3)
    assert seconds(option) == pytest.approx([(passes + np.array(STEPS)).max()])


def test_a_deadline_cuts_the_steps_and_the_method_hears_of_it():
    per_step = [1.0, 1.0, 0.1, 2.0, 0.5, 1.0]
    world = fs.World(devices=per_step)
    problem = Quadratics()
    cut = problem.run("fedavg", rounds=3, world=world, schedule=fs.schedule.Deadline(2.5))
    done = [min(k, int(2.5 / s)) for k, s in zip(STEPS, per_step)]
    assert done != STEPS and cut.rows[0]["steps"] == sum(done) and seconds(cut) == pytest.approx([2.5, 5.0, 7.5])
    by_hand = problem.run("fedavg", rounds=3, steps=done)
    torch.testing.assert_close(cut.x, by_hand.x, rtol=1e-12, atol=1e-12)
    lga = problem.run("fedlga", rounds=1, world=world, schedule=fs.schedule.Deadline(2.5))
    assert lga.rows[0]["unfinished"] == sum(a < b for a, b in zip(done, STEPS))


@pytest.mark.parametrize("name", ["fedagrac", "fedagrac-saving", "fednova", "scaffold", "feddyn"])
def test_all_exchanges_of_a_round_use_the_steps_really_done(name):
    """FedaGrac tells fast from slow by them, in its second exchange."""
    world, done = fs.World(devices=[1.0, 1.0, 0.1, 2.0, 0.5, 1.0]), [1, 2, 3, 1, 2, 2]
    problem = Quadratics()
    cut = problem.run(name, rounds=5, world=world, schedule=fs.schedule.Deadline(2.5))
    by_hand = problem.run(name, rounds=5, steps=done)
    assert cut.rows[-1]["steps"] == sum(done)
    torch.testing.assert_close(cut.x, by_hand.x, rtol=1e-12, atol=1e-12)


def test_nobody_misses_the_prologue():
    world = fs.World(availability=fs.availability.dropout(0.9))
    for name in ("fedagrac", "localsteps"):
        rows = Quadratics().run(name, rounds=5, world=world).rows
        assert rows[0]["clients"] == 6 and max(row["clients"] for row in rows[1:]) < 6


def test_a_deadline_may_drop_who_is_late():
    world = fs.World(devices=[1.0, 1.0, 0.1, 2.0, 0.5, 1.0])
    problem = Quadratics()
    dropped = problem.run("fedavg", rounds=1, world=world, schedule=fs.schedule.Deadline(2.5, late="drop"))
    on_time = [i for i, (k, s) in enumerate(zip(STEPS, [1.0, 1.0, 0.1, 2.0, 0.5, 1.0])) if k * s <= 2.5]
    by_hand = problem.run("fedavg", rounds=1, participation=[on_time])
    torch.testing.assert_close(dropped.x, by_hand.x, rtol=1e-12, atol=1e-12)
    early = problem.run("fedavg", rounds=1, world=world, schedule=fs.schedule.Deadline(100.0))
    assert seconds(early) == pytest.approx([10.0])  # nobody is late, nobody waits for the deadline


@pytest.mark.parametrize("name", ["scaffold", "fedagrac", "fedtrack", "feddyn"])
def test_exact_methods_stay_exact_under_a_deadline_and_drop_outs(name):
    from conformance import make

    options = {"nu_scope": "all"} if name == "fedagrac" else {}
    world = fs.World(devices=[1.0, 1.0, 0.1, 2.0, 0.5, 1.0], availability=fs.availability.dropout(0.2))
    problem = Quadratics()
    result = problem.run(make(name, **options), rounds=120, world=world, schedule=fs.schedule.Deadline(2.5))
    assert problem.distance(result, problem.optimum()) < 1e-9


def test_dropout_frequency_and_untouched_memories():
    world = fs.World(availability=fs.availability.dropout(0.3))
    rows = Quadratics().run("fedavg", rounds=300, world=world, steps=1).rows
    assert np.mean([row["clients"] for row in rows]) == pytest.approx(6 * 0.7, rel=0.05)
    assert len({row["clients"] for row in rows}) > 3


def test_the_night_is_waited_out():
    world = fs.World(devices=3600.0, availability=fs.availability.daytime(2))
    times = seconds(Quadratics().run("fedavg", rounds=6, world=world, steps=1))
    assert times[:2] == [3600.0, 7200.0]
    assert times[2] == pytest.approx(24 * 3600 + 3600, rel=1e-6) and times[4] == pytest.approx(
        48 * 3600 + 3600, rel=1e-6
    )


def test_cycles_have_phases_of_their_own():
    world = fs.World(devices=1.0, availability=fs.availability.cycle(on=5, period=10))
    counts = [row["clients"] for row in Quadratics().run("fedavg", rounds=60, world=world, steps=1).rows]
    assert len(set(counts)) > 1 and np.mean(counts) == pytest.approx(3, abs=1)


def test_traces_and_own_functions(tmp_path):
    (tmp_path / "speed.csv").write_text("client,seconds\n" + "".join(f"{i},{0.1 * (i + 1)}\n" for i in range(6)))
    (tmp_path / "there.csv").write_text("client,from,to\n0,0,1\n5,0,1\n5,3,9\n")
    problem = Quadratics()
    world = fs.World(devices=fs.devices.trace(tmp_path / "speed.csv"))
    assert seconds(problem.run("fedavg", rounds=1, world=world, steps=1)) == pytest.approx([0.6])
    assert seconds(problem.run("fedavg", rounds=1, world=fs.World(devices=lambda i: 0.1 * (i + 1)), steps=1)) == [
        pytest.approx(0.6)
    ]
    there = fs.World(devices=1.0, availability=fs.availability.trace(tmp_path / "there.csv"))
    rows = problem.run("fedavg", rounds=5, world=there, steps=1).rows
    assert [row["clients"] for row in rows] == [6, 4, 4, 5, 5]
    odd = fs.World(availability=lambda client, now: client % 2 == 1)
    assert problem.run("fedavg", rounds=1, world=odd).rows[0]["clients"] == 3


def test_flops_of_a_model():
    model = torch.nn.Linear(64, 10)
    counted = fs.devices.measured_flops(model, torch.zeros(10, 64))
    assert counted >= 2 * 2 * 10 * 64 * 10  # forward and the weights' gradient
    world = fs.World(devices=fs.devices.flops(counted, [1e6, 2e6]))
    np.testing.assert_allclose(fs.world.Pace(world, 2, 0)._per_step, [counted / 1e6, counted / 2e6])
    spread = fs.world.Pace(fs.World(devices=fs.devices.lognormal(0.1, 0.5)), 4000, 0)._per_step
    assert np.median(spread) == pytest.approx(0.1, rel=0.05) and np.log(spread).std() == pytest.approx(0.5, rel=0.05)


def test_resume_keeps_the_clock(tmp_path):
    clients, _ = digits()
    world = fs.World(
        devices=fs.devices.slowdown(0.1), links=fs.links.bandwidth(1e6), availability=fs.availability.dropout(0.2)
    )
    settings = dict(lr=0.05, steps=STEPS, batch_size=5, device="cpu", world=world, schedule=fs.schedule.Deadline(1.0))
    whole = fs.simulate("fedagrac", small_network(), clients, rounds=5, **settings)
    fs.simulate("fedagrac", small_network(), clients, rounds=2, folder=tmp_path, **settings)
    resumed = fs.simulate("fedagrac", small_network(), clients, rounds=5, folder=tmp_path, resume=True, **settings)
    assert torch.equal(whole.x, resumed.x) and whole.rows == resumed.rows and whole.rows[-1]["seconds"] > 0
    assert f"{whole.rows[-1]['seconds']:,.1f} virtual seconds" in whole.summary()


def test_a_slow_download_does_not_hold_up_a_deadline():
    world = fs.World(devices=0.01, links=fs.links.bandwidth(1e9, [1e9] * 5 + [0.256]))
    result = Quadratics().run("fedavg", rounds=2, world=world, schedule=fs.schedule.Deadline(1.0))
    assert seconds(result) == pytest.approx([1.0, 2.0], rel=1e-3) and result.rows[0]["clients"] == 5


def test_a_deadline_leaves_time_for_full_gradients():
    problem = Quadratics()
    world = fs.World(devices=[0.1] * 5 + [0.3])
    for method in (fs.algorithms.FedVeca(), fs.algorithms.Scaffold(option="I")):
        result = problem.run(method, rounds=2, world=world, batch_size=5, schedule=fs.schedule.Deadline(0.7))
        assert seconds(result) == pytest.approx([0.7, 1.4]) and result.rows[0]["clients"] < 6


def test_an_unlucky_cohort_is_an_empty_round(tmp_path):
    (tmp_path / "there.csv").write_text("client,from,to\n0,0,1\n")
    gone = fs.World(devices=0.5, availability=fs.availability.trace(tmp_path / "there.csv"))
    rows = Quadratics().run("fedavg", rounds=4, world=gone, steps=2, participation=[[0], [0], [1], [0]]).rows
    assert [row["clients"] for row in rows] == [1, 0, 1, 0]
    slow = fs.World(devices=[0.01] * 5 + [2.0])
    late = Quadratics().run(
        "fedavg", rounds=2, world=slow, participation=[[5], [1]], schedule=fs.schedule.Deadline(1.0), steps=2
    )
    assert [row["clients"] for row in late.rows] == [0, 1] and seconds(late) == pytest.approx([1.0, 1.02])


def test_a_round_that_nobody_finishes_is_empty_where_others_were_not():
    table, late = [[2] * 6, [9] * 6, [2] * 6], fs.schedule.Deadline(5.0, late="drop")
    result = Quadratics().run("fedavg", rounds=3, world=fs.World(devices=1.0), steps=table, schedule=late)
    assert [row["clients"] for row in result.rows] == [6, 0, 6] and seconds(result) == pytest.approx([2, 7, 9])
    with pytest.raises(fs.FedstrideError, match="no client of the fleet can finish"):
        Quadratics().run("fedavg", rounds=3, world=fs.World(devices=1.0), steps=9, schedule=late)


def test_absences_are_waited_out_until_the_deadline():
    world = fs.World(devices=0.1, availability=lambda client, now: client != 3)
    result = Quadratics().run("fedavg", rounds=2, world=world, steps=2, schedule=fs.schedule.Deadline(5.0))
    assert seconds(result) == [5.0, 10.0] and result.rows[0]["clients"] == 5


def test_methods_that_need_everyone_refuse_absences():
    for changes in (
        dict(world=fs.World(availability=fs.availability.dropout(0.1))),
        dict(world=fs.World(devices=0.1), schedule=fs.schedule.Deadline(9, late="drop")),
    ):
        with pytest.raises(fs.FedstrideError, match="scaffnew needs every client in every round; a world"):
            Quadratics().run("scaffnew", rounds=1, **changes)


def test_centralised_joins_a_comparison_without_time():
    world = fs.World(devices=[0.1] * 6, links=fs.links.bandwidth(1), availability=fs.availability.dropout(0.5))
    rows = Quadratics().run("centralised", rounds=2, world=world, schedule=fs.schedule.Deadline(1.0)).rows
    assert all(row["seconds"] == 0 and row["clients"] == 1 and row["steps"] == sum(STEPS) for row in rows)


def test_checkpoints_know_worlds_by_their_numbers(tmp_path):
    problem, settings = Quadratics(), dict(rounds=1, folder=tmp_path, participation=fs.participation.full())
    problem.run("fedavg", world=fs.World(devices=lambda client: 0.1 + client), **settings)
    problem.run("fedavg", world=fs.World(devices=lambda client: 0.1 + client), resume=True, **settings)
    with pytest.raises(fs.FedstrideError, match="its world is"):
        problem.run("fedavg", world=fs.World(devices=lambda client: 0.2 + client), resume=True, **settings)


def test_very_fast_devices_are_not_late():
    world = fs.World(devices=[1e-20] + [0.01] * 5)
    row = Quadratics().run("fedavg", rounds=1, world=world, schedule=fs.schedule.Deadline(1.0)).rows[0]
    assert row["clients"] == 6 and row["steps"] == sum(STEPS)


SLOW_LINKS = fs.World(devices=0.1, links=fs.links.bandwidth(100.0))  # the model takes seconds


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(world=3), r"world must be an fs\.World"),
        (dict(world=lambda: fs.World(devices=[1.0, 2.0])), "devices lists 2 numbers for 6 clients"),
        (dict(world=lambda: fs.World(devices=[-1.0] * 6)), "client 0 would need -1.0 seconds per step"),
        (dict(world=lambda: fs.World(devices="fast")), "devices must come from fs.devices"),
        (dict(world=lambda: fs.World(links=fs.links.bandwidth(0))), "links: up must be finite and positive"),
        (dict(world=lambda: fs.World(links=fs.links.bandwidth("x"))), "bandwidth needs numbers"),
        (dict(world=lambda: fs.World(links=3)), r"links must come from fs\.links\.bandwidth"),
        (dict(world=lambda: fs.World(availability=fs.availability.dropout(1))), "drop-out probability of 1 must be"),
        (dict(world=lambda: fs.World(availability=fs.availability.cycle(0, 5))), "0 < on <= period"),
        (dict(world=lambda: fs.World(availability=3)), "availability must come from fs.availability"),
        (
            dict(world=lambda: fs.World(availability=lambda client, now: False)),
            "at virtual second 0 no client of the fleet is there",
        ),
        (
            dict(world=lambda: fs.World(links=fs.links.bandwidth(1, latency=[0, float("nan"), 0, 0, 0, 0]))),
            "latency must be",
        ),
        (dict(world=lambda: fs.World(availability=fs.availability.dropout("a"))), "drop-out probability of 'a'"),
        (dict(world=lambda: fs.World(devices=fs.devices.lognormal(1, "a"))), "sigma >= 0"),
        (dict(schedule=lambda: fs.schedule.Deadline(1)), "a deadline needs a world"),
        (dict(schedule=lambda: fs.schedule.Deadline(0)), "positive number of seconds"),
        (dict(schedule=lambda: fs.schedule.Deadline(1, late="wait")), "late must be 'cut' or 'drop'"),
        (
            dict(world=lambda: fs.World(devices=9.0), schedule=lambda: fs.schedule.Deadline(1)),
            "a deadline of 1 s is too short: the fastest client needs 9 s for one step",
        ),
        (
            dict(world=lambda: SLOW_LINKS, schedule=lambda: fs.schedule.Deadline(1)),
            "no client of the fleet can fetch the model and do a single step within the deadline of 1 s",
        ),
        (
            dict(
                world=lambda: SLOW_LINKS,
                schedule=lambda: fs.schedule.Deadline(1, "drop"),
                participation=lambda: fs.participation.uniform(2),
            ),
            "no client of the fleet can fetch the model",
        ),  # fmt: skip
        (
            dict(
                algorithm=lambda: fs.algorithms.Scaffold(option="I"),
                world=lambda: fs.World(devices=1.0),
                schedule=lambda: fs.schedule.Deadline(1),
            ),
            "no client of the fleet can fetch the model",
        ),  # fmt: skip
        (dict(world=lambda: fs.World(devices=fs.devices.trace("nowhere.csv"))), "nowhere.csv is not a table"),
        (dict(world=lambda: fs.World(devices=fs.devices.slowdown(0.1, 5, 1))), "0 < low <= high"),
        (dict(world=lambda: fs.World(devices=fs.devices.slowdown(0.1, "1", "5"))), "low must be a positive number"),
        (dict(world=lambda: fs.World(devices=fs.devices.slowdown(0.1, 1, float("inf")))), "high must be a positive"),
        (dict(world=lambda: fs.World(devices=fs.devices.flops(1.0, "fast"))), "speed must be a positive number"),
        (dict(world=lambda: fs.World(devices=lambda client: "x")), "must give a number of seconds, not 'x'"),
        (dict(world=lambda: fs.World(links=fs.links.bandwidth([[1.0] * 6]))), "bandwidth needs numbers"),
    ],
)
def test_bad_worlds(changes, words):
    with pytest.raises(fs.FedstrideError, match=words):
        made = {key: v() if callable(v) else v for key, v in changes.items()}
        Quadratics().run(made.pop("algorithm", "fedavg"), rounds=1, **made)


@pytest.mark.parametrize(
    ("make", "text", "words"),
    [
        (fs.devices.trace, "client,seconds\n0,1\n1,2\n1,3\n", "one row for each client"),
        (fs.devices.trace, "client,seconds\n", "one row for each client"),
        (fs.availability.trace, "client,from,to\n", "says of no client when it is there"),
        (fs.availability.trace, "", "says of no client when it is there"),
    ],
)
def test_traces_that_say_nothing_or_two_things(make, text, words, tmp_path):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(fs.FedstrideError, match=words):
        make(tmp_path / "trace.csv")
