"""Scores of checkpoints on labelled splits, with intervals, breakdowns and reports."""

from molflt.evaluation.evaluate import Evaluation, evaluate, evaluate_checkpoints
from molflt.evaluation.leaderboard import check_leaderboard, make_leaderboard, score_leaderboard
from molflt.evaluation.predictions import SplitPredictions, mean_predictions, predict_split
from molflt.evaluation.ranks import joined_processes
from molflt.evaluation.report import write_report
from molflt.evaluation.scores import METRICS, SplitScore, bootstrap_intervals, energy_scores, score
from molflt.evaluation.systems import GROUPINGS, System, describe_systems
from molflt.evaluation.tabulation import scores_json, write_csv

__all__ = [
    "GROUPINGS",
    "METRICS",
    "Evaluation",
    "SplitPredictions",
    "SplitScore",
    "System",
    "bootstrap_intervals",
    "check_leaderboard",
    "describe_systems",
    "energy_scores",
    "evaluate",
    "evaluate_checkpoints",
    "joined_processes",
    "make_leaderboard",
    "mean_predictions",
    "predict_split",
    "score",
    "score_leaderboard",
    "scores_json",
    "write_csv",
    "write_report",
]
