"""The owner of the C engine on a server: one worker thread with its models, runs and samplers."""
