"""What workers import. Importing it loads no FastAPI, touches no CUDA, opens no socket."""
