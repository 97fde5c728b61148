"""Results of `molflt bench quality` survive their file and make the table that they say."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from molflt.bench.quality_results import RunRow, mean_and_std, quality_table, read_rows, write_rows
from molflt.errors import InputError

ROW = RunRow("open", "flt", 0, "val", 0.25, 0.8, 0.7, 12345, 3, 75, 61.5, "2.13.0", "abc")
ROWS = [
    ROW,
    replace(ROW, seed=1, energy_mae=0.35, cpu_seconds=62.5),
    replace(ROW, dataset="sheets", energy_mae=0.125, energy_std=0.5),
    replace(ROW, variant="performer", energy_mae=0.75),
]


def text_of(table) -> str:
    console = Console(file=io.StringIO(), width=300)
    console.print(table)
    return console.file.getvalue()


def test_rows_come_back_from_their_file(tmp_path):
    path = tmp_path / "new" / "runs.csv"
    write_rows(path, ROWS)
    assert read_rows(path) == ROWS
    assert [entry.name for entry in path.parent.iterdir()] == ["runs.csv"]
    assert read_rows(tmp_path / "absent.csv") == []


@pytest.mark.parametrize(
    "change",
    [lambda t: t.replace("0.250000", "good"), lambda t: t.replace(",seed", ",sid"), lambda t: t + "\nx,y"],
)
def test_another_table_is_refused_in_one_line(tmp_path, change):
    path = tmp_path / "runs.csv"
    write_rows(path, ROWS)
    path.write_text(change(path.read_text()))
    with pytest.raises(InputError, match="no table of runs") as caught:
        read_rows(path)
    assert "\n" not in str(caught.value)


def test_mean_and_std_are_those_of_a_sample():
    # mean 3, deviations -2, 0, 2: variance 8 / 2
    assert mean_and_std([1.0, 3.0, 5.0]) == "3.0000 ± 2.0000"
    assert mean_and_std([0.5]) == "0.5000"
    assert mean_and_std([]) == ""


def test_the_table_has_a_row_per_variant_and_a_column_per_split():
    lines = text_of(quality_table(ROWS, {"performer": "The Performer", "flt": "FLT"}, "title")).splitlines()
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in lines
        if "│" in line
    }
    assert list(rows)[:2] == ["The Performer", "FLT"]
    # 0.25 and 0.35; seconds (61.5 + 62.5 + 61.5) / 3
    assert rows["FLT"] == ["0.3000 ± 0.0707", "0.1250", "2", "12,345", "62"]
    assert rows["The Performer"] == ["0.7500", "", "1", "12,345", "62"]
    assert rows["std of the labels"][:2] == ["0.8000", "0.5000"]
    assert rows["median of the training labels"][:2] == ["0.7000", "0.7000"]
