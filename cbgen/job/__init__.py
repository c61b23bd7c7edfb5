"""The batch job: knows rows and requests, and is the only place that knows both."""
