"""Why a request was slow: where its time went, beside what was expected of it, and what was decided about it."""

from headway.diagnosis.explain import Explanation, explain, slowest
from headway.diagnosis.history import History, read

__all__ = ["Explanation", "History", "explain", "read", "slowest"]
