"""What the supervision decides when something is lost: checks, budgets, sizes, signs of life."""
