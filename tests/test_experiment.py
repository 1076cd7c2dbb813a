"""Experiments as data: from Python, TOML and the command line; bad descriptions; studies that are resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from problems import heed_ctrl_c

import fedstride as fs
from fedstride import checkpoint, cli, runs, statistics, terminal
from fedstride.choices import CHOICES
from fedstride.experiment import Experiment, read_toml
from fedstride.study import Study, _whole_runs, override, parse_override

SMALL = {
    "rounds": 3,
    "partition": {"name": "dirichlet", "clients": 6, "alpha": 0.5},
    "steps": {"name": "gaussian", "mean": 4, "variance": 4},
    "world": {"devices": {"name": "lognormal", "median": 0.01, "sigma": 0.5}},
    "device": "cpu",
}


@pytest.fixture
def fedstride(tmp_path, monkeypatch, capsys):
    """The command line, in this process and in a folder of its own."""

    def call(*arguments, code=0):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["fedstride", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr()
        assert (ended.value.code or 0) == code, said.err
        assert "Traceback" not in said.err
        return said

    return call


def start(folder, *arguments):
    """The command line as a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(Path(fs.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "fedstride.cli", *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=environment, preexec_fn=heed_ctrl_c, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_rows(process, path, count):
    while process.poll() is None and not (path.exists() and len(path.read_text().splitlines()) >= count):
        time.sleep(0.01)


def rows(folder):
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]


# One description, three doors


def test_python_toml_and_command_line_give_the_same_rows(tmp_path, fedstride):
    description = SMALL | {"method": {"name": "fedprox", "mu": 0.3}, "seed": 2}
    from_python = Experiment.parse(description).run()
    (tmp_path / "e.toml").write_text(tomli_w.dumps(description))
    from_toml = Experiment.load(tmp_path / "e.toml").run()
    fedstride("run", "e.toml", "--out", "a")
    fedstride(
        "run", "rounds=3", "partition.clients=6", "partition.name=dirichlet", "partition.alpha=0.5", "seed=2",
        "steps={name='gaussian', mean=4, variance=4}", "method.name=fedprox", "method.mu=0.3", "device=cpu",
        "world.devices={name='lognormal', median=0.01, sigma=0.5}", "--out", "b"
    )  # fmt: skip
    plain = json.loads(json.dumps(from_python.rows))
    assert plain == json.loads(json.dumps(from_toml.rows))
    (label,) = (path.name for path in (tmp_path / "a").iterdir() if path.is_dir())
    assert label == "fedprox mu=0.3"
    assert rows(tmp_path / "a" / label / "seed-2") == plain == rows(tmp_path / "b" / label / "seed-2")
    again = Experiment.load(tmp_path / "a" / label / "seed-2" / "experiment.toml").run()  # from its folder alone
    assert json.loads(json.dumps(again.rows)) == plain


def test_a_description_survives_toml(tmp_path):
    description = SMALL | {
        "method": {"name": "fedlga", "variant": "rescale"}, "schedule": {"name": "deadline", "seconds": 0.2},
        "lr": [0.1] * 6, "batch_size": "all", "stop": {"accuracy": 0.9}, "metrics": ["top5"], "train_loss": True,
        "participation": {"name": "uniform", "n": 3}, "data": {"name": "digits"}, "seconds": 5.0, "clip": 1.0,
    }  # fmt: skip
    one = Experiment.parse(description)
    one.save(tmp_path / "one.toml")
    assert Experiment.load(tmp_path / "one.toml") == one
    result = one.run()
    assert "top5" in result.rows[-1] and result.rows[-1]["top5"] >= result.rows[-1]["accuracy"]


def test_every_choice_can_be_built():
    """Each name in every slot, with nothing but the options it needs, makes a valid description."""
    needed = {
        "dirichlet": {"alpha": 0.5}, "classes": {"k": 2}, "shards": {"per_client": 2}, 
        "quantity": {"sigma": 1.0}, "svmlight": {"path": "x"}, "synthetic": {"alpha": 1, "beta": 1},
        "gaussian": {"mean": 3, "variance": 1}, "epochs": {"count": 1}, "unfinished": {"rho": 0.5, "tau_max": 2},
        "uniform": {"n": 2}, "weighted": {"n": 2}, "bernoulli": {"p": 0.5}, "deadline": {"seconds": 1.0},
        "first-arrivals": {"n": 2}, "send-buffers": {"n": 2}, "seconds": {"values": 0.1}, "slowdown": {"base": 0.1},
        "lognormal": {"median": 0.1, "sigma": 1}, "flops": {"per_step": 1e6, "speed": 1e9}, "trace": {"path": "x"},
        "bandwidth": {"up": 1e6}, "dropout": {"p": 0.1}, "cycle": {"on": 1, "period": 2},
    }  # fmt: skip
    for slot, choices in CHOICES.items():
        for name in choices:
            value = {"name": name} | needed.get(name, {}) | ({"clients": 4} if slot == "partition" else {})
            if (slot, name) == ("privacy", "gaussian"):
                value = {"name": name, "clip": 1.0, "noise": 1.0}
            value |= {"case": 3} if (slot, name) == ("partition", "fedveca") else {}
            inner = {"world": {slot: value}} if slot in ("devices", "links", "availability") else {slot: value}
            if slot == "metrics":
                inner = {"metrics": [value]}
            assert Experiment.parse(inner)


def test_fleets_that_come_partitioned():
    squares = Experiment.parse(
        {"data": {"name": "least-squares", "clients": 5, "rows": 20, "features": 4}, "model": "logistic", "lr": 1e-3,
         "rounds": 2, "batch_size": "all", "train_loss": True}
    ).run()  # fmt: skip
    assert squares.x.shape == (5,) and "train_loss" in squares.rows[-1]
    synthetic = Experiment.parse(
        {"data": {"name": "synthetic", "alpha": 0.5, "beta": 0.5, "clients": 5}, "model": "logistic", "rounds": 2}
    ).run()
    assert 0 <= synthetic.rows[-1]["accuracy"] <= 1


# Bad descriptions


@pytest.mark.parametrize(
    ("description", "words"),
    [
        ({"metod": "fedavg"}, "unknown key 'metod'; did you mean 'method'"),
        ({"method": "fedagv"}, "did you mean 'fedavg'"),
        ({"method": {"name": "fedprox", "nu": 1}}, "unknown option of method 'fedprox': 'nu'. Choose from mu"),
        ({"method": {"name": "fedprox", "mu": "x"}}, "mu of method 'fedprox' must be a number"),
        ({"method": {}}, "method"),
        ({"partition": {"name": "dirichlet", "clients": 20}}, "partition 'dirichlet' needs alpha"),
        ({"partition": {"name": "iid", "clients": 0}}, "clients must be a whole number from 1, not 0"),
        ({"data": "fashion-mnst"}, "did you mean 'fashion-mnist'"),
        ({"model": {"name": "mlp", "hiden": 3}}, "did you mean 'hidden'"),
        ({"rounds": "many"}, "rounds: .*not 'many'"),
        ({"rounds": 0}, "rounds: .*greater than or equal to 1"),
        ({"lr": float("nan")}, "lr: .*finite"),
        ({"lr": [0.1, 0.2]}, "lr lists 2 numbers for 20 clients"),
        ({"world": {"device": 1}}, "unknown key in world 'device'; did you mean 'devices'"),
        ({"world": 3}, "world"),
        ({"stop": {"accurcy": 1}}, "did you mean 'accuracy'"),
        ({"seconds": 5.0}, "seconds need a world"),
        ({"method": "fedveca", "schedule": "buffered"}, "assigns the clients' steps"),
        ({"schedule": {"name": "first-arrivals", "n": 30}}, "the fleet has 20 clients"),
        ({"method": "fedlin", "participation": {"name": "uniform", "n": 3}}, "needs every client"),
        ({"device": "tpu"}, "device 'tpu'|unknown device"),
        ({"dtype": "float16"}, "dtype"),
        ({"data": "least-squares", "partition": {"name": "iid", "clients": 3}}, "comes as clients already"),
        ([1], "the description"),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(description, words):
    with pytest.raises(fs.FedstrideError, match=words) as caught:
        Experiment.parse(description).prepare()
    assert "\n" not in str(caught.value)


def test_impossible_combinations_are_refused_before_data_are_loaded(monkeypatch):
    monkeypatch.setattr(fs.data, "load", lambda *a, **k: pytest.fail("data were loaded"))
    with pytest.raises(fs.FedstrideError, match="fleet has 20 clients"):
        Experiment.parse({"data": "mnist", "schedule": {"name": "send-buffers", "n": 21}}).prepare()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 50) | st.floats(allow_nan=True) | st.text(max_size=6)
    | st.sampled_from(sorted({name for choices in CHOICES.values() for name in choices})),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["name", "clients", "alpha", "n", "seconds", "p", "k", "mu", "devices", "links"]), inner,
        max_size=4,
    ),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    st.dictionaries(st.sampled_from([*Experiment.model_fields, "methods", "seeds", "grid", "oops"]), VALUES, max_size=4)
)
def test_no_description_gives_a_traceback(description):
    """Whatever is written: a study, or one sentence. Data are not loaded for those that are valid by accident."""
    try:
        study = Study.parse(description)
        for plan in study.plans[:2]:
            if plan.experiment.data.name == "digits" and plan.experiment.model.name in ("mlp", "logistic"):
                plan.experiment.prepare()
    except fs.FedstrideError as error:
        assert str(error) and "\n" not in str(error) and "Traceback" not in str(error)


