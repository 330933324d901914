"""How the core copes with adapters that fail, answer late, or never answer. Source: ADR 45, ADR 49."""
