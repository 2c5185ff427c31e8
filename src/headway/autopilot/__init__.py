"""Tries, judges and keeps or reverts a change of a running fleet, without I/O and without a clock."""