def test_a_toml_error_names_file_and_line(tmp_path, fedstride):
    (tmp_path / "bad.toml").write_text("rounds = 3\nlr = = 2\n")
    done = fedstride("run", "bad.toml", code=2)
    assert "bad.toml" in done.err and "line 2" in done.err
    fedstride("run", "none.toml", code=2)
    wrong = fedstride("run", "fedavg", code=2)
    assert "neither a file nor a setting" in wrong.err


def test_overrides():
    assert parse_override("partition.alpha=0.1") == ("partition.alpha", 0.1)
    assert parse_override("method=scaffold") == ("method", "scaffold")
    assert parse_override("lr=[0.1, 0.2]") == ("lr", [0.1, 0.2])
    assert override({"method": "fedprox"}, "method.mu", 1) == {"method": {"name": "fedprox", "mu": 1}}
    with pytest.raises(fs.FedstrideError, match="rounds is 3"):
        override({"rounds": 3}, "rounds.x", 1)


# Studies


def test_a_study_and_its_folder(tmp_path):
    study = Study(
        SMALL,
        methods=["fedavg", {"name": "fedprox", "mu": 0.1}, {"name": "fedavg", "label": "slow", "set": {"lr": 0.01}}],
        seeds=2,
    )
    ran = []
    first = study.play(tmp_path, done=lambda plan, run: ran.append(str(plan)))
    assert ran == [f"{label}, seed {seed}" for label in ("fedavg", "fedprox mu=0.1", "slow") for seed in (0, 1)]
    assert first["slow"][0].rows != first["fedavg"][0].rows
    facts = json.loads((tmp_path / "fedavg" / "seed-0" / "clients.json").read_text())
    assert len(facts["accuracy"]) == 6 and sum(map(sum, facts["counts"])) == sum(facts["sizes"])
    steps = []
    again = Study.load(tmp_path / "study.toml").play(tmp_path, watch=lambda plan, row: steps.append(row))
    assert again == first and not steps  # what is complete is not run again
    longer = Study(SMALL | {"rounds": 5}, methods=["fedavg"], seeds=2).play(tmp_path, resume=True)
    assert [len(run.rows) for run in longer["fedavg"]] == [5, 5] and longer["fedavg"][0].rows[:3] == first["fedavg"][
        0
    ].rows
    with pytest.raises(fs.FedstrideError, match="holds another study: its lr is 0.1, not 0.2"):
        Study(SMALL | {"lr": 0.2}, seeds=2).play(tmp_path)


