"""Pure planners: they turn a problem into a plan. Simulation results come from an Evaluator that is passed in."""
