"""Forecast, measure, limit and repair forgetting."""
