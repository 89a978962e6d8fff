"""Commands about models: recipes, configurations and evaluation."""
