"""GPUs by week for a demand forecast: when the next replica is due, what to reserve and what to rent."""
