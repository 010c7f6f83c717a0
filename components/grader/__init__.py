"""The grader frame: faces behind one `grade`, and verdicts that hold a score or the reason why there is none."""

from colchis.components.grader.faces import NoScore, Score, name_and_version
from colchis.components.grader.grading import Grader, grade

__all__ = ["Grader", "NoScore", "Score", "grade", "name_and_version"]
