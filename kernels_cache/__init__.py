"""What has been built: keys, artifacts and the stores that keep them. Imports nothing of ours."""
