"""The report: what it says is what the statistics say, and nothing is hidden."""

import csv
import html
import json
import re
import shutil
from pathlib import Path

import pytest
from sample_study import study

import fedstride as fs
from fedstride import report, runs, statistics
from fedstride.report import data, figures, findings, page


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = study(tmp_path_factory.mktemp("study") / "demo")
    report.write(folder)
    return folder


@pytest.fixture
def folder(written, tmp_path, monkeypatch):
    """A copy to spoil; drawing the files is left to one test."""
    monkeypatch.setattr(figures, "draw", lambda data, findings: {})
    return Path(shutil.copytree(written, tmp_path / "demo"))


def test_a_timeline_in_which_nobody_shown_did_anything(tmp_path):
    """Of a hundred clients the first sixty are drawn."""
    base = {"partition": {"name": "iid", "clients": 100}, "world": {"devices": 0.01}, "rounds": 1, "steps": 1}
    fs.Study(base | {"participation": {"name": "uniform", "n": 1}, "seed": 1}).play(tmp_path)
    (jobs,) = (tmp_path / "fedavg").glob("*/timeline.jsonl")
    assert min(map(int, re.findall(r'"client": (\d+)', jobs.read_text()))) >= 60
    assert report.write(tmp_path).exists()


def text(folder, target=None):
    return report.write(folder, target).read_text()


def embedded(words):
    return json.loads(re.search(r'id="data">(.*?)</script>', words, re.DOTALL).group(1))


def cells(words):
    """Label -> the texts of its cells in the summary table."""
    table = {}
    for row in re.findall(r"<tr[^>]*>(<th scope=\"row\".*?)</tr>", words, re.DOTALL):
        parts = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
        name, *rest = [html.unescape(re.sub(r"<small>.*", "", part)) for part in parts]
        table[name] = rest
    return table


def edit(path, change):
    path.write_text(change(path.read_text()))


def status(folder, label, seed, value):
    def change(words):
        stored = json.loads(words)
        stored["run"]["status"] = value
        return json.dumps(stored)

    edit(folder / label / f"seed-{seed}" / "run.json", change)


def spread(folder, label, accuracies, start=0.1):
    """One made-up run a seed, of two rows."""
    for seed, accuracy in enumerate(accuracies):
        place = folder / label / f"seed-{seed}"
        place.mkdir(parents=True)
        row = {"seconds": 1.0, "steps": 5, "bytes_up": 100, "bytes_down": 100}
        rows = [row | {"round": 1, "accuracy": start}, row | {"round": 2, "seconds": 2.0, "accuracy": accuracy}]
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (place / "run.json").write_text(json.dumps({"run": {"status": "finished", "round": 2, "rows": 2}}))


# ---- what it says


def test_the_numbers_are_those_of_the_statistics(folder):
    words = text(folder, target=0.5)
    table, records = cells(words), runs.load(folder)
    groups = {label: [r.run for r in group] for label, group in findings.grouped(records).items()}
    best = max(groups, key=lambda label: statistics.summarise(groups[label]).mean)
    for label, group in groups.items():
        final = statistics.summarise(group).text(100).replace("+-", "±")
        assert final == table[label][0]
        assert statistics.summarise(group, pick="best").text(100).replace("+-", "±") == table[label][1]
        for unit, cell in zip(statistics.UNITS, table[label][2:6]):
            said = statistics.to_target(group, fs.Target(accuracy=0.5), unit).text()
            assert re.split(r" \(|, ", said)[0] == cell
        if label != best:
            found = statistics.compare(group, groups[best])
            said = statistics.Summary(found.mean, found.half, 2).text(100)
            assert table[label][6] == said.replace("+-", "±").replace("-", "−")
            assert f"p = {found.p_t:.2g}" in words
    assert words.split("<h1>")[1].startswith(best)
    shown = embedded(words)["curves"]["accuracy"]["seconds"]["fedavg"]
    curve = statistics.curve(groups["fedavg"], "accuracy", "seconds")
    assert shown["mean"] == pytest.approx(curve.mean, rel=1e-3)
    assert shown["half"] == pytest.approx(curve.half, rel=1e-2)


def test_the_winner_is_as_sure_as_the_seeds_make_it(tmp_path):
    spread(tmp_path, "good", [0.901, 0.902, 0.903], start=0.89)
    spread(tmp_path, "poor", [0.801, 0.802, 0.804])
    found = findings.find(runs.load(tmp_path))
    assert found.headline.startswith("good wins with 90.20 ± 0.25 % accuracy, 9.97 ± 0.14 points above poor")
    assert found.target == fs.Target(accuracy=0.9)
    spread(tmp_path, "close", [0.895, 0.91, 0.88])
    assert "but 3 seeds cannot tell it from close" in findings.find(runs.load(tmp_path)).headline


