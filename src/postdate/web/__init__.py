"""The operator's page: a thin layer over :mod:`postdate.operations`. Source: ADR 35."""

from postdate.web.acting import Actions
from postdate.web.app import dashboard

__all__ = ["Actions", "dashboard"]
