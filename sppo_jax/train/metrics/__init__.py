"""What a run tells: metrics, events, trackers."""
