"""Explains why a request was slow: its time by terms, the expected time, and the decisions about it."""

from headway.diagnosis.explain import Explanation, explain, slowest
from headway.diagnosis.history import History, read

__all__ = ["Explanation", "History", "explain", "read", "slowest"]
