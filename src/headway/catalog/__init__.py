"""Facts as data files: GPUs, models, engines and their step-time coefficients, each with its source."""

from headway.catalog.hf import model_from_config
from headway.catalog.load import coefficients, engine, engines, gpu, gpus, model, models

__all__ = ["coefficients", "engine", "engines", "gpu", "gpus", "model", "model_from_config", "models"]
