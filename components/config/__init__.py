"""RunConfig: torch-free, validates anywhere, the source of docs/configuration.md and of the JSON schema."""

from colchis.components.config.files import SECTIONS, from_parameters, load, override, read_document, to_parameters
from colchis.components.config.run_config import RunConfig, parse
from colchis.components.config.sections import (
    AlgorithmConfig,
    DatasetConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GraderConfig,
    LoopConfig,
    ModelConfig,
    OwnEnvironmentConfig,
    ReasoningGymConfig,
    ReloadConfig,
    RolloutConfig,
    TrainerConfig,
)

__all__ = [
    "SECTIONS",
    "AlgorithmConfig",
    "DatasetConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GraderConfig",
    "LoopConfig",
    "ModelConfig",
    "OwnEnvironmentConfig",
    "ReasoningGymConfig",
    "ReloadConfig",
    "RolloutConfig",
    "RunConfig",
    "TrainerConfig",
    "from_parameters",
    "load",
    "override",
    "parse",
    "read_document",
    "to_parameters",
]
