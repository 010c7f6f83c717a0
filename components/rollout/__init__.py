"""The generation frame: groups of trajectories from engines that serve the declared policy version."""

from colchis.components.rollout.engines import Engine, Engines, EngineStatus
from colchis.components.rollout.groups import PromptGroup, RolloutStats, rollout_groups
from colchis.components.rollout.sampling import Sampling, sampling_seed

__all__ = [
    "Engine",
    "EngineStatus",
    "Engines",
    "PromptGroup",
    "RolloutStats",
    "Sampling",
    "rollout_groups",
    "sampling_seed",
]
