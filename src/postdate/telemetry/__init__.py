"""What a service tells of itself: metrics, health, the signs of life of its process. Source: ADR 36."""
