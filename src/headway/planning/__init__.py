"""Pure planners: a problem in, a plan out. What a simulator would say is asked of an Evaluator that is handed in."""
