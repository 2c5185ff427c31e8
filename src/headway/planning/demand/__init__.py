"""GPUs by week for a demand forecast: when the next replica is due, how many GPUs to reserve, and how many to rent."""
