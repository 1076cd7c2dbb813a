"""Deployment: nodes that leave, come back under another name, or join a run that is under way."""

import pytest
import torch
from problems import flower_description, simulated

import fedstride as fs
from fedstride.algorithm import REGISTRY

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")
from standin import Standin, quick  # noqa: E402, F401

from fedstride.deploy.server import serve  # noqa: E402

CLIENTS = 4
METHODS = [name for name, method in sorted(REGISTRY.items()) if not method.pooled]
N = {"dlsgd-homo": 2, "dlsgd-hetero": 2, "fedbuff": 2, "asysg": 2}


def description(method, **more):
    experiment = flower_description("fedavg", clients=CLIENTS, **more)
    return fs.Experiment(**experiment.dump() | {"method": {"name": method} | ({"n": N[method]} if method in N else {})})


def make(method):
    return fs.algorithms.make(method, **({"n": N[method]} if method in N else {}))


def cohorts(timeline, rounds):
    """Who was used in every round."""
    used = [job for job in timeline.jobs if job["fate"] == "used" and job["exchange"] == "train"]
    return [sorted(job["client"] for job in used if job["update"] == number) for number in range(1, rounds + 1)]


def replayed(experiment, result):
    """The same history in the simulator."""
    method, model, clients, _, settings = experiment.prepare()
    if method.schedule.asynchronous:
        return simulated(experiment, result.timeline.trace())
    listed = cohorts(result.timeline, experiment.rounds)
    return fs.simulate(method, model, clients, **settings | {"participation": listed})


def moved(grid, client, name):
    """The client's node starts again and has another name."""
    context = next(
        grid.contexts.pop(node) for node, c in list(grid.contexts.items()) if c.node_config["client"] == client
    )
    context.node_id = name
    grid.contexts[name] = context


def after(number, act):
    """Do something at the end of a round."""
    return lambda row: act() if row["round"] == number else None


@pytest.mark.parametrize("method", ["scaffold", "fedagrac", "fedbuff", "fedagrac-saving"])
def test_a_node_that_comes_back_under_another_name_goes_on_with_its_memory(method, tmp_path):
    experiment = description(method, rounds=9 if method in N else 5)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    progress = after(2, lambda: moved(grid, 2, 202))
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=progress)
    late = [
        job for job in over.timeline.jobs if job["client"] == 2 and (job["update"] or 0) > 3 and job["fate"] == "used"
    ]
    assert late and over.status == "finished"
    torch.testing.assert_close(over.x, replayed(experiment, over).x, rtol=1e-9, atol=1e-11)


def test_a_node_that_starts_again_while_it_trains_misses_a_round(tmp_path):
    experiment, seen = description("scaffold", rounds=5), []

    def spoil(grid, message, reply):
        seen.append(message)
        if len(seen) == CLIENTS + CLIENTS + 1:  # greetings, the first round, one job of the second
            busy = next(iter(grid.waiting.values())).metadata.dst_node_id
            moved(grid, busy - 100, 100 + busy)
        return [reply]

    grid = Standin(experiment, CLIENTS, tmp_path / "nodes", spoil=spoil, seed=1)
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0)
    counts = [row["clients"] for row in over.rows]
    assert counts[0] == 4 and 3 in counts[1:4] and counts[-1] == 4
    torch.testing.assert_close(over.x, replayed(experiment, over).x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["scaffold", "fedbuff"])
def test_a_node_that_leaves_between_a_look_and_a_request_is_missed(method, tmp_path, monkeypatch):
    experiment = description(method, rounds=9)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    listed = list(grid.contexts)
    grid.get_node_ids = lambda: listed  # the link has not noticed

    def act(row):
        if row["round"] == 2:
            away.append(grid.contexts.pop(102))
        if row["round"] == 5:
            grid.contexts[102] = away.pop()

    away = []
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=act)
    who = [{job["client"] for job in over.timeline.jobs if job["update"] == update} for update in range(1, 10)]
    assert 2 not in who[3] | who[4] and (method != "scaffold" or 2 in who[0] & who[8])
    torch.testing.assert_close(over.x, replayed(experiment, over).x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [name for name in METHODS if not make(name).fixed_fleet])