def test_studies_on_the_clock_can_be_lengthened(tmp_path):
    timed = SMALL | {"world": {"devices": 0.1}, "rounds": 10}
    first = Study(timed | {"seconds": 3.0}).play(tmp_path)["fedavg"][0]
    longer = Study(timed | {"seconds": 5.0}).play(tmp_path, resume=True)["fedavg"][0]
    assert len(first.rows) < len(longer.rows) and longer.rows[: len(first.rows)] == first.rows


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number from 1"),
        ({"backend": "vmapp"}, "unknown backend 'vmapp'"),
        ({"stop": {"train_loss": 1.0}}, "pass train_loss=True"),
    ],
)
def test_mistakes_come_out_before_the_first_run(tmp_path, wrong, words):
    with pytest.raises(fs.FedstrideError, match=words):
        Study(SMALL, methods=["fedavg", {"name": "fedprox", "set": wrong}]).play(tmp_path / "study")
    assert not (tmp_path / "study").exists()


def test_methods_of_a_study_see_the_same_clients_and_world():
    one, two = (Experiment.parse(SMALL | {"method": name, "seed": 3}).prepare() for name in ("fedavg", "scaffold"))
    assert (one.clients.order == two.clients.order).all()
    assert all((a == b).all() for a, b in zip(one.model.parameters(), two.model.parameters()))
    other = Experiment.parse(SMALL | {"seed": 4}).prepare()
    assert len(one.clients.order) != len(other.clients.order) or (one.clients.sizes != other.clients.sizes).any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(methods=[]), "methods must be a list"),
        (dict(methods=["fedavg", "fedavg"]), "'fedavg' twice"),
        (dict(methods=[{"name": "fedavg", "set": 3}]), "set must be a table"),
        (dict(seeds=0), "seeds must be a whole number from 1"),
        (dict(seeds=[1, 1]), "different numbers"),
        (dict(grid={"lr": 3}), "a list of values"),
        (dict(grid={"lrr": [3]}), "did you mean 'lr'"),
    ],
)
def test_impossible_studies_are_refused(arguments, words):
    with pytest.raises(fs.FedstrideError, match=words):
        Study({}, **arguments)


