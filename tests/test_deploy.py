"""Deployment: the same run over Flower's messages gives the same model as the simulator."""

import io
import socket
from functools import partial

import numpy as np
import pytest
import torch
from problems import flower_description, simulated

import fedstride as fs
from fedstride.algorithm import REGISTRY

pytest.importorskip("flwr", reason="flwr is not installed: pip install fedstride[deploy]")
from flwr.app import Array, Error, Message  # noqa: E402
from standin import Standin, quick  # noqa: E402, F401

from fedstride.deploy import apps, cli, keys, roll, stack, wire  # noqa: E402
from fedstride.deploy.server import serve  # noqa: E402

CLIENTS = 4
experiment_fleet = fs.Experiment.fleet
METHODS = [name for name, method in sorted(REGISTRY.items()) if not method.pooled]
description = partial(flower_description, clients=CLIENTS)


def deployed(experiment, folder, **more):
    own = {name: more.pop(name) for name in ("spoil", "at_once") if name in more}
    grid = Standin(experiment, CLIENTS, folder / "nodes", **own)
    return serve(experiment, grid, folder / "run", "test", CLIENTS, timeout=60.0, **more), grid


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
    half, less = deployed(description("scaffold", dtype="float32", wire="float16"), tmp_path / "b")
    assert less.bytes < 0.6 * grid.bytes
    assert 0 < (half.x - over.x).norm() < 1e-2 * over.x.norm()


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("method", ["scaffold", "fedagrac", "fedlga", "fedveca", "fedbuff", "dlsgd-hetero"])
def test_with_float16_on_the_wire_the_simulator_rounds_too(method, dtype, tolerance, tmp_path):
    experiment = description(method, dtype=dtype, wire="float16")
    over, _ = deployed(experiment, tmp_path)
    trace = over.timeline.trace() if experiment.prepare().method.schedule.asynchronous else None
    alone, exact = simulated(experiment, trace), simulated(description(method, dtype=dtype), trace)
    assert (over.x - alone.x).norm() <= tolerance * alone.x.norm()
    assert (exact.x - alone.x).norm() > 5e-6 * alone.x.norm()  # the rounding was seen
    for mine, theirs, full in zip(over.rows, alone.rows, exact.rows):
        for name in ("bytes_up", "bytes_down"):
            assert mine[name] == theirs[name] < full[name]


def test_another_wire_is_refused():
    with pytest.raises(fs.FedstrideError, match="wire: input should be 'float16', not 'float8'"):
        description("fedavg", wire="float8")
    method, model, clients, _, settings = description("fedavg").prepare()
    with pytest.raises(fs.FedstrideError, match="wire must be 'float16' or None"):
        fs.simulate(method, model, clients, **settings | {"wire": "float8"})


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
        serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0, progress=crash)
    again = Standin(experiment, CLIENTS, tmp_path / "nodes")  # fresh processes: only the disk is left
    result = serve(experiment, again, tmp_path / "run", "test", CLIENTS, timeout=60.0)
    assert [row["round"] for row in result.rows] == [1, 2, 3, 4, 5, 6]
    torch.testing.assert_close(result.x, whole.x, rtol=1e-12, atol=1e-14)


def archive():
    file = io.BytesIO()
    np.savez(file, a=np.zeros(3))
    return file.getvalue()


def endless():
    """The beginning of an array of petabytes."""
    file, header = io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": (10**15,)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


BYTES = {"no bytes": lambda: b"", "torn archive": lambda: b"PK\x03\x04garbage", "archive": archive, "endless": endless}


def spoiled(kind, when=3):
    """One reply in the run goes wrong."""
    seen = {"train": 0}

    def spoil(grid, message, reply):
        if message.metadata.message_type != "train" or reply.has_error():
            return [reply]
        seen["train"] += 1
        if seen["train"] != when:
            return [reply, reply] if kind == "twice" else [reply]
        if kind in BYTES:
            vectors = reply.content.array_records["vectors"]
            name, array = next(iter(vectors.items()))
            vectors[name] = Array(dtype=array.dtype, shape=array.shape, stype=array.stype, data=BYTES[kind]())
            return [reply]
        header, fields = wire.unpack(reply.content)
        if kind == "without loss":
            del header["loss"]
        elif kind == "loss of nan":
            header["loss"] = float("nan")
        elif kind == "nan":
            fields = {name: value * float("nan") for name, value in fields.items()}
        elif kind == "shape":
            fields = {name: value[:-1] for name, value in fields.items()}
        elif kind == "short":
            fields = {name: value[:1] for name, value in fields.items()}
        elif kind in ("seconds", "loss"):
            header[kind] = "soon"
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