def test_a_lucky_last_row_is_called_that(tmp_path):
    spread(tmp_path, "calm", [0.801, 0.802, 0.804])
    spread(tmp_path, "wild", [0.901, 0.902, 0.903])
    found = findings.find(runs.load(tmp_path))
    said = found.details
    assert found.headline.startswith("wild ends ahead with 90.2")
    assert "wild still moves by more than its lead: over its last rounds between 10 and 90.3 %" in said[1]


def test_equal_differences_prove_nothing(tmp_path):
    spread(tmp_path, "good", [0.9, 0.9])
    spread(tmp_path, "poor", [0.8, 0.8])
    found = findings.find(runs.load(tmp_path))
    assert "on each of 2 seeds; differences without any spread" in found.headline
    assert found.table["poor"][-2].note == "the same on all"


def test_one_seed_has_no_certainty(tmp_path):
    spread(tmp_path, "good", [0.9])
    assert findings.find(runs.load(tmp_path)).headline == "good ends at 90 % accuracy"
    spread(tmp_path, "poor", [0.8])
    assert "one seed cannot say how sure" in findings.find(runs.load(tmp_path)).headline


def test_a_method_that_sends_nothing_is_a_reference_and_cannot_win(tmp_path):
    spread(tmp_path, "fedavg", [0.9, 0.9])
    spread(tmp_path, "pooled", [0.99, 0.99])
    for path in tmp_path.glob("pooled/*/rows.jsonl"):
        edit(path, lambda words: words.replace(": 100", ": 0"))
    found = findings.find(runs.load(tmp_path))
    assert found.references == ["pooled"] and found.ranking == ["fedavg", "pooled"]
    assert found.headline.startswith("fedavg")


# ---- runs that did not end well


def test_unfinished_runs_are_named_and_not_averaged(folder):
    status(folder, "fedavg", 1, "running")
    (folder / "fedbuff" / "seed-0" / "run.json").unlink()
    words = text(folder)
    assert "fedavg, seed 1, is unfinished at round 6" in words and "fedbuff, seed 0, is unfinished" in words
    run = next(r.run for r in runs.load(folder) if r.label == "fedavg" and r.seed == 0)
    whole = statistics.summarise([run]).text(100)
    assert cells(words)["fedavg"][0] == whole.split(" (")[0]
    assert "1 finished, 1 unfinished" in cells(words)["fedavg"][-1]


def test_a_method_without_a_finished_run_is_still_drawn(folder):
    for seed in (0, 1):
        status(folder, "fedavg", seed, "running")
    words = text(folder)
    assert "fedavg" in embedded(words)["curves"]["accuracy"]["rounds"]
    assert cells(words)["fedavg"][0] == "–" and cells(words)["fedavg"][-1] == "2 unfinished"


def test_nothing_has_finished_or_even_begun(folder):
    for path in folder.glob("*/*/run.json"):
        path.unlink()
    for path in folder.glob("*/*/rows.jsonl"):
        path.write_text("")
    words = text(folder)
    assert "No run has finished yet" in words and "fedavg, seed 0, is unfinished at round 0" in words


def test_diverged_runs_are_named_and_do_not_win(folder):
    ranking = findings.find(runs.load(folder)).ranking
    status(folder, ranking[0], 1, "diverged")
    found = findings.find(runs.load(folder))
    assert found.ranking[-1] == ranking[0]
    assert any(f"{ranking[0]}, seed 1, diverged at round" in notice for notice in found.notices)
    assert found.table[ranking[0]][1].note.endswith("1 of 2 diverged")
    for label in ranking:
        for seed in (0, 1):
            status(folder, label, seed, "diverged")
    assert "All runs diverged." in text(folder)


