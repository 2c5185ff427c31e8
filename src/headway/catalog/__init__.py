"""Data files with sources: GPUs, models, engines and step-time coefficients, and functions that look them up."""

from headway.catalog.find import find_model
from headway.catalog.hf import model_from_config
from headway.catalog.load import coefficients, engine, engines, gpu, gpus, model, models

__all__ = ["coefficients", "engine", "engines", "find_model", "gpu", "gpus", "model", "model_from_config", "models"]
