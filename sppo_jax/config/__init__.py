"""Settings of a run: sections that convert and check themselves, YAML in and out, named and imported model shapes."""

from sppo_jax.config.data import DataConfig, RecallConfig
from sppo_jax.config.delta import DeltaConfig
from sppo_jax.config.experts import ExpertsConfig
from sppo_jax.config.hardware import HardwareConfig
from sppo_jax.config.load import config_from_dict, load_config, to_dict, to_yaml
from sppo_jax.config.model import ModelConfig
from sppo_jax.config.rope import RopeConfig
from sppo_jax.config.section import ConfigError
from sppo_jax.config.sections import (
    CheckpointConfig,
    Config,
    MeshConfig,
    MetricsConfig,
    OptimizerConfig,
    ScheduleConfig,
    SequenceConfig,
    StashConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataConfig",
    "DeltaConfig",
    "ExpertsConfig",
    "HardwareConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RecallConfig",
    "RopeConfig",
    "ScheduleConfig",
    "SequenceConfig",
    "StashConfig",
    "TrainConfig",
    "config_from_dict",
    "load_config",
    "to_dict",
    "to_yaml",
]