@pytest.mark.parametrize(
    "kind",
    [
        "nan", "shape", "run", "steps", "field", "type", "short", "seconds", "loss", "without loss", "loss of nan",
        *BYTES,
    ],
)  # fmt: skip
def test_a_spoilt_reply_is_rejected_and_the_memory_stays(kind, tmp_path):
    experiment = description("scaffold", rounds=4)
    over, grid = deployed(experiment, tmp_path, spoil=spoiled(kind))
    assert [row["rejected"] for row in over.rows] == [1, 0, 0, 0] and over.status == "finished"
    absent = grid.trained[CLIENTS:][2]  # after the greetings, the third that trained
    cohorts = [[client for client in range(CLIENTS) if client != absent], *[list(range(CLIENTS))] * 3]
    method, model, clients, _, settings = experiment.prepare()
    alone = fs.simulate(method, model, clients, **settings | {"participation": cohorts})
    torch.testing.assert_close(over.x, alone.x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "facts, words",
    [
        ({"client": float("inf")}, "cannot convert float infinity"),
        ({"client": 10**12}, "client 1000000000000 is not let in"),
        ({"size": 2**62}, "client 3 is not let in: its number is 3 and it has 4611686018427387904 examples"),
    ],
)
def test_a_node_that_says_impossible_things_of_itself_is_not_let_in(facts, words, tmp_path, capsys):
    def spoil(grid, message, reply):
        if message.metadata.message_type == "query" and message.metadata.dst_node_id == 103:
            reply.content.config_records["header"].update(facts)
        return [reply]

    experiment = description("fedavg", steps=2, lr=0.1)
    grid = Standin(experiment, CLIENTS, tmp_path / "nodes", spoil=spoil)
    result = serve(experiment, grid, tmp_path / "run", "test", 3, timeout=60.0)
    assert [row["clients"] for row in result.rows] == [3, 3, 3] and words in capsys.readouterr().err


class Silent(Standin):
    """A node that takes requests of a kind and never answers them."""

    kind, node = "train", 103

    def pull_messages(self, numbers):
        def silent(message):
            return message.metadata.message_type == self.kind and message.metadata.dst_node_id == self.node

        return super().pull_messages([n for n in numbers if n in self.waiting and not silent(self.waiting[n])])


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "dlsgd-hetero", "fedbuff"])
def test_a_silent_client_is_given_up_and_set_aside(method, tmp_path, capsys):
    experiment = description(method, rounds=8)
    grid = Silent(experiment, CLIENTS, tmp_path / "nodes")
    result = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=0.5)
    assert result.status == "finished" and len(result.rows) == 8
    said = capsys.readouterr().err
    if method != "fedbuff":  # whose other clients may be done before the first half second is over
        assert "not answered for 0.5 s" in said
    if method in ("fedavg", "scaffold"):
        assert said.count("not answered") == 3 and "client 3 has failed" in said


def test_nodes_that_do_not_answer_a_greeting_keep_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setattr(roll, "GREETED", 1)
    monkeypatch.setattr(roll, "AGAIN", 0.2)
    experiment = description("fedavg", steps=2, lr=0.1)
    grid = Silent(experiment, CLIENTS, tmp_path / "nodes")
    grid.kind, grid.node = "query", 100  # which is greeted first
    result = serve(experiment, grid, tmp_path / "run", "test", 3, timeout=20.0)
    assert [row["clients"] for row in result.rows] == [3, 3, 3]


def test_ports_are_given_once():
    assert len({stack.port() for _ in range(500)}) == 500


def test_what_the_link_would_end_for_is_said_before(tmp_path):
    with pytest.raises(fs.FedstrideError, match="nokeys has no ca.crt; `fedstride deploy keys` makes it"):
        stack.Stack(tmp_path, 1, keys=tmp_path / "nokeys").__enter__()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        at = taken.getsockname()[1]
        with pytest.raises(fs.FedstrideError, match=f"cannot listen on 127.0.0.1:{at}: .*choose another"):
            stack.Stack(tmp_path, 1, at=at).__enter__()
    with pytest.raises(fs.FedstrideError, match="cannot listen on 203.0.113.7:"):
        stack.Stack(tmp_path, 1, host="203.0.113.7").__enter__()


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
    assert (
        grid.trained.count(2) == 1 + 3
        and "client 2 has failed or sent useless uploads 3 times" in capsys.readouterr().err
    )


def test_a_client_whose_memory_is_gone_is_missed_in_words(tmp_path, capsys):
    experiment = description("scaffold", rounds=3)

    def lose(row):
        if row["round"] == 1:
            for path in (tmp_path / "nodes" / "1").iterdir():
                path.unlink()

    over, _ = deployed(experiment, tmp_path, progress=lose)
    assert [row["clients"] for row in over.rows] == [4, 3, 3]
    assert "client 1 failed: this client's memory of job" in capsys.readouterr().err


