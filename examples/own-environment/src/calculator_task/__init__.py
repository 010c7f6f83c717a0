"""Sums with a calculator: a multi-turn environment and a grader of one's own."""
