"""How the core copes with adapters that fail, answer late, or never answer. Source: ADR 19, ADR 45."""
