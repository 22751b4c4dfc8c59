"""Training: one loop, schedules as data, checkpoints that survive anything."""
