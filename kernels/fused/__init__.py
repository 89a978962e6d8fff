"""What stands beside the experts as one operation: norms, rotation, routers and their scores."""
