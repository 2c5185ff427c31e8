"""How a change of a running fleet is tried, judged, and kept or taken back: without I/O, and without a clock."""