def test_killed_in_the_middle_and_resumed(tmp_path, fedstride):
    """kill -9 during a comparison; with --resume the rows and the table are those of an undisturbed one."""
    description = SMALL | {"rounds": 40, "methods": ["fedavg", "scaffold", "fedbuff"], "seeds": 2}
    (tmp_path / "study.toml").write_text(tomli_w.dumps(description))
    victim = start(tmp_path, "compare", "study.toml", "--json", "--out", "killed")
    wait_for_rows(victim, tmp_path / "killed" / "scaffold" / "seed-0" / "rows.jsonl", 4)
    victim.kill()
    victim.communicate()
    assert not (tmp_path / "killed" / "fedbuff" / "seed-1" / "clients.json").exists(), "the kill came too late"
    refused = fedstride("compare", "study.toml", "--out", "killed", code=2)
    assert "unfinished run; go on with resume" in refused.err
    resumed = json.loads(fedstride("compare", "study.toml", "--json", "--resume", "--out", "killed").out)
    whole = json.loads(fedstride("compare", "study.toml", "--json", "--out", "whole").out)
    assert resumed["runs"] == whole["runs"]
    for path in (tmp_path / "whole").glob("*/seed-*"):
        assert rows(path) == rows(tmp_path / "killed" / path.relative_to(tmp_path / "whole"))


def test_a_full_disk_ends_the_run_with_a_sentence(tmp_path, monkeypatch):
    append, calls = checkpoint.Lines.append, []

    def full(self, new):
        calls.append(1)
        if len(calls) > 5:
            raise OSError(28, "No space left on device")
        append(self, new)

    monkeypatch.setattr(checkpoint.Lines, "append", full)
    with pytest.raises(fs.FedstrideError, match="cannot write to the folder .* No space left"):
        Experiment.parse(SMALL | {"rounds": 9}).run(folder=tmp_path / "run")
    kept = rows(tmp_path / "run")
    assert kept and [row["round"] for row in kept] == list(range(1, len(kept) + 1))
    monkeypatch.undo()
    whole = Experiment.parse(SMALL | {"rounds": 9}).run()
    assert Experiment.parse(SMALL | {"rounds": 9}).run(folder=tmp_path / "run", resume=True).rows == whole.rows


