"""Arrays wherever they are used: slots of buffers, and the dtypes of compute and of sums."""
