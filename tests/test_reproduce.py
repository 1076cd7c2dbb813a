"""The papers' experiments: every item runs, stored results count only for what they measured, verdicts are right."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedstride as fs
from fedstride.cli import app
from fedstride.experiment import Experiment
from fedstride.reproduce import (
    Cell,
    Claim,
    Found,
    Item,
    Measure,
    Order,
    final,
    items,
    page,
    pictures,
    play,
    rounds_to,
    store,
)
from fedstride.reproduce.judge import judge, ratio, shown
from fedstride.statistics import Run

ROOT = Path(__file__).parents[1]
EVERY = items.select(None)


def small(method="fedavg", **more):
    fields = dict(partition={"name": "iid", "clients": 4}, model="logistic", method=method, rounds=3, steps=2)
    return Experiment(**fields | more)


def table(*cells, measures=None, **more):
    return Item("Table 0", "A claim.", cells, measures or (final(),), seeds=2, **more)


def row(accuracy, round=1, **more):
    return dict(round=round, seconds=0.0, steps=1, bytes_up=0, bytes_down=0, accuracy=accuracy) | more


def put(found, cell, values, status="finished", point=None):
    """Store runs with these final accuracies, one a seed."""
    for seed, value in enumerate(values):
        experiment = store.at(cell, point or {}, seed)
        found.add(cell, point or {}, experiment, Run(seed, [row(value)], status), 0.1, "vmap")


@pytest.mark.parametrize("paper, name", EVERY, ids=str)
def test_every_item_runs_and_is_judged(paper, name, tmp_path):
    item = items.item(paper, name, "smoke")
    found = play.play(item, tmp_path / "found.json", tmp_path / "runs", seeds=1)
    assert found.complete and judge(found).done == len(item.cells)
    assert pictures.picture(found) is not None
    again = Found(item, tmp_path / "found.json")  # what was written is what was measured
    assert json.dumps(again.runs) == json.dumps(found.runs)
    assert list(play.missing(again, 1)) == []


@pytest.mark.parametrize("scale", ["cpu", "full"])
@pytest.mark.parametrize("paper, name", EVERY, ids=str)
def test_every_item_says_what_it_must(paper, name, scale):
    item = items.item(paper, name, scale)
    assert item.claim.endswith(".") and item.choices and item.seeds >= 1
    names = {measure.name for measure in item.measures}
    columns = {(cell.row, cell.column) for cell in item.cells}
    for cell in item.cells:
        assert set(cell.printed) <= names
        assert not cell.after or (cell.row, cell.after) in columns
    for order in item.orders:
        assert {(order.row, order.better), (order.row, order.worse)} <= columns
    assert item.reduced or items.own_scale(paper, name, scale) == "full", "a reduction must be stated"


def test_printed_numbers_stand_where_the_papers_have_them():
    def printed(paper, name, row, column, measure=None):
        item = items.item(paper, name, "full")
        cell = next(cell for cell in item.cells if (cell.row, cell.column) == (row, column))
        return cell.printed[measure or item.measures[0].name]

    assert printed("dlsgd", "table2-fashion-iid", "n = 10", "DLSGD-homo") == 26.39
    assert printed("dlsgd", "table2-cifar-noniid", "n = 80", "FedBuff") == 1463.5
    assert printed("fedveca", "table1-svm", "case 3", "SCAFFOLD") == 22.07
    assert printed("fedveca", "table1-cifar-cnn", "case 3", "FedVeca", "accuracy %") == 42.41
    assert printed("fedagrac", "table1-cnn", "CNN", "data") == 265
    assert printed("fedagrac", "table1-lr", "LR", "both") == math.inf


def test_runs_are_stored_skipped_and_gone_on_with(tmp_path):
    item = table(Cell("a", "FedAvg", small()), Cell("a", "SCAFFOLD", small("scaffold")))
    seen = []
    path = tmp_path / "found.json"
    play.play(item, path, tmp_path / "runs", 1, lambda name, experiment, row: seen.append(name))
    assert set(seen) == {"a FedAvg, seed 0", "a SCAFFOLD, seed 0"}
    seen.clear()
    found = play.play(item, path, tmp_path / "runs", 2, lambda name, experiment, row: seen.append(name))
    assert set(seen) == {"a FedAvg, seed 1", "a SCAFFOLD, seed 1"}
    run = found.runs[0]
    assert run["made"]["commit"] and run["made"]["machine"] and run["curve"]["round"] == [1, 2, 3]
    direct = small(seed=0).run()
    assert found.values("a", "FedAvg")[0] == pytest.approx(100 * direct.rows[-1]["accuracy"])


def test_side_by_side_gives_the_same(tmp_path):
    item = table(Cell("a", "FedAvg", small()), Cell("a", "SCAFFOLD", small("scaffold")))
    one, two = (play.play(item, tmp_path / f"{jobs}.json", tmp_path / f"{jobs}", 1, jobs=jobs) for jobs in (1, 2))
    for column in item.columns:
        assert one.values("a", column) == two.values("a", column)


@pytest.mark.parametrize("gpu", [False, True])
def test_cells_with_the_same_experiment_do_not_meet_in_one_folder(gpu, tmp_path, monkeypatch):
    monkeypatch.setattr(play, "able", lambda runs: gpu)
    monkeypatch.setattr(fs.together.Compiled, "descend_all", lambda self, requests: False)
    item = table(Cell("a", "one", small()), Cell("a", "other", small()), Cell("a", "third", small("scaffold")))
    found = play.play(item, tmp_path / "found.json", tmp_path / "runs", 1, jobs=2)
    assert found.values("a", "one") == found.values("a", "other") and found.done == 3


@pytest.mark.slow
def test_a_single_missing_run_is_compiled_too_where_several_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "able", lambda runs: True)  # as on a GPU
    monkeypatch.setattr(play, "Together", lambda: fs.Together(backend="compiled"))
    item = table(Cell("a", "FedAvg", small()))
    (run,) = play.play(item, tmp_path / "found.json", tmp_path / "runs", 1).runs
    assert run["made"]["backend"] == "compiled"


def test_a_run_of_another_experiment_does_not_count(tmp_path):
    cell = Cell("a", "FedAvg", small())
    found = Found(table(cell), tmp_path / "found.json")
    put(found, cell, [0.5, 0.6])
    changed = dataclasses.replace(cell, experiment=small(lr=0.2))
    assert Found(table(cell), found.path).done == 1 and Found(table(changed), found.path).done == 0
    elsewhere = dataclasses.replace(cell, experiment=small(device="cpu", backend="vmap"))
    assert Found(table(elsewhere), found.path).done == 1  # who computes it does not matter


def test_the_best_point_of_the_grid_runs_on_all_seeds(tmp_path):
    cell = Cell("a", "FedAvg", small(), grid={"lr": [1e-6, 0.3]})
    found = play.play(table(cell), tmp_path / "found.json", tmp_path / "runs", 3)
    assert found.winner(cell) == {"lr": 0.3}
    assert sorted((run["point"]["lr"], run["seed"]) for run in found.runs) == [(1e-6, 0), (0.3, 0), (0.3, 1), (0.3, 2)]
    assert set(found.values("a", "FedAvg")) == {0, 1, 2}


def test_what_waits_for_another_run(tmp_path):
    seen = []

    def adapt(experiment, steps):
        seen.append(steps)
        return Experiment.parse(experiment.dump() | {"steps": steps // 12})

    cells = (Cell("a", "second", small(), adapt=adapt, after="first"), Cell("a", "first", small(steps=3)))
    found = play.play(table(*cells), tmp_path / "found.json", tmp_path / "runs", 1)
    assert set(seen) == {3 * 3 * 4}  # rounds, steps, clients
    assert next(run for run in found.runs if run["column"] == "second")["adapted"] == {"steps": 3}
    assert found.values("a", "first") == found.values("a", "second")


def test_orderings_and_how_sure_they_are(tmp_path):
    printed = {"accuracy %": 80.0}, {"accuracy %": 70.0}, {"accuracy %": 60.0}
    cells = [Cell("a", name, small(lr=lr), p) for name, lr, p in zip("xyz", (0.1, 0.2, 0.3), printed)]
    found = Found(table(*cells), tmp_path / "found.json")
    for cell, values in zip(cells, ([0.8, 0.81, 0.79], [0.5, 0.52, 0.51], [0.55, 0.5, 0.52])):
        put(found, cell, values)
    verdict = judge(found)
    outcomes = {(o.better, o.worse): (o.outcome, o.sure) for o in verdict.orderings}
    assert outcomes == {("x", "y"): ("agrees", True), ("x", "z"): ("agrees", True), ("y", "z"): ("disagrees", False)}
    assert "2 of 3 orderings as printed (2 beyond the spread over seeds), 1 reversed" in verdict.text()
    assert ratio(found, cells[0], found.item.measures[0]) == pytest.approx(1.0)
    assert shown(found, cells[0], found.item.measures[0]).startswith("80.00 ± ")


def test_a_run_that_failed_is_behind_all_others(tmp_path):
    measure = rounds_to(0.9)
    cells = [Cell("a", name, small(lr=lr)) for name, lr in (("x", 0.1), ("y", 0.2))]
    found = Found(table(*cells, measures=(measure,), orders=(Order("a", "x", "y"),)), tmp_path / "found.json")
    put(found, cells[0], [0.95])
    put(found, cells[1], [0.85])
    assert judge(found).orderings[0].outcome == "agrees"
    assert shown(found, cells[1], measure) == "> 1"
    put(found, cells[1], [0.85], "diverged")
    assert shown(found, cells[1], measure) == "diverged"
    assert measure.of(Run(0, [row(math.nan)], "diverged")) == math.inf


def test_claims_wait_for_runs(tmp_path):
    cell = Cell("a", "x", small())
    claims = (Claim("high", lambda found: found.middle("a", "x") > 70), Claim("open", lambda found: None))
    found = Found(table(cell, claims=claims), tmp_path / "found.json")
    assert [holds for _, holds in judge(found).claims] == [None, None]
    put(found, cell, [0.8])
    assert [holds for _, holds in judge(found).claims] == [True, None]
    assert judge(found).held == judge(found).told == 1


def test_what_is_ours_is_not_counted_as_the_papers(tmp_path):
    cells = [Cell("a", name, small(), {"accuracy %": value, "seconds": value}) for name, value in (("x", 1), ("y", 2))]
    seconds = Measure("seconds", lambda run: 0.0, ordered=False)
    claims = (Claim("high", lambda found: True, ours=True), Claim("low", lambda found: False))
    found = Found(table(*cells, measures=(final(), seconds), claims=claims), tmp_path / "found.json")
    for cell in cells:
        put(found, cell, [0.5, 0.6])
    verdict = judge(found)
    assert verdict.claims == (("(ours) high", True), ("low", False)) and (verdict.held, verdict.told) == (0, 1)
    assert [ordering.measure.name for ordering in verdict.orderings] == ["accuracy %"]


@pytest.mark.parametrize("name", ["figure6-fashion", "figure7-cifar10", "figure8-fashion"])
def test_where_everybody_diverged_nothing_grows_and_nothing_is_alike(name, tmp_path):
    found = Found(items.item("fedlga", name, "full"), tmp_path / "found.json")
    for cell in found.item.cells:
        put(found, cell, (0.1, 0.1), "diverged")
    assert found.item.claims and not any(claim.holds(found) for claim in found.item.claims)


def test_measures_by_hand():
    rows = [row(0.5, 1), row(0.9, 2), row(0.8, 3)]
    assert final().value(Run(0, rows)) == pytest.approx(80)
    assert final(last=2).value(Run(0, rows)) == pytest.approx(85)
    assert rounds_to(0.85).of(Run(0, rows)) == 2 and rounds_to(0.95).of(Run(0, rows)) == math.inf
    assert Measure("m", lambda run: math.nan, lower=False).of(Run(0, rows)) == -math.inf


def test_curves_of_equal_length_share_their_rounds():
    for start in (0, 1):  # with and without a row before the first round
        curve = store._thin([row(0.1, t) for t in range(start, 301)], "accuracy", {"accuracy"})
        assert curve["round"][-3:] == [290, 295, 300] and len(curve["round"]) <= store.POINTS + 1


def test_findings_speak_of_items_that_exist():
    assert set(page._findings()) <= {f"{paper}/{name}" for paper, name in EVERY}


def test_two_cells_in_one_place_are_refused():
    with pytest.raises(fs.FedstrideError, match="two cells in one place"):
        table(Cell("a", "x", small()), Cell("a", "x", small(lr=0.2)))


def test_every_paper_is_on_the_page():
    titles = {module.TITLE for name, module in items.papers().items() if name != "lessons"}
    written = (ROOT / "docs" / "reproduction.md").read_text()
    assert len(titles) == 5 and all(f"| {title} |" in written for title in titles)


def test_a_run_that_followed_another_run_counts_only_with_it(tmp_path):
    cells = (
        Cell("a", "first", small(steps=3)),
        Cell("a", "second", small(), after="first", adapt=lambda e, n: Experiment.parse(e.dump() | {"steps": n // 12})),
    )
    path = tmp_path / "found.json"
    play.play(table(*cells), path, tmp_path / "runs", 1)
    stored = json.loads(path.read_text())
    next(run for run in stored["runs"] if run["column"] == "first")["steps"] += 12
    path.write_text(json.dumps(stored))
    assert [task.cell.column for task in play.missing(Found(table(*cells), path), 1)] == ["second"]


def test_an_adapted_run_counts_only_as_long_as_it_is_adapted_so(tmp_path):
    def cell(lr):
        return Cell("a", "x", small(), adapt=lambda e, n: Experiment.parse(e.dump() | {"lr": lr}))

    path, rates = tmp_path / "found.json", [0.1, 0.1, 0.2, 0.2]
    play.play(table(cell(rates)), path, tmp_path / "runs", 1)
    assert Found(table(cell(rates)), path).done == 1
    assert Found(table(cell([math.nextafter(rate, 1) for rate in rates])), path).done == 1  # as another machine rounds
    assert Found(table(cell([0.1, 0.1, 0.2, 0.2001])), path).done == 0 and Found(table(cell(0.1)), path).done == 0


def test_a_run_without_a_new_measure_is_run_again(tmp_path):
    cell = Cell("a", "x", small())
    found = Found(table(cell), tmp_path / "found.json")
    put(found, cell, [0.5])
    assert Found(table(cell, measures=(final(), rounds_to(0.9))), found.path).done == 0


def test_two_processes_add_to_the_same_item(tmp_path):
    cells = Cell("a", "x", small()), Cell("a", "y", small(lr=0.2))
    one, two = (Found(table(*cells), tmp_path / "found.json") for _ in range(2))
    put(one, cells[0], [0.5])
    put(two, cells[1], [0.6])
    assert Found(table(*cells), one.path).done == 2


def test_most_of_them_diverged(tmp_path):
    cell = Cell("a", "x", small())
    found = Found(table(cell), tmp_path / "found.json")
    put(found, cell, [0.5])
    for seed in (1, 2):
        found.add(cell, {}, store.at(cell, {}, seed), Run(seed, [row(0.1)], "diverged"), 0.1, "vmap")
    assert shown(found, cell, found.item.measures[0]) == "50.00 (1 of 3 runs, 2 diverged)"


def test_where_runs_ended_that_did_not_arrive(tmp_path):
    """Neither those that arrived nor those that diverged say anything about it."""
    measure = rounds_to(0.8)
    cell = Cell("a", "x", small(), {measure.name: 40})

    def text(*ends):
        found = Found(table(cell, measures=(measure,)), tmp_path / f"{len(list(tmp_path.iterdir()))}.json")
        for seed, (last, accuracy, status) in enumerate(ends):
            rows = [row(accuracy if at == last else 0.1, at) for at in range(1, last + 1)]
            found.add(cell, {}, store.at(cell, {}, seed), Run(seed, rows, status), 0.1, "vmap")
        return shown(found, cell, measure), ratio(found, cell, measure)

    arrived, short, broken = (10, 0.9, "stopped"), (200, 0.1, "finished"), (3, 0.1, "diverged")
    assert text(arrived, short) == ("> 200 (1 of 2 runs)", None)
    assert text(broken, short) == ("> 200 (2 runs, 1 diverged)", None)
    assert text(arrived, broken) == ("10 (1 of 2 runs, 1 diverged)", None)
    assert text(arrived, arrived, broken) == ("10 (2 of 3 runs, 1 diverged)", 0.25)
    assert text(broken, broken) == ("diverged (2 runs)", None)
    assert text(short) == ("> 200", None) and text(broken) == ("diverged", None)
    assert text((10, 0.9, "stopped"), (10, 0.9, "stopped"), (40, 0.9, "stopped"))[1] == 0.5  # of the mean that is shown


def test_a_number_that_a_short_run_does_not_have_is_none(tmp_path):
    late = Measure("after round 10", lambda run: math.nan)
    cell = Cell("a", "x", small())
    found = Found(dataclasses.replace(table(cell), measures=(late,)), tmp_path / "found.json")
    found.add(cell, {}, store.at(cell, {}, 0), Run(0, [row(0.5)], "finished"), 0.1, "vmap")
    assert shown(found, cell, late) == "none"


def test_pictures_show_seeds_targets_and_divergence(tmp_path):
    cell = Cell("a", "x", small(stop={"accuracy": 0.8}))
    found = Found(table(cell), tmp_path / "found.json")
    for seed, status in enumerate(("stopped", "diverged")):
        rows = [row(0.1 * r, r) for r in (0, 1, 2, 3 - seed)]
        found.add(cell, {}, store.at(cell, {}, seed), Run(seed, rows, status), 0.1, "vmap")
    (axis,) = pictures.picture(found).axes
    level, *_ = [line for line in axis.lines if line.get_linestyle() == ":"]
    (cross,) = [line for line in axis.lines if line.get_marker() == "x"]
    thick = next(line for line in axis.lines if line.get_label() == "x")
    assert list(level.get_ydata()) == [0.8, 0.8] and list(cross.get_xdata()) == [2]
    assert list(thick.get_xdata()) == [1, 2]  # not before the first round, and as long as both run


def test_nothing_of_a_run_is_left_for_a_later_version_to_take_up(tmp_path):
    play.play(table(Cell("a", "x", small())), tmp_path / "found.json", tmp_path / "runs", 1)
    assert not list((tmp_path / "runs").glob("*/seed-0"))


def test_every_result_has_its_picture():  # that the page matches the results is checked with the other pages
    for paper, name in EVERY:
        for scale in {items.own_scale(paper, name, scale) for scale in ("cpu", "full")}:
            if Found(items.item(paper, name, scale), store.path(paper, name, scale)).done:
                assert (ROOT / "docs" / "reproduction" / f"{paper}-{name}-{scale}.png").exists(), "run make docs"


@pytest.mark.parametrize(
    "arguments, words",
    [
        ((), "say which paper"),
        (("fedavg",), "unknown paper 'fedavg'"),
        (("dlsgd/table9",), "unknown item of dlsgd 'table9'"),
        (("dlsgd/table2-fashion-iid", "--scale", "huge"), "unknown scale 'huge'"),
    ],
)
def test_bad_input_is_one_sentence(arguments, words):
    result = CliRunner().invoke(app, ["reproduce", *arguments])
    assert isinstance(result.exception, fs.FedstrideError) and words in str(result.exception)


def test_full_scale_without_a_gpu_asks(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(app, ["reproduce", "fedagrac/table6-alexnet-dp1", "--scale", "full"])
    assert isinstance(result.exception, fs.FedstrideError)
    assert "days without a GPU; add --yes" in str(result.exception)


def test_a_missing_data_set_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDSTRIDE_DATA", str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", lambda *a, **k: (_ for _ in ()).throw(OSError("no network")))
    cell = Cell("a", "FedAvg", small(data="mnist"))
    with pytest.raises(fs.FedstrideError, match="FEDSTRIDE_DATA|download"):
        play.play(table(cell), tmp_path / "found.json", tmp_path / "runs", 1)


def test_the_list_shows_costs_and_what_is_done():
    result = CliRunner().invoke(app, ["reproduce", "--list", "o1t"], env={"COLUMNS": "150"})
    assert result.exit_code == 0 and "o1t/figure2" in result.output and "10 of 10" in result.output


def test_damaged_results_are_named(tmp_path):
    path = tmp_path / "found.json"
    path.write_text("{")
    with pytest.raises(fs.FedstrideError, match="damaged"):
        Found(table(Cell("a", "x", small())), path)