def test_a_method_that_diverged_before_it_was_measured_hides_nothing(tmp_path):
    spread(tmp_path, "fedavg", (0.8, 0.9))
    spread(tmp_path, "scaffold", (0.7, 0.8))
    for label in ("fedavg", "scaffold"):
        for path in tmp_path.glob(f"{label}/*/rows.jsonl"):
            edit(
                path,
                lambda words: words.replace('"seconds": 1.0', '"seconds": 0').replace('"seconds": 2.0', '"seconds": 0'),
            )
    spread(tmp_path, "large", (0.0, 0.0))
    for seed in range(2):
        status(tmp_path, "large", seed, "diverged")
        lost = {"round": 1, "seconds": 0, "steps": 5, "bytes_up": 100, "bytes_down": 100}
        rows = tmp_path / "large" / f"seed-{seed}" / "rows.jsonl"
        rows.write_text(2 * (json.dumps(lost) + "\n"))
    words = text(tmp_path)
    assert "All runs diverged" not in words and cells(words)["fedavg"][0].startswith("85")
    assert "Progress" in words and "virtual seconds" not in words


def test_what_was_not_reached_says_so(folder):
    words = text(folder, target=fs.Target(accuracy=1.0))
    assert "0 of 2 reached" in words and cells(words)["fedavg"][2] == "> 6"
    assert "No method reaches 100\N{NO-BREAK SPACE}% accuracy on more than half of its seeds." in words


def test_half_a_last_line_is_ignored(folder):
    path = folder / "fedavg" / "seed-0" / "rows.jsonl"
    (folder / "fedavg" / "seed-0" / "run.json").unlink()
    before = len(runs.load(folder)[0].rows)
    edit(path, lambda words: words + '{"round": 7, "sec')
    assert len(runs.load(folder)[0].rows) == before


def test_rows_after_the_end_belong_to_a_killed_continuation(folder):
    path = folder / "fedavg" / "seed-0" / "rows.jsonl"
    edit(path, lambda words: words + words.splitlines()[-1].replace('"round": 6', '"round": 7') + "\n")
    assert [r for r in runs.load(folder) if r.label == "fedavg"][0].round == 6


# ---- the page


def test_what_comes_from_files_is_escaped(folder):
    evil = "</script><script>alert(1)</script><b>&"
    (folder / "fedavg").rename(folder / evil.replace("/", "\N{DIVISION SLASH}"))
    edit(folder / "study.toml", lambda words: words + f"# {evil} $title ${{data}}")
    for path in folder.glob("*/*/clients.json"):
        edit(path, lambda words: json.dumps(json.loads(words) | {"classes": [evil] * 10}))
    words = text(folder)
    assert "<script>alert" not in words and words.count("</script>") == 2 and "<b>&" not in words
    assert embedded(words)["partition"]["classes"] == [evil] * 10
    assert "$title ${data}" in words


def test_all_sections_and_no_empty_one(folder):
    every = ["summary", "curves", "timelines", "steps", "staleness", "partition", "fairness", "experiments"]
    assert re.findall(r'<section id="(\w+)">', text(folder)) == every
    for pattern in ("timeline.jsonl", "clients.json", "experiment.toml"):
        for path in folder.glob(f"*/*/{pattern}"):
            path.unlink()
    for path in folder.glob("*/*/run.json"):
        edit(path, lambda words: re.sub(r'"timeline": \d+', '"timeline": 0', words))
    (folder / "study.toml").unlink()
    assert re.findall(r'<section id="(\w+)">', text(folder)) == ["summary", "curves"]


def test_no_time_no_seconds(tmp_path):
    spread(tmp_path, "a", [0.9])
    for path in tmp_path.glob("*/*/rows.jsonl"):
        edit(path, lambda words: re.sub(r'"seconds": [\d.]+', '"seconds": 0.0', words))
    records = runs.load(tmp_path)
    found = findings.find(records)
    assert "virtual seconds" not in found.columns
    assert set(data.collect(records, found)["curves"]["accuracy"]) == {"rounds", "megabytes", "steps"}


def test_the_page_is_self_contained_small_and_fits_phones(written):
    words = (written / "report.html").read_text()
    bare = re.sub(r'id="data">.*?</script>', "", words, flags=re.DOTALL)
    assert len(bare) < 3e6 and not re.search(r"(src|href)=|@import|url\((?!#)", bare)
    assert not re.search(r"https?://(?!www\.w3\.org)", bare)
    assert 'name="viewport"' in bare and "@media (max-width" in bare and "prefers-color-scheme: dark" in bare


