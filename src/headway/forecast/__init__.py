"""Forecasts of demand as quantiles. Every forecaster is fitted on the past alone, unless it declares `cheats`."""
