"""What a trained model's routers and depth steps do, in figures and pictures (`moebius analyze`)."""
