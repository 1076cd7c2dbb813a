"""Deployment: the same run over Flower's messages gives the same model as the simulator."""

from functools import partial

import numpy as np
import pytest
import torch
from problems import flower_description, simulated

import fedstride as fs
from fedstride.algorithm import REGISTRY

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")
from standin import Standin  # noqa: E402

from fedstride.deploy import apps, network, wire  # noqa: E402
from fedstride.deploy.server import serve  # noqa: E402

CLIENTS = 4
experiment_fleet = fs.Experiment.fleet
METHODS = [name for name, method in sorted(REGISTRY.items()) if not method.pooled]
description = partial(flower_description, clients=CLIENTS)


def deployed(experiment, folder, **more):
    grid = Standin(experiment, CLIENTS, folder / "nodes", half=more.get("half", False), spoil=more.pop("spoil", None))
    return serve(experiment, grid, folder / "run", "test", CLIENTS, timeout=5.0, **more), grid


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(network, "POLL", 0.0)
    monkeypatch.setattr("fedstride.deploy.server.POLL", 0.0)


@pytest.mark.parametrize("method", METHODS)
def test_the_same_run_over_messages_gives_the_same_model(method, tmp_path):
    experiment = description(method)
    over, _ = deployed(experiment, tmp_path)
    trace = over.timeline.trace() if experiment.prepare().method.schedule.asynchronous else None
    alone = simulated(experiment, trace)
    assert over.status == alone.status == "finished" and len(over.rows) == len(alone.rows)
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)
    for mine, theirs in zip(over.rows, alone.rows):
        names = ("round", "clients", "steps", "bytes_up", "bytes_down")
        assert [mine[name] for name in names] == [theirs[name] for name in names]


@pytest.mark.parametrize("method", ["scaffold", "fedavg"])
def test_part_of_the_fleet(method, tmp_path):
    experiment = description(method, participation={"name": "uniform", "n": 2}, rounds=5)
    over, _ = deployed(experiment, tmp_path)
    torch.testing.assert_close(over.x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


def test_float32_and_float16_on_the_wire(tmp_path):
    experiment = description("scaffold", dtype="float32")
    over, grid = deployed(experiment, tmp_path / "a")
    torch.testing.assert_close(over.x, simulated(experiment).x, rtol=1e-5, atol=1e-6)
    half, less = deployed(experiment, tmp_path / "b", half=True)
    assert less.bytes < 0.6 * grid.bytes
    assert 0 < (half.x - over.x).norm() < 1e-2 * over.x.norm()


def test_a_server_that_starts_again_goes_on(tmp_path):
    experiment = description("scaffold", rounds=6)
    whole, _ = deployed(experiment, tmp_path / "whole")
    stop = {"left": 3}

    def crash(row):
        stop["left"] -= 1
        if not stop["left"]:
            raise KeyboardInterrupt

    grid = Standin(experiment, CLIENTS, tmp_path / "nodes")
    with pytest.raises(KeyboardInterrupt):
        serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=5.0, progress=crash)
    again = Standin(experiment, CLIENTS, tmp_path / "nodes")  # fresh processes: only the disk is left
    result = serve(experiment, again, tmp_path / "run", "test", CLIENTS, timeout=5.0)
    assert [row["round"] for row in result.rows] == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(result.x, whole.x, rtol=1e-12, atol=1e-14)


def spoiled(kind, when=3):
    """One reply in the run goes wrong."""
    seen = {"train": 0}

    def spoil(grid, message, reply):
        if message.metadata.message_type != "train" or reply.has_error():
            return [reply]
        seen["train"] += 1
        if seen["train"] != when:
            return [reply, reply] if kind == "twice" else [reply]
        header, fields = wire.unpack(reply.content)
        if kind == "nan":
            fields = {name: value * float("nan") for name, value in fields.items()}
        elif kind == "shape":
            fields = {name: value[:-1] for name, value in fields.items()}
        elif kind == "run":
            header["run"] = "another"
        elif kind == "steps":
            header["steps"] = 10**6
        elif kind == "field":
            fields["more"] = torch.ones(3)
        elif kind == "type":
            fields = {name: value.to(torch.int64) for name, value in fields.items()}
        reply.content = wire.pack(
            header, wire.rows(fields, torch.zeros(1, dtype=torch.float64)) if kind != "type" else ()
        )
        return [reply]

    return spoil


@pytest.mark.parametrize("kind", ["nan", "shape", "run", "steps", "field", "type"])
def test_a_spoilt_reply_is_rejected_and_the_memory_stays(kind, tmp_path):
    experiment = description("scaffold", rounds=4)
    over, grid = deployed(experiment, tmp_path, spoil=spoiled(kind))
    assert [row["rejected"] for row in over.rows] == [1, 0, 0, 0] and over.status == "finished"
    absent = grid.trained[CLIENTS:][2]  # after the greetings, the third that trained
    cohorts = [[client for client in range(CLIENTS) if client != absent], *[list(range(CLIENTS))] * 3]
    method, model, clients, _, settings = experiment.prepare()
    alone = fs.simulate(method, model, clients, **settings | {"participation": cohorts})
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)