def test_long_runs_are_thinned(tmp_path):
    spread(tmp_path, "long", [0.9])
    place = tmp_path / "long" / "seed-0"
    row = {"seconds": 0.0, "steps": 1, "bytes_up": 1, "bytes_down": 1, "accuracy": 0.123456789}
    rows = [row | {"round": number, "seconds": number / 7} for number in range(1, 3001)]
    job = {"client": 0, "version": 0, "steps": 1, "end": 1.0, "fate": "used", "update": 1}
    jobs = [job | {"start": k / 10, "end": k / 10 + 0.05, "update": k + 1, "version": k} for k in range(2000)]
    updates = [{"update": k, "seconds": k / 10} for k in range(1, 2001)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "timeline.jsonl").write_text("".join(json.dumps(row) + "\n" for row in jobs + updates))
    (place / "run.json").unlink()
    records = runs.load(tmp_path)
    made = data.collect(records, findings.find(records))
    line = made["curves"]["accuracy"]["seconds"]["long"]
    assert len(line["x"]) == data.POINTS and line["x"][-1] == pytest.approx(3000 / 7, rel=1e-4)
    assert line["mean"][0] == 0.1235
    timeline = made["timelines"]["long"]
    assert len(timeline["jobs"]) == data.JOBS and timeline["total"] == 2000 and timeline["until"] == 40
    assert len(made["steps"]["long"]["cells"][0]) <= data.BINS


def test_json_cannot_leave_its_element():
    assert "<" not in page.embed({"a": "</script><!--"}) and json.loads(page.embed(["<&>"])) == ["<&>"]


# ---- the files beside it


def test_figures_are_written_and_their_text_is_text(written):
    names = {path.stem for path in (written / "figures").iterdir()}
    curves = {f"accuracy-{unit}" for unit in statistics.UNITS}
    assert names == curves | {"timeline", "steps", "staleness", "partition", "fairness"}
    for name in names:
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    svg = (written / "figures" / "accuracy-rounds.svg").read_text()
    assert re.search(r"<text[^>]*>fedavg</text>", svg)


def test_the_tables_hold_every_row(written):
    records = runs.load(written)
    with open(written / "table.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == sum(len(record.rows) for record in records)
    assert list(lines[0])[:4] == ["label", "seed", "status", "round"]
    assert set(lines[0]) == {"label", "seed", "status"} | {name for r in records for row in r.rows for name in row}
    assert float(lines[0]["accuracy"]) == records[0].rows[0]["accuracy"]
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    table = parquet.read_table(written / "table.parquet")
    assert table.column_names == list(lines[0]) and table.num_rows == len(lines)
    assert table["accuracy"].to_pylist() == [row["accuracy"] for record in records for row in record.rows]


def test_without_pyarrow_one_sentence_says_so(folder, monkeypatch):
    monkeypatch.setattr(report.tables, "as_parquet", lambda *_: None)
    (folder / "table.parquet").unlink()
    assert "There is no table.parquet because pyarrow is not installed." in text(folder)
    assert (folder / "table.csv").exists() and not (folder / "table.parquet").exists()


# ---- bad input


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("rows.jsonl", '{"round": 1\n{"round": 2}\n', "line 1 is not a JSON object"),
        ("rows.jsonl", '{"round": 1}\n', "row 1 has no seconds"),
        ("rows.jsonl", "", "it has 0 rows, the run wrote 6"),
        ("rows.jsonl", "[1]\n[2]\n", "line 1 is not a JSON object"),
        ("timeline.jsonl", '{"fate": "used"}\n', "row 1 has no client"),
        ("run.json", "{", "it is not a JSON object"),
        ("run.json", '{"run": {"status": "happy"}}', "it does not say how the run stands"),
        ("clients.json", '{"counts": [[1, 2], [3]]}', "counts must be clients x classes"),
        ("clients.json", '{"counts": 3}', "counts must be clients x classes"),
        ("experiment.toml", b"\xff\xfe\x00", "it cannot be read as text"),
    ],
)
def test_a_damaged_file_is_named(folder, name, words, said):
    path = folder / "fedavg" / "seed-0" / name
    path.write_bytes(words if isinstance(words, bytes) else words.encode())
    before = (folder / "report.html").read_bytes()
    with pytest.raises(fs.FedstrideError) as error:
        report.write(folder)
    assert str(path) in str(error.value) and said in str(error.value) and "\n" not in str(error.value)
    assert (folder / "report.html").read_bytes() == before


def test_no_folder_no_runs(tmp_path):
    with pytest.raises(fs.FedstrideError, match="there is no folder"):
        report.write(tmp_path / "nowhere")
    with pytest.raises(fs.FedstrideError, match="no runs in"):
        report.write(tmp_path)


def test_a_place_that_cannot_be_written(folder):
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    with pytest.raises(fs.FedstrideError, match="cannot write the report into"):
        report.write(folder)
