"""Protection of the core from adapters that fail, answer late, or never answer. Source: ADR 45, ADR 49."""