def test_a_read_only_folder_is_named(tmp_path, fedstride):
    (tmp_path / "file").write_text("")
    done = fedstride("run", "rounds=1", "--out", "file/x", code=2)
    assert "cannot write" in done.err


# The command line


def test_sweep_names_the_best(tmp_path, fedstride):
    done = fedstride(
        "sweep", "rounds=2", "partition.clients=5", "--over", "lr=0.001,0.3", "--over", "method.name=fedavg,fedprox",
        "--out", "s"
    )  # fmt: skip
    assert "best by accuracy: fed" in done.out and "lr=0.3" in done.out.split("best by accuracy")[1]
    assert len(list((tmp_path / "s").glob("*/seed-0"))) == 4
    again = fedstride("sweep", "rounds=2", "--over", "lr=0.001,0.3", "--by", "loss", "--out", "j", "--json")
    assert json.loads(again.out)["best"].endswith("lr=0.3")


def test_without_out_every_study_gets_its_own_folder(tmp_path, fedstride):
    for lr, folder in ((0.1, "run-digits"), (0.2, "run-digits-2"), (0.1, "run-digits"), (0.3, "run-digits-3")):
        assert f"results in runs/{folder}\n" in fedstride("run", "rounds=1", f"lr={lr}").out
    refused = fedstride("run", "rounds=1", "lr=-1", "--out", "runs/run-digits", code=2)
    assert "lr must be positive" in refused.err  # what is wrong with it comes before where it goes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "steps.name=gausian"), "unknown steps 'gausian'; did you mean 'gaussian'?"),
        (("run", "seconds=3"), "in a description world.devices=0.01"),
        (("sweep", "--over", "lr"), "--over needs a field and its values, such as lr=0.01,0.1, not 'lr'"),
    ],
)
def test_mistakes_on_the_command_line_say_what_is_meant(arguments, words, fedstride):
    assert words in " ".join(fedstride(*arguments, code=2).err.split())


def test_a_study_is_not_an_experiment_and_one_metric_is_a_list_of_one():
    with pytest.raises(fs.FedstrideError, match="a description with methods and seeds is a study: fs.Study reads"):
        Experiment.parse({"seeds": 3, "methods": ["fedavg"]})
    assert Experiment.parse({"metrics": "top5"}) == Experiment.parse({"metrics": ["top5"]})


def test_a_point_with_diverged_runs_is_not_the_best(tmp_path):
    rows = {"round": 1, "seconds": 0.0, "steps": 1, "bytes_up": 1, "bytes_down": 1}
    good, weak = ({"accuracy": value} | rows for value in (0.9, 0.2))
    results = {
        "lr=0.45": [statistics.Run(0, [good], "finished"), statistics.Run(1, [rows], "diverged")],
        "lr=0.001": [statistics.Run(seed, [weak], "finished") for seed in range(2)],
    }
    assert terminal.ranked(results, "accuracy") == ["lr=0.001", "lr=0.45"]


def test_a_study_grows_in_any_spelling_and_its_file_can_be_run(tmp_path, fedstride):
    fedstride("compare", "rounds=1", "-m", "fedavg,scaffold", "--out", "q")
    (tmp_path / "more.toml").write_text('rounds = 1\nmethods = ["fedavg", "feddyn"]\n')
    fedstride("compare", "more.toml", "--out", "q", "--resume")
    fedstride("run", "q/study.toml", "--out", "q", "--resume")
    assert len(list((tmp_path / "q").glob("*/seed-0"))) == 3
    for values in ("0.1,0.2", "0.2,0.5"):
        fedstride("sweep", "rounds=1", "--over", f"lr={values}", "--out", "g")
    assert read_toml(tmp_path / "g" / "study.toml")["grid"] == {"lr": [0.1, 0.2, 0.5]}


