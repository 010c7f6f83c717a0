"""The generation frame: groups of trajectories from engines that serve the declared policy version."""

from colchis.components.rollout.engines import Adapter, Engine, Engines, EngineStatus
from colchis.components.rollout.groups import PromptGroup, RolloutStats, rollout_groups
from colchis.components.rollout.sampling import Sampling, sampling_seed
from colchis.components.rollout.versions import Wanted

__all__ = [
    "Adapter",
    "Engine",
    "EngineStatus",
    "Engines",
    "PromptGroup",
    "RolloutStats",
    "Sampling",
    "Wanted",
    "rollout_groups",
    "sampling_seed",
]
