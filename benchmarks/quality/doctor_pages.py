"""The tables of the doctor's benchmark as Markdown."""

from __future__ import annotations

from doctor_tables import shown


def table(head, rows):
    """Markdown; numbers to the right."""
    marks = ["---" if i == 0 else "---:" for i in range(len(head))]
    return "\n".join(f"| {' | '.join(str(cell) for cell in row)} |" for row in [head, marks, *rows])


def confusion(found):
    """Both halves, and the runs apart."""
    titles = {"fitted on": "chosen on", "judged on": "**the other half**", "apart": "**runs apart**"}
    rows = []
    for half, title in titles.items():
        for truth, counts in found[half].items():
            told = counts["in time"] if truth == "collapsed" else "-"
            rows.append([f"{title}, {truth}", counts["runs"], counts["named"], told, counts["at the end"]])
    head = ["settings, truth", "runs", "finding above a note", "within 5% of the run after the onset", "at the end"]
    return table(head, rows)


def chosen(found):
    """Each line, and the values that are as good on the half it was chosen on."""
    good = found["as good"]
    rows = [
        [name, value, ", ".join(f"{each:g}" for each in sorted({one[name] for one in good}))]
        for name, value in found["thresholds"].items()
    ]
    return table(["line", "chosen", "as good, with some values of the others"], rows)


def rescue(rows):
    """A setting a row."""
    cells = []
    for row in rows:
        after, test = (shown(row[name]) if row[name] else "-" for name in ("after", "test after"))
        ill, cured = f"{row['collapsed before']} of {row['seeds']}", f"{row['collapsed after']} of {row['named']}"
        held = [shown(row["start"]), shown(row["before"]), after]
        cells.append(
            [row["setting"], f"{row['named']} of {row['seeds']}", ill, cured, *held, shown(row["test before"]), test]
        )
    head = ["run", "named at its end", "collapsed", "collapsed after the remedy", "R@1 untrained", "R@1 ill"]
    return table([*head, "R@1 after the remedy", "unseen classes, ill", "after the remedy"], cells)


def changes(rows):
    """What the remedies were."""
    return table(
        ["run", "what the remedy changed"], [[row["setting"], " or ".join(row["remedy"]) or "-"] for row in rows]
    )


def softened(rows):
    """Unseen classes, five ways of mining."""
    arms = ["hard", "hard, annealed", "semihard", "hardest", "hardest, annealed"]
    cells = [[f"{row['data']}, {row['rate']:g}", *(shown(row[arm]["test"]) for arm in arms)] for row in rows]
    spreads = [
        [
            f"{row['data']}, {row['rate']:g}",
            *(f"{sum(row[arm]['spread']) / len(row[arm]['spread']):.3g}" for arm in arms),
        ]
        for row in rows
    ]
    one = table(["R@1 on unseen classes: data, rate of Adam", *arms], cells)
    return one + "\n\n" + table(["spread at the end: data, rate of Adam", *arms], spreads)


def prevented(rows):
    """Where plain hard mining collapses."""
    cells = [
        [
            row["setting"],
            row["arm"],
            f"{row['collapsed']} of {len(row['test'])}",
            shown(row["start"]),
            shown(row["held-out"]),
            shown(row["test"]),
        ]
        for row in rows
    ]
    return table(["setting", "mining", "collapsed", "R@1 untrained", "R@1", "unseen classes"], cells)


def mining(rows):
    """One line for each number of rows, width and margin."""
    order = sorted(rows, key=lambda row: (row["mining"], row["rows"], row["margin"], row["width"]))
    cells = [
        [
            row["mining"],
            row["rows"],
            f"{row['margin']:g}",
            row["width"],
            len(row["test"]),
            f"{_mean(row['spread']):.3g}",
            f"{_mean(row['spread']) / _mean(row['start spread']):.3g}",
            f"{_mean(row['rank']):.1f}",
            f"{100 * _mean(row['start']):.1f}",
            f"{100 * _mean(row['R@1']):.1f}",
            f"{100 * _mean(row['test']):.1f}",
        ]
        for row in order
    ]
    head = ["mining", "N", "margin", "n", "seeds", "spread", "of its start", "rank", "R@1 untrained", "R@1"]
    return table([*head, "unseen"], cells)


def _mean(values):
    return sum(values) / len(values)


def every_run(runs):
    """All runs of the calibration."""
    order = sorted(runs, key=lambda run: (run["truth"], run["run"]))
    cells = [
        [
            run["run"],
            run["truth"],
            run["half"],
            _or(run["onset"]),
            _or(run["named"]),
            ", ".join(run["as"]) or "-",
            f"{100 * run['R@1 start']:.0f}",
            f"{100 * run['R@1 end']:.0f}",
            run["rank end"],
            run["spread end"],
        ]
        for run in order
    ]
    head = ["run", "truth", "half", "onset", "named at", "as", "R@1 untrained", "R@1 at the end", "rank", "spread"]
    return table(head, cells)


def _or(value):
    return "-" if value is None else value


def page(found):
    """The whole of results/doctor.md."""
    calibration = found["calibration"]
    runs = calibration["runs"]
    return (
        "\n\n".join(
            [
                "# The doctor: calibration, rescue, prevention, and mining in trained networks",
                f"{len(runs)} runs of {found['steps']} steps for the calibration. {found['machine']} Intervals are "
                "95%, Student's t over three seeds. R@1 is that of held-out samples of the training classes, unless "
                "unseen classes are named.",
                "## Confusion",
                confusion(calibration),
                "## The lines",
                chosen(calibration),
                "## Rescue",
                rescue(found["rescue"]),
                changes(found["rescue"]),
                "## Annealed hard mining",
                softened(found["softened"]),
                prevented(found["prevented"]),
                "## Mining in trained networks, glyphs",
                mining(found["mining"]),
                "## Every run of the calibration",
                every_run(runs),
            ]
        )
        + "\n"
    )


def filled(text, found):
    """The page in docs/ with its tables made anew, each between two marks."""
    parts = {
        "confusion": confusion(found["calibration"]),
        "lines": chosen(found["calibration"]),
        "rescue": rescue(found["rescue"]),
        "softened": softened(found["softened"]),
        "prevented": prevented(found["prevented"]),
        "mining": mining(found["mining"]),
    }
    for name, body in parts.items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        before, rest = text.split(begin)
        text = before + begin + "\n\n" + body + "\n\n" + end + rest.split(end)[1]
    return text