def test_labels_beside_options_in_a_grid(tmp_path, fedstride):
    study = Study(methods=[{"name": "fedprox", "label": "prox (own)"}], grid={"method.mu": [0.1, 1.0]})
    assert [plan.label for plan in study.plans] == ["prox (own) method.mu=0.1", "prox (own) method.mu=1.0"]
    study.play(tmp_path / "l")
    assert {record.label for record in runs.load(tmp_path / "l")} == {plan.label for plan in study.plans}


def test_a_run_can_be_cut_short_where_it_has_not_got_yet(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint.Folder, "due", lambda self: True)
    long = Study({"rounds": 100_000})

    class Interrupt(Exception):
        pass

    def stop(plan, row):
        if row["round"] == 5:
            raise Interrupt

    with pytest.raises(Interrupt):
        long.play(tmp_path, watch=stop)
    with pytest.raises(fs.FedstrideError, match="holds [45] rounds, more than the 2 asked for"):
        Study({"rounds": 2}).play(tmp_path, resume=True)
    (run,) = Study({"rounds": 7}).play(tmp_path, resume=True)["fedavg"]
    assert len(run.rows) == 7 and run.status == "finished"


def test_seed_and_seeds(fedstride):
    assert "seed or seeds, not both" in fedstride("run", "rounds=1", "seed=5", "--seeds", "2", code=2).err


def test_a_default_that_is_a_number_can_become_a_table(tmp_path, fedstride):
    fedstride("run", "steps.name=gaussian", "steps.mean=5", "steps.variance=4", "rounds=1", "--out", "t")
    assert Experiment.load(next((tmp_path / "t").glob("*/seed-0/experiment.toml"))).steps.name == "gaussian"


def test_models_with_one_output(tmp_path, fedstride):
    fedstride("run", "data=digits", "model=svm-fedveca", "loss=parity_hinge", "rounds=1", "--out", "o")
    assert "accuracy" not in json.loads(next((tmp_path / "o").glob("*/seed-0/clients.json")).read_text())


def test_json_knows_no_infinity(fedstride):
    said = fedstride("run", "model=logistic", "lr=1e37", "rounds=2", "--json", "--out", "i").out

    def refuse(name):
        raise AssertionError(name)

    assert json.loads(said, parse_constant=refuse)["runs"][0]["last"]["loss"] is None


def test_synthetic_has_the_classes_it_was_asked_for():
    for seed in range(3):  # some of these fleets have not all labels
        described = Experiment.parse(
            {"data": {"name": "synthetic", "alpha": 1.0, "beta": 1.0, "clients": 1}, "seed": seed}
        )
        assert len(described.fleet()[2]) == 10


def test_runs_whose_uploads_must_be_seen_together_stay_whole():
    plans = Study({"rounds": 1}, methods=["fedavg", "fedprox", {"name": "scaffold", "set": {"robust": "median"}}]).plans
    whole = _whole_runs(plans, 2)
    assert [plan.label for plan in whole] == ["scaffold", "fedavg"]
    assert _whole_runs(plans[2:], 2) == plans[2:] and _whole_runs(plans[:1], 2) == []


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_misspelt_metric_stops_a_sweep_at_its_first_measurement(model, tmp_path, fedstride):
    """Whether runs go side by side or one after the other."""
    changes = ("rounds=3", "every=2", "steps=1", f"model.name={model}", "--over", "lr=0.1,0.2")
    done = fedstride("sweep", *changes, "--by", "acuracy", "--json", "--out", "s", code=2)
    assert "acuracy" in done.err and "accuracy" in done.err
    assert not list((tmp_path / "s").glob("*/seed-0/clients.json"))
    assert len(list((tmp_path / "s").glob("*/seed-0"))) == (2 if model == "mlp" else 1)


def test_exit_codes_and_json(tmp_path, fedstride):
    diverged = fedstride("run", "lr=1e30", "rounds=3", "--out", "d", "--json", code=3)
    assert json.loads(diverged.out)["runs"][0]["status"] == "diverged"
    fedstride("compare", "rounds=1", code=2)
    fedstride("nothing", code=2)


