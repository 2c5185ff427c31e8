"""Forecasts of demand as quantiles. Every forecaster is fitted on past values only, unless it declares `cheats`."""
