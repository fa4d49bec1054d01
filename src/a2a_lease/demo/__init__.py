"""The main job, on real processes: a replica is killed, and its tasks end."""