def test_ctrl_c_leaves_a_resumable_run(tmp_path):
    running = start(tmp_path, "run", "rounds=5000", "--out", "r")
    wait_for_rows(running, tmp_path / "r" / "fedavg" / "seed-0" / "rows.jsonl", 4)
    running.send_signal(signal.SIGINT)
    _, words = running.communicate(timeout=30)
    assert running.returncode == 130 and "--resume" in words and "Traceback" not in words
    stored = json.loads((tmp_path / "r" / "fedavg" / "seed-0" / "run.json").read_text())["run"]
    assert stored["status"] == "running" and stored["round"] >= 1


def test_list_names_everything(tmp_path, fedstride):
    text = fedstride("list").out
    for name in ("fedagrac", "dlsgd-hetero", "fashion-mnist", "dirichlet", "cnn-dlsgd", "send-buffers"):
        assert name in text
    assert "scaffold" in fedstride("list", "methods").out
    assert "mu=0.1" in fedstride("list", "method").out
    assert "mean, variance, redraw=False" in fedstride("list", "steps").out  # the first two must be given


def test_a_budget_of_virtual_seconds():
    description = SMALL | {"rounds": 500, "seconds": 0.5}
    for method in ("fedavg", "fedbuff"):
        last = Experiment.parse(description | {"method": method}).run().rows
        assert last[-1]["seconds"] >= 0.5 > last[-2]["seconds"] and last[-1]["round"] < 500


def test_rows_reach_tensorboard(tmp_path, fedstride):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install fedstride[track]")
    fedstride("run", "rounds=2", "--out", "t", "--track", "tensorboard")
    assert list((tmp_path / "t" / "tensorboard").rglob("events*"))


def test_an_unknown_tracker_is_refused(tmp_path, fedstride):
    done = fedstride("run", "rounds=2", "--out", "t", "--track", "wandb", code=2)
    assert "choose from tensorboard, mlflow" in done.err


# What newcomers tried


def test_a_method_on_the_command_line_is_the_one_that_runs(fedstride, tmp_path):
    (tmp_path / "s.toml").write_text(tomli_w.dumps(SMALL | {"rounds": 1, "methods": ["fedavg", "scaffold"]}))
    fedstride("run", "partition.alpha=0.9", "s.toml", "method.name=fedprox", "method.mu=0.5", "--out", "o")
    (run,) = (tmp_path / "o").glob("*/seed-0")
    assert run.parent.name == "fedprox mu=0.5" and Experiment.load(run / "experiment.toml").partition.alpha == 0.9
    both = fedstride("run", "s.toml", "methods=['fedavg']", "method=scaffold", "methods=['fedavg']", code=2)
    assert "method or methods, not both" in both.err


def test_options_survive_a_sweep_over_methods(fedstride, tmp_path):
    said = fedstride(
        "sweep", "rounds=1", "method.mu=0.5", "--over", "method.name=fedprox,scaffold", "--out", "o", code=2
    )
    assert "unknown option of method" in said.err
    fedstride("sweep", "rounds=1", "method.server_lr=0.5", "--over", "method.name=fedavg,scaffold", "--out", "o")
    assert sorted(path.name for path in (tmp_path / "o").iterdir() if path.is_dir()) == [
        "fedavg server_lr=0.5", "scaffold server_lr=0.5",
    ]  # fmt: skip


def test_a_mistake_found_late_does_not_block_the_folder(fedstride):
    fedstride("run", "rounds=1", "backend=x", "--out", "o", code=2)
    fedstride("run", "rounds=1", "--out", "o")


