"""The state of a request."""

import inspect

from headway.control.live import Live
from headway.core.request import Request


def test_a_row_of_a_workload_makes_an_instance() -> None:
    """Parameters and defaults are those of `Request`, which sources of requests know."""
    parameters = list(inspect.signature(Live).parameters.values())
    assert [each.name for each in parameters] == list(Request.__struct_fields__)
    required = len(parameters) - len(Request.__struct_defaults__)
    assert [each.default for each in parameters[required:]] == list(Request.__struct_defaults__)
    row = (7, 1.5, 100, 20, "m", 2)
    assert [getattr(Live(*row), each.name) for each in parameters] == [
        getattr(Request(*row), each.name) for each in parameters
    ]
