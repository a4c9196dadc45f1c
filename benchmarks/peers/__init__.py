"""Other PostgreSQL queues for Python, measured the same way as ours."""
