"""What a run tells about itself: statistics, metrics and the trace."""
