"""Delivery: claims due messages of a store, sends them to their destinations, and finishes the claims."""
