"""metrics.csv: rows appended as they come, under fixed columns."""

import csv

import pytest

from molflt.errors import InputError
from molflt.training.metrics_csv import MetricsCsv


def test_rows_are_appended_also_by_a_second_logger(tmp_path):
    """One header; absent values are empty; numbers keep every digit; a later logger goes on below."""
    path = tmp_path / "metrics.csv"
    MetricsCsv(path, ["loss", "mae"]).log_metrics({"loss": 1 / 3}, step=2)
    MetricsCsv(path, ["loss", "mae"]).log_metrics({"loss": 0.1, "mae": 2.5}, step=4)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4"]
    assert [float(row["loss"]) for row in rows] == [1 / 3, 0.1]
    assert [row["mae"] for row in rows] == ["", "2.5"]


def test_a_metric_without_a_column_is_an_error(tmp_path):
    """It would otherwise be lost in silence."""
    with pytest.raises(ValueError, match="other"):
        MetricsCsv(tmp_path / "metrics.csv", ["loss"]).log_metrics({"other": 1.0}, step=1)


def test_a_row_that_cannot_be_written_is_one_line(tmp_path):
    """The folder has gone; the line names the file and the cause."""
    path = tmp_path / "gone" / "metrics.csv"
    with pytest.raises(InputError, match=rf"^cannot write {path}: No such file or directory; .*--resume"):
        MetricsCsv(path, ["loss"]).log_metrics({"loss": 1.0}, step=1)