def test_a_reply_that_comes_twice_counts_once(tmp_path):
    experiment = description("scaffold")
    over, _ = deployed(experiment, tmp_path, spoil=spoiled("twice"))
    torch.testing.assert_close(over.x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


def test_a_client_that_keeps_sending_rubbish_is_set_aside(tmp_path, capsys):
    def spoil(grid, message, reply):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 102:
            header, fields = wire.unpack(reply.content)
            fields = {name: value * float("nan") for name, value in fields.items()}
            reply.content = wire.pack(header, wire.rows(fields, torch.zeros(1, dtype=torch.float64)))
        return [reply]

    over, grid = deployed(description("fedavg", rounds=6), tmp_path, spoil=spoil)
    assert [row["rejected"] for row in over.rows] == [1, 1, 1, 0, 0, 0]
    assert grid.trained.count(2) == 1 + 3 and "client 2 has sent 3 useless uploads" in capsys.readouterr().err


def test_a_client_whose_memory_is_gone_is_missed_in_words(tmp_path, capsys):
    experiment = description("scaffold", rounds=3)

    def lose(row):
        if row["round"] == 1:
            for path in (tmp_path / "nodes" / "1").iterdir():
                path.unlink()

    over, _ = deployed(experiment, tmp_path, progress=lose)
    assert [row["clients"] for row in over.rows] == [4, 3, 3]
    assert "client 1 failed: this client's memory of job" in capsys.readouterr().err


def test_what_is_sent_is_what_the_method_declares(tmp_path):
    sent = []

    def spy(grid, message, reply):
        if message.metadata.message_type == "train":
            sent.append((wire.unpack(message.content), wire.unpack(reply.content)))
        return [reply]

    deployed(description("scaffold", rounds=1), tmp_path, spoil=spy)
    (_, down), (_, up) = sent[0]
    assert set(down) == {"x", "c"} and set(up) == {"dx", "dc"}


def test_a_node_with_data_of_its_own_needs_no_data_set(tmp_path, monkeypatch):
    experiment = description("scaffold")
    fleet, _, names = experiment.fleet()
    over, _ = deployed(experiment, tmp_path / "a")
    settled = experiment.settled(len(names))
    grid = Standin(settled, CLIENTS, tmp_path / "nodes")
    for client in range(CLIENTS):
        inputs, targets = fleet.data(client)
        np.savez(tmp_path / f"{client}.npz", inputs=inputs.numpy(), targets=targets.numpy())
        grid.contexts[100 + client].node_config["data"] = str(tmp_path / f"{client}.npz")
    nodes = []
    monkeypatch.setattr(
        "fedstride.deploy.node.Experiment.fleet", lambda self: nodes.append(self) or experiment_fleet(self)
    )
    result = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=5.0)
    assert len(nodes) == 1  # the server's own look, for its test data
    torch.testing.assert_close(result.x, over.x, rtol=1e-12, atol=1e-14)


def test_a_file_that_is_no_data_is_named(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"no")
    with pytest.raises(fs.FedstrideError, match="x.npz is not an .npz file with the arrays inputs and targets"):
        apps.read(str(tmp_path / "x.npz"))


def test_a_deadline_cuts_the_steps_of_a_slow_device(tmp_path, monkeypatch):
    experiment = description("fedlga", steps=400, schedule={"name": "deadline", "seconds": 0.2}, rounds=1)
    over, _ = deployed(experiment, tmp_path)
    steps = [job["steps"] for job in over.timeline.jobs]
    assert (
        all(1 <= count <= 400 for count in steps)
        and min(steps) < 400
        and {job["target"] for job in over.timeline.jobs} == {400}
    )


def test_methods_that_pool_data_are_refused(tmp_path):
    experiment = description("fedavg")
    grid = Standin(experiment, CLIENTS, tmp_path)
    with pytest.raises(fs.FedstrideError, match="cannot be deployed"):
        serve(description("centralised"), grid, tmp_path / "run", "test", CLIENTS)


def test_two_nodes_with_one_number_are_refused(tmp_path):
    experiment = description("fedavg")
    grid = Standin(experiment, CLIENTS, tmp_path)
    grid.contexts[101].node_config["client"] = 0
    with pytest.raises(fs.FedstrideError, match="each needs its own number"):
        serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=5.0)


def test_half_precision_keeps_large_numbers():
    from collections import namedtuple

    content = wire.pack({}, namedtuple("Up", "dx")(torch.tensor([1e9, -1e9, 0.5])), half=True)
    assert np.isfinite(wire.unpack(content)[1]["dx"]).all()
