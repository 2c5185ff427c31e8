"""Demand series to quantiles of what comes next. Every forecaster is fitted on the past alone, unless it says so."""
