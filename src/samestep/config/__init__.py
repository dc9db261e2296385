"""YAML or JSON -> one frozen, validated object; every mistake reported at once."""

from samestep.config.distributed import DistributedConfig
from samestep.config.loading import LoadedConfig, load_config, override_config, read_config
from samestep.config.schema import Config

__all__ = ["Config", "DistributedConfig", "LoadedConfig", "load_config", "override_config", "read_config"]
