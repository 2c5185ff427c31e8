"""Keys and teams with budgets, in a database."""