def test_float64_from_the_command_line(fedstride, tmp_path):
    fedstride("run", "rounds=1", "dtype=float64", "--out", "o")
    assert len(json.loads((tmp_path / "o" / "fedavg" / "seed-0" / "clients.json").read_text())["accuracy"]) == 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["sweep", "rounds=1", "--over", "lr=0.1", "--by", "acuracy"], "did you mean 'accuracy'"),
        (["sweep", "rounds=1", "--over", "seed=0,1"], "list the seeds in seeds"),
        (["run", "rounds=1", "stop.accuracy=90"], "less than or equal to 1"),
        (["report", ".", "--target", "90"], "an accuracy from 0 to 1"),
        (["run", "rounds=1", "steps=[" + "1," * 200 + "1]"], "steps lists 201 numbers for 20 clients"),
        (["run", "world.devices=nan"], "finite"),
        (["run", "rounds=1", "participation={name='uniform', n=2, replacement='no'}"], "must be true or false"),
        (["run", "rounds=1", "data={name='svmlight', path=5}"], "svmlight"),
        (["run", "seed=99999999999999999999999"], "seed"),
        (["run", "rounds=true"], "rounds: must not be true"),
        (["run", "method.server_lr=abc"], "server_lr of method 'fedavg' must be a number, not 'abc'"),
        (["run", "lr=true"], "lr: must not be true"),
        (["run", "metrics=sign_accuracy"], "the metric 'sign_accuracy' fails on the test data"),
        (["run", "seconds=1", "world.devices=0.1", "method=centralised"], "takes no virtual time"),
        (["run", "world.devices=0.01", "schedule={name='deadline', seconds=0.05, late='drop'}"], "no client of"),
        (["compare", "methods=5"], "at least two methods"),
        (["compare", "methods=['fedavg', {name='scaffold', label='..'}]"], "cannot be the name of a folder"),
        (["compare", "methods=[{name='fedavg', label='a/b'}, {name='scaffold', label='a:b'}]"], "would share a folder"),
    ],
)  # fmt: skip
def test_what_newcomers_got_wrong(fedstride, arguments, words):
    out = [] if arguments[0] == "report" else ["--out", "o"]
    assert words in fedstride(*arguments, *out, code=2).err.replace("\n", " ")


def test_lists_are_values_of_a_grid_too(fedstride, tmp_path):
    fedstride("sweep", "rounds=1", "partition.clients=2", "--over", "steps=[1,2],[3,4]", "--out", "o")
    assert Study.load(tmp_path / "o" / "study.toml").grid == {"steps": [[1, 2], [3, 4]]}


def test_without_a_place_another_study_gets_another_folder(fedstride, tmp_path):
    fedstride("compare", "--methods", "fedavg,scaffold", "rounds=1")
    fedstride("compare", "--methods", "fedprox,fednova", "rounds=2")
    fedstride("sweep", "rounds=1", "--over", "lr=0.1")
    fedstride("sweep", "rounds=1", "--over", "steps=1,2")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {
        "compare-digits", "compare-digits-2", "sweep-digits", "sweep-digits-2",
    }  # fmt: skip
    place = ("--out", "runs/compare-digits")
    said = fedstride("compare", "--methods", "fedprox,fednova", "rounds=2", *place, code=2).err
    assert "its rounds is 1, not 2" in said and "go on with --resume" in said
    fedstride("compare", "--methods", "fedprox,fednova", "rounds=2", *place, "--resume")
    page = (tmp_path / "runs" / "compare-digits" / "report.html").read_text()
    assert "differ in more than their methods, in rounds (1: fedavg, scaffold; 2: fednova, fedprox)" in page
    assert "differ in more" not in (tmp_path / "runs" / "compare-digits-2" / "report.html").read_text()


def test_a_damaged_run_is_named(fedstride, tmp_path):
    fedstride("run", "rounds=2", "--out", "o")
    (tmp_path / "o" / "fedavg" / "seed-0" / "rows.jsonl").write_text("{")
    assert (
        "rows.jsonl is damaged: it has 0 rows, the run wrote 2; delete"
        in fedstride("run", "rounds=2", "--out", "o", code=2).err
    )


def test_a_sweep_in_which_all_diverge_names_no_winner(fedstride):
    assert "best by" not in fedstride("sweep", "rounds=2", "--over", "lr=1e30,1e29", "--out", "o", code=3).out


def test_more_methods_join_a_study_and_other_experiments_do_not(fedstride, tmp_path):
    fedstride("run", "rounds=1", "--out", "o")
    fedstride("run", "rounds=1", "method=scaffold", "--seeds", "2", "--out", "o")
    study = Study.load(tmp_path / "o" / "study.toml")
    assert len(study.methods) == 2 and study.seeds == [0, 1]
    assert "holds another study" in fedstride("run", "rounds=1", "lr=0.5", "method=feddyn", "--out", "o", code=2).err
