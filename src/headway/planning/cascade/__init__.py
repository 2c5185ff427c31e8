"""Cascade plans: thresholds, GPUs for each model, and their shapes (Cascadia, section 3). In reading order:

problem         the problem, its targets, and the plan that answers it
request         a scenario as a problem, with what rehearsals of its plans need
replica_sets    the sets of replicas that a stage may have
latency_bounds  lower bounds on a stage's p95 latency
latency         a stage's p95 latency by simulation, and the file of known ones
allocation      GPUs for stages: dynamic programs
deployment      GPUs and replica sets for one routing
routing         thresholds, what they send where, and the objective
search          the bi-level search over routings and deployments
candidates      the plans of a search that are worth rehearsing
planners        each model alone, shorter cascades, and the baselines of the paper
rehearsal       plans simulated whole, and tightened until one meets the target
regret          the loss of plans whose judge is wrong
plan            the best plan of all, with its confidence: what the command makes
answer          what the command prints, and the page
replanning      when a served cascade needs a new plan, and how replicas change (no I/O)
replan          `cascade.replan` of a scenario: the pools, the planner and the policies that follow it
"""
