"""Metrics, health and liveness of a service. Source: ADR 36."""
