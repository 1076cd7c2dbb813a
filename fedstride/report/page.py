"""The page: the template with the table, the words and the data put in."""

import html
import json
import re
from pathlib import Path
from string import Template
from typing import Any

from fedstride.report.findings import Findings, grouped
from fedstride.report.sentences import Cell, goal_words, words
from fedstride.runs import Record

HERE = Path(__file__).parent


def render(title: str, findings: Findings, data: dict[str, Any], records: list[Record], study: str, files: str) -> str:
    """One self-contained HTML file."""
    template = (HERE / "page.html").read_text(encoding="utf-8")
    experiments = _experiments(study, records)
    for name in ("curves", "timelines", "steps", "staleness", "partition", "fairness"):
        if not data[name]:
            template = _without(template, name)
    if not experiments:
        template = _without(template, "experiments")
    escape = html.escape
    return Template(template).substitute(
        title=escape(title),
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
        headline=_bound(findings.headline) + ".",
        details="\n".join(f'<p class="about">{_bound(sentence)}</p>' for sentence in findings.details),
        notices=_notices(findings.notices),
        summary=escape(_summary(findings)),
        table=_table(findings),
        tests=escape(_tests(findings)),
        experiments=experiments,
        files=escape(files),
        data=embed(data),
    )


def embed(data: Any) -> str:
    """JSON that cannot end its script element, whatever the strings in it say."""
    words = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return words.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _bound(sentence: str) -> str:
    """Percent signs and intervals stay with their numbers."""
    return html.escape(re.sub(" (?=%|\N{PLUS-MINUS SIGN})", "\N{NO-BREAK SPACE}", sentence))


def _without(template: str, name: str) -> str:
    return re.sub(rf'<section id="{name}">.*?</section>\n', "", template, flags=re.DOTALL)


def _notices(notices: list[str]) -> str:
    return (
        '<ul class="notices">' + "".join(f"<li>{html.escape(words)}</li>" for words in notices) + "</ul>"
        if notices
        else ""
    )


def _summary(findings: Findings) -> str:
    unit = ", in percent" if findings.metric == "accuracy" else ""
    said = f"{words(findings.metric).capitalize()} at the end and at its best{unit}: mean over seeds and 95 % interval."
    if findings.target:
        said += f" What it took to reach {goal_words(findings.target)}: median and range over seeds."
    return said


def _tests(findings: Findings) -> str:
    rivals = len(findings.ranking) - len(findings.references) - 1
    said = "Differences are paired by seed; p is of a paired t test, two-sided"
    said += f", not adjusted for {rivals} comparisons." if rivals > 1 else "."
    said += " A > marks what was not reached by then." if findings.target else ""
    return said + " A round of an asynchronous method is one server update."


def _table(findings: Findings) -> str:
    columns, groups, ways = findings.columns, "", len(findings.columns) - 5
    if ways and findings.target:
        goal = html.escape(goal_words(findings.target))
        groups = (
            f'<tr><td class="group" colspan="3"></td><th class="group" colspan="{ways}" scope="colgroup">'
            f'to reach {goal}</th><td class="group" colspan="2"></td></tr>'
        )
    heads = "".join(f'<th scope="col"><button type="button">{html.escape(name)}</button></th>' for name in columns)
    winner = next((label for label, cells in findings.table.items() if cells[-2].text == "best"), None)
    rows = []
    for label, (name, *cells) in findings.table.items():
        kind = ' class="best"' if label == winner else ""
        rows.append(f"<tr{kind}>{_cell('th', name)}{''.join(_cell('td', cell) for cell in cells)}</tr>")
    return f"<thead>{groups}<tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody>"


def _cell(tag: str, cell: Cell) -> str:
    scope = ' scope="row"' if tag == "th" else ""
    title = f' title="{html.escape(cell.title)}"' if cell.title else ""
    note = f"<small>{html.escape(cell.note)}</small>" if cell.note else ""
    return f'<{tag}{scope} data-value="{html.escape(str(cell.value))}"{title}>{html.escape(cell.text)}{note}</{tag}>'


def _experiments(study: str, records: list[Record]) -> str:
    """The comparison, then a fold a method with all of its seeds."""
    parts = [("The whole comparison", study)] if study.strip() else []
    for label, group in grouped(records).items():
        texts = [
            f"# seed {record.seed}\n{record.experiment.strip()}\n" for record in group if record.experiment.strip()
        ]
        if texts:
            parts.append((label, "\n".join(texts)))
    return "\n".join(
        f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>"
        for name, text in parts
    )
