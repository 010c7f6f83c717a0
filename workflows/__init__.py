"""The DAGs and what launches them. Never imported in a pod."""
