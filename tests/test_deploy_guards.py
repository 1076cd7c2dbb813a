"""Guards, robust means and privacy over the network: as in the simulator, and liars are set aside."""

import json

import pytest
import torch
from problems import simulated
from standin import quick  # noqa: F401
from test_deploy import CLIENTS, deployed, description

import fedstride as fs
from fedstride.deploy import server, wire

pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: pip install fedstride[privacy]")


def liar(who, lie):
    """A node whose vectors are changed on the way."""

    def spoil(grid, message, reply):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 100 + who:
            header, fields = wire.unpack(reply.content)
            fields = {name: lie(value) for name, value in fields.items()}
            reply.content = wire.pack(header, wire.rows(fields, torch.zeros(1, dtype=torch.float64)))
        return [reply]

    return spoil


@pytest.mark.parametrize("options", [{"bound": 1e3}, {"times": 20.0}], ids=str)
@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
def test_a_client_that_keeps_sending_too_long_vectors_is_set_aside(method, options, tmp_path, capsys):
    experiment = description(method, rounds=6, guard={"name": "norms", **options})
    over, grid = deployed(experiment, tmp_path, spoil=liar(2, lambda value: 1e6 * value + 1e6))
    assert [row["rejected"] for row in over.rows] == [1, 1, 1, 0, 0, 0]
    assert grid.trained.count(2) == 1 + 3
    assert "client 2 has failed or sent useless uploads 3 times" in capsys.readouterr().err
    ready, model, clients, _, settings = experiment.prepare()
    alone = fs.simulate(ready, model, clients, **settings | {"participation": [[0, 1, 3]] * 6, "guard": None})
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["fedavg", "fedagrac", "feddyn", "fedexp"])
@pytest.mark.parametrize("changes", [{"robust": "median"}, {"guard": {"name": "norms", "times": 1.2}}], ids=str)
def test_protected_runs_are_the_same_as_in_the_simulator(method, changes, tmp_path):
    experiment = description(method, **changes)
    over, alone = deployed(experiment, tmp_path)[0], simulated(experiment)
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)
    assert [row["rejected"] for row in over.rows] == [row["rejected"] for row in alone.rows]


def test_a_robust_mean_is_not_moved_by_a_liar(tmp_path):
    experiment = description("fedavg", robust={"name": "trimmed-mean", "share": 0.3}, weights="uniform")
    over, _ = deployed(experiment, tmp_path / "robust", spoil=liar(1, lambda value: -1e6 * value))
    assert float((over.x - simulated(experiment).x).norm()) < 1
    plain, _ = deployed(description("fedavg"), tmp_path / "plain", spoil=liar(1, lambda value: -1e6 * value))
    assert not float((plain.x - simulated(description("fedavg")).x).norm()) < 1e3


def test_a_robust_mean_on_an_asynchronous_schedule(tmp_path):
    experiment = description("dlsgd-hetero", robust="median", rounds=5)
    over, _ = deployed(experiment, tmp_path)
    torch.testing.assert_close(over.x, simulated(experiment, over.timeline.trace()).x, rtol=1e-9, atol=1e-11)


PRIVACY = {"name": "gaussian", "clip": 0.1, "noise": 1.0, "delta": 1e-3}


@pytest.mark.parametrize("who", [None, {"name": "uniform", "n": 2}], ids=str)
def test_a_private_run_is_that_of_the_simulator_but_for_its_secret(who, tmp_path, monkeypatch):
    experiment = description("fedavg", privacy=PRIVACY, participation=who, rounds=6)
    alone = simulated(experiment)
    secret, _ = deployed(experiment, tmp_path / "secret")
    assert float((secret.x - alone.x).norm()) > 1e-3  # nobody who knows the seed knows the noise
    if who:
        cohorts = [
            [(job["update"], job["client"]) for job in run.timeline.jobs] for run in (secret, alone)
        ]  # nor who is drawn
        assert sorted(cohorts[0]) != sorted(cohorts[1])
    monkeypatch.setattr(server.secrets, "randbits", lambda bits: experiment.seed)
    over, _ = deployed(experiment, tmp_path / "known")
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)
    assert [row["epsilon"] for row in over.rows] == [row["epsilon"] for row in secret.rows]
    assert [row["epsilon"] for row in over.rows] == [row["epsilon"] for row in alone.rows]


def test_the_secret_stays_with_the_server(tmp_path, monkeypatch):
    number = 1234567890123456789
    monkeypatch.setattr(server.secrets, "randbits", lambda bits: number)
    seen = []

    def spy(grid, message, reply):
        seen.append(wire.unpack(message.content)[0])
        return [reply]

    deployed(description("fedavg", privacy=PRIVACY), tmp_path, spoil=spy)
    assert len(seen) > CLIENTS and str(number) not in json.dumps(seen)
    for path in tmp_path.rglob("*.json*"):
        assert str(number) not in path.read_text()


def test_a_server_that_starts_again_goes_on_with_epsilon(tmp_path):
    experiment = description("fedavg", privacy=PRIVACY, rounds=4)
    whole = simulated(experiment)

    def crash(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deployed(experiment, tmp_path, progress=crash)
    again, _ = deployed(experiment, tmp_path)
    assert [row["epsilon"] for row in again.rows] == [row["epsilon"] for row in whole.rows]


def test_what_cannot_be_private_is_refused(tmp_path):
    with pytest.raises(fs.FedstrideError, match="scaffold cannot be private"):
        deployed(description("scaffold", privacy=PRIVACY), tmp_path)
