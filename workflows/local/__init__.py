"""Runs the rendered Argo manifests on one machine: an interpreter, and the processes that it starts."""