def test_nodes_join_a_running_federation(method, tmp_path):
    experiment = description(method, rounds=8)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    waiting = {node: grid.contexts.pop(node) for node in (101, 103)}  # missing at the start, and beyond the start

    def come(row):
        if row["round"] in (2, 4):
            node = 101 if row["round"] == 2 else 103
            grid.contexts[node] = waiting[node]

    over = serve(experiment, grid, tmp_path / "run", "test", 2, timeout=60.0, progress=come)
    who = [{job["client"] for job in over.timeline.jobs if job["update"] == update} for update in range(1, 9)]
    assert not {1, 3} & who[0] | who[1] & {1, 3} and {1, 3} <= set().union(*who[4:])
    torch.testing.assert_close(over.x, replayed(experiment, over).x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", [name for name in METHODS if make(name).fixed_fleet])
def test_nobody_joins_where_the_servers_vectors_stand_for_a_fixed_fleet(method, tmp_path, capsys):
    experiment = description(method)
    alone = Standin(experiment, 3, tmp_path / "a")
    expected = serve(experiment, alone, tmp_path / "alone", "test", 3, timeout=60.0)
    grid = Standin(experiment, CLIENTS, tmp_path / "b")
    stranger = grid.contexts.pop(103)
    come = after(1, lambda: grid.contexts.update({103: stranger}))
    over = serve(experiment, grid, tmp_path / "run", "test", 3, timeout=60.0, progress=come)
    said = capsys.readouterr().err
    assert f"client 3 is not let in: {method} works with the fleet it starts with" in said
    assert {job["client"] for job in over.timeline.jobs} == {0, 1, 2}
    torch.testing.assert_close(over.x, expected.x, rtol=1e-9, atol=1e-11)


def test_numbers_beyond_what_is_listed_are_refused(tmp_path, capsys):
    experiment = description("fedavg", steps=[1, 2, 3], partition={"name": "iid", "clients": 3})
    other = description("fedavg", steps=2)  # its node could take part, but nobody has said with how many steps
    grid, more = Standin(experiment, 3, tmp_path / "a"), Standin(other, CLIENTS, tmp_path / "b")
    come = after(1, lambda: grid.contexts.update({103: more.contexts[103]}))
    over = serve(experiment, grid, tmp_path / "run", "test", 3, timeout=60.0, progress=come)
    assert [row["clients"] for row in over.rows] == [3, 3, 3]
    assert "client 3 is not let in: steps or lr are listed for 3 clients" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["scaffold", "fedbuff", "dlsgd-hetero"])
def test_a_node_that_has_left_is_missed_by_nobody(method, tmp_path, capsys):
    experiment = description(method, rounds=6)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    leave = after(2, lambda: grid.contexts.pop(101))
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=leave)
    late = {job["client"] for job in over.timeline.jobs if job["fate"] == "used" and job["update"] >= 4}
    assert late and late <= {0, 2, 3} and over.status == "finished"
    assert "set aside" not in capsys.readouterr().err
    if method == "scaffold":
        assert [row["clients"] for row in over.rows] == [4, 4, 3, 3, 3, 3]
    torch.testing.assert_close(over.x, replayed(experiment, over).x, rtol=1e-9, atol=1e-11)


def test_part_of_a_fleet_is_drawn_from_those_who_are_there(tmp_path):
    experiment = description("fedavg", rounds=6, participation={"name": "uniform", "n": 3})
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    leave = after(2, lambda: [grid.contexts.pop(node) for node in (100, 101)])
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=leave)
    assert [row["clients"] for row in over.rows] == [3, 3, 2, 2, 2, 2]
    torch.testing.assert_close(over.x, replayed(experiment, over).x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method, left", [("fedavg", (100, 101, 102, 103)), ("scaffnew", (102,))])
def test_without_those_it_needs_a_run_ends_in_words_and_goes_on_when_they_are_back(method, left, tmp_path):
    experiment = description(method, rounds=4)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    leave = after(2, lambda: [grid.contexts.pop(node) for node in left])
    with pytest.raises(fs.FedstrideError, match="the same command goes on"):
        serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=0.5, progress=leave)
    again = Standin(experiment, CLIENTS, tmp_path / "nodes")
    over = serve(experiment, again, tmp_path / "run", "test", CLIENTS, timeout=60.0)
    assert [row["clients"] for row in over.rows] == [4, 4, 4, 4]
    torch.testing.assert_close(over.x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


def test_a_server_that_starts_again_waits_for_those_who_were_there(tmp_path):
    experiment = description("fedavg", rounds=4)

    def act(row):
        if row["round"] == 1:
            grid.contexts.pop(100)
        if row["round"] == 3:
            raise KeyboardInterrupt

    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    with pytest.raises(KeyboardInterrupt):
        serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=act)
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0)  # not for client 0, which had left
    assert [row["clients"] for row in over.rows] == [4, 3, 3, 3]


def test_a_number_belongs_to_the_node_that_had_it_first_while_it_is_there(tmp_path, capsys):
    experiment = description("fedavg", rounds=6)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    other = Standin(experiment, CLIENTS, tmp_path / "others").contexts[101]

    def act(row):
        if row["round"] == 1:
            grid.contexts[301] = other
        if row["round"] == 3:
            grid.contexts.pop(101)

    seen = []
    grid.spoil = lambda grid, message, reply: seen.append(message.metadata.dst_node_id) or [reply]
    over = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=act)
    assert [row["clients"] for row in over.rows] == [4] * 6
    assert seen.count(101) == 1 + 3 and seen.count(301) == 1 + 3
    assert "client 1 is the name of two nodes" in capsys.readouterr().err
