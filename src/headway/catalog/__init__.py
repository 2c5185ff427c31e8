"""Data files with sources for GPUs, models, engines and step-time coefficients, and their lookup functions."""

from headway.catalog.find import config_of, find_model, is_repository, model_of_config
from headway.catalog.hf import model_from_config
from headway.catalog.load import coefficients, engine, engine_on, engines, gpu, gpus, model, models

__all__ = [
    "coefficients", "config_of", "engine", "engine_on", "engines", "find_model", "gpu", "gpus", "is_repository",
    "model", "model_from_config", "model_of_config", "models",
]  # fmt: skip