@pytest.mark.parametrize("method, used", [("fedasync", 1), ("fedbuff", 2), ("dlsgd-homo", 2), ("asysg", 2)])
def test_replies_that_come_together_do_not_all_count_at_once(method, used, tmp_path):
    experiment = description(method, rounds=5)
    over, _ = deployed(experiment, tmp_path, at_once=4)
    assert [row["clients"] for row in over.rows] == [used] * 5
    torch.testing.assert_close(over.x, simulated(experiment, over.timeline.trace()).x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["fedagrac", "scaffold"])
@pytest.mark.parametrize("jobs", range(5, 14, 2))
def test_a_server_that_crashes_anywhere_in_a_round_goes_on_as_if_nothing_had_been(method, jobs, tmp_path):
    experiment = description(method, rounds=3)
    whole, _ = deployed(experiment, tmp_path / "whole")

    def crash(grid, message, reply):
        if len(grid.trained) == jobs:
            raise KeyboardInterrupt
        return [reply]

    with pytest.raises(KeyboardInterrupt):
        deployed(experiment, tmp_path, spoil=crash)
    again, _ = deployed(experiment, tmp_path)
    assert [row["clients"] for row in again.rows] == [row["clients"] for row in whole.rows]
    torch.testing.assert_close(again.x, whole.x, rtol=1e-9, atol=1e-11)


def failing(who, count):
    """A node that fails its first jobs."""
    left = {"count": count}

    def spoil(grid, message, reply):
        if message.metadata.message_type == "train" and message.metadata.dst_node_id == 100 + who and left["count"]:
            left["count"] -= 1
            return [Message(Error(code=0, reason="no power"), reply_to=message)]
        return [reply]

    return spoil


