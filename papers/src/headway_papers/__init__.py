"""Papers on LLM serving reproduced with Headway, and policies ranked over grids of fleets, workloads and loads."""