def test_nobody_may_miss_a_prologue(tmp_path):
    experiment = description("fedagrac")  # full gradients before the first round
    over, _ = deployed(experiment, tmp_path, spoil=failing(2, 2))
    assert over.rows[0]["clients"] == CLIENTS
    torch.testing.assert_close(over.x, simulated(experiment).x, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", ["fedbuff", "dlsgd-homo", "dlsgd-hetero"])
def test_a_node_that_fails_tries_again_and_one_that_keeps_failing_is_set_aside(method, tmp_path, capsys):
    experiment = description(method, rounds=6)
    once, _ = deployed(experiment, tmp_path / "once", spoil=failing(1, 1))
    torch.testing.assert_close(once.x, simulated(experiment, once.timeline.trace()).x, rtol=1e-9, atol=1e-11)
    gone, _ = deployed(experiment, tmp_path / "gone", spoil=failing(1, 10**6))
    assert gone.status == "finished" and "client 1 has failed" in capsys.readouterr().err
    assert all(job["client"] != 1 for job in gone.timeline.jobs if job["fate"] == "used")


def test_an_asynchronous_run_in_which_nobody_is_usable_has_diverged(tmp_path):
    def spoil(grid, message, reply):
        if message.metadata.message_type == "train":
            header, fields = wire.unpack(reply.content)
            fields = {name: value * float("inf") for name, value in fields.items()}
            reply.content = wire.pack(header, wire.rows(fields, torch.zeros(1, dtype=torch.float64)))
        return [reply]

    assert deployed(description("fedbuff"), tmp_path, spoil=spoil)[0].status == "diverged"


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(method="fedlga", schedule={"name": "deadline", "seconds": 1.0, "late": "drop"}), "use late='cut'"),
        (dict(method={"name": "dlsgd-hetero", "n": 2, "resend": True}), "leave resend out"),
        (dict(method="fedavg", train_loss=True), "no train_loss"),
    ],
)
def test_what_a_network_cannot_do_is_refused(changes, words, tmp_path):
    experiment = description("fedavg", **changes) if "method" not in changes else fs.Experiment(
        **description("fedavg").dump() | changes
    )  # fmt: skip
    with pytest.raises(fs.FedstrideError, match=words):
        deployed(experiment, tmp_path)


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
    result = serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=60.0)
    assert len(nodes) == 1  # the server's own look, for its test data
    torch.testing.assert_close(result.x, over.x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("content", [b"no", b"", b"PK\x03\x04garbage", archive(), archive()[:-30]])
def test_a_file_that_is_no_data_is_named(content, tmp_path):
    (tmp_path / "x.npz").write_bytes(content)
    with pytest.raises(fs.FedstrideError, match="x.npz is not an .npz file with the arrays inputs and targets"):
        apps.read(str(tmp_path / "x.npz"))


def test_a_deadline_cuts_the_steps_of_a_slow_device(tmp_path, monkeypatch):
    many = 100_000  # no machine does so many in time
    experiment = description("fedlga", steps=many, schedule={"name": "deadline", "seconds": 0.2}, rounds=1)
    over, _ = deployed(experiment, tmp_path)
    jobs = over.timeline.jobs
    assert all(1 <= job["steps"] < many and job["target"] == many for job in jobs)


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
        serve(experiment, grid, tmp_path / "run", "test", CLIENTS, timeout=0.5)


def test_half_precision_keeps_large_numbers():
    from collections import namedtuple

    content = wire.pack({}, namedtuple("Up", "dx")(torch.tensor([1e9, -1e9, 0.5])), half=True)
    assert torch.isfinite(wire.unpack(content)[1]["dx"]).all()


def test_a_run_has_a_name_of_its_own_and_a_folder_of_its_own(tmp_path):
    experiment = description("fedavg")
    name = cli._name(tmp_path / "a", experiment)
    assert cli._name(tmp_path / "a", experiment) != name  # nothing has run: a fresh start
    (tmp_path / "a" / "run.json").write_text("{}")
    name = (tmp_path / "a" / "name").read_text()
    assert cli._name(tmp_path / "a", experiment) == name
    with pytest.raises(fs.FedstrideError, match="holds another experiment"):
        cli._name(tmp_path / "a", description("fedavg", lr=0.2))


@pytest.mark.parametrize("host, keys, insecure, good", [
    ("127.0.0.1", None, False, True), ("localhost", None, False, True), ("10.0.0.1", None, False, False),
    ("fed.example.org", None, False, False), ("10.0.0.1", None, True, True), ("10.0.0.1", "keys", False, True),
])  # fmt: skip
def test_nothing_leaves_the_machine_in_the_clear_unasked(host, keys, insecure, good):
    if good:
        cli.guard(host, keys, insecure)
    else:
        with pytest.raises(fs.FedstrideError, match="--insecure"):
            cli.guard(host, keys, insecure)


def test_keys_are_secret_and_not_overwritten(tmp_path):
    keys.write(tmp_path / "k", 2, ["10.0.0.1", "fed.example.org"])
    for name in ("ca.key", "server.key", "node-0", "node-1"):
        assert (tmp_path / "k" / name).stat().st_mode & 0o077 == 0
    assert (tmp_path / "k" / "node-0.pub").read_text().startswith("ecdsa-sha2-nistp384 ")
    with pytest.raises(fs.FedstrideError, match="already holds keys"):
        keys.write(tmp_path / "k", 1, [])


def test_without_flower_one_sentence_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr("os.execvpe", lambda *a: (_ for _ in ()).throw(FileNotFoundError("flower-supernode")))
    with pytest.raises(fs.FedstrideError, match="Flower is not installed"):
        cli.client(server="127.0.0.1:1", number=0, memory=tmp_path)
    with pytest.raises(fs.FedstrideError, match="there is no file"):
        cli.client(server="127.0.0.1:1", number=0, memory=tmp_path, data=tmp_path / "none.npz")


def test_a_client_drawn_twice_counts_twice(tmp_path):
    over, _ = deployed(description("dlsgd-hetero", rounds=6), tmp_path)
    for update in range(1, 7):
        assert sum(job["times"] for job in over.timeline.jobs if job["update"] == update) == 3  # n
    assert any(job["times"] > 1 for job in over.timeline.jobs)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["client", "--server", "foo", "--number", "0"], "--server must be HOST:PORT"),
        (["client", "--server", "localhost:99999", "--number", "0"], "--server must be HOST:PORT"),
        (["client", "--server", "[::1]:9092", "--number", "0", "--data", "taken"], "--data must be an .npz file or a"),
        (
            ["client", "--server", "[::1]:9092", "--number", "0", "--memory", "taken"],
            "cannot write to the folder taken",
        ),
        (["keys", "taken", "--clients", "1", "--host", "a"], "cannot write to the folder taken"),
        (["local", "rounds=1", "partition.clients=2", "--out", "taken"], "cannot write to the folder taken"),
        (["local", "rounds=1", "partition.clients=2", "--timeout", "0"], "--timeout must be a number of seconds above"),
        (["local", "rounds=1", "data.name=least-squares", "partition.clients=3"], "such as data.clients=3"),
    ],
)
def test_mistakes_on_the_command_line_are_one_sentence(arguments, words, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fedstride.cli import app

    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("")
    said = CliRunner().invoke(app, ["deploy", *arguments])
    assert isinstance(said.exception, fs.FedstrideError) and words in str(said.exception)
